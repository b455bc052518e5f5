"""What a host is before an agent is there: the script that looks, what it tells, and what of it is a problem.

Pure but for reading the two scripts beside it. All that a host says is cleaned here.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from console.clean import clean
from console.config_nodes import Node
from console.errors import DeployFailed
from console.format import size_text
from console.transports.agent_command import DEFAULT_AGENT

VALUE_CHARACTERS = 1000
STATE_FREE_BYTES = 64 << 20
"""What the agent's journal and logs want to have."""

_NETWORK = ("nfs", "cifs", "smb", "9p", "lustre", "gpfs", "beegfs", "ceph", "gluster", "fuse.sshfs", "afs", "virtiofs")


@dataclass(frozen=True)
class Place:
    """A directory, or ``near``, the nearest one above it that is there. ``free_bytes`` None: not known."""

    directory: str
    near: str
    filesystem: str
    options: frozenset[str]
    free_bytes: int | None
    is_writable: bool

    @property
    def is_shared(self) -> bool:
        return self.filesystem.startswith(_NETWORK)


@dataclass(frozen=True)
class HostFacts:
    """What the script told; None and empty where there is none of it.

    ``link``: where consoles find the agent. ``python_said``: what a Python answered that does not fit.
    ``candidates``: other Pythons there, path to whether torch is in it. ``previous``: where the former version lies.
    ``ends_at_logout``: the host ends what an account has started when it logs out.
    """

    system: str
    machine: str
    home: str
    has_home: bool
    link: str
    target: Place
    state: Place
    python: str | None
    python_version: str | None
    python_fits: bool
    python_said: str
    torch_version: str | None
    torch_cuda: str
    missing: tuple[str, ...]
    candidates: Mapping[str, bool]
    driver: str | None
    has_gpu: bool
    previous: str | None
    ends_at_logout: bool


@dataclass(frozen=True)
class Problem:
    """``error``: nothing is deployed. ``text`` names what is missing, ``fix`` what helps."""

    severity: Literal["error", "warning"]
    code: str
    text: str
    fix: str

    def line(self) -> str:
        return f"{self.text}; {self.fix}"


def link_of(node: Node) -> str:
    """Return where the node's agent is found, as the host's shell reads it. Raises: DeployFailed if no file is."""
    if not node.agent:
        return DEFAULT_AGENT
    if len(node.agent) == 1 and node.agent[0].endswith(".pyz") and node.agent[0].startswith(("/", "~/")):
        return node.agent[0]
    text = (
        f"{node.name}: its agent is {' '.join(node.agent)}, no single file; leave agent out, or name an absolute .pyz"
    )
    raise DeployFailed(text)


def check_script(node: Node, token: str) -> str:
    """Return the script that looks at the node's host. Raises: DeployFailed."""
    state = (
        _word(node.state_directory)
        if node.state_directory
        else '"${XDG_STATE_HOME:-$HOME/.local/state}"/glowplug-agent'
    )
    return (
        preamble(node, token, "check_python.py") + f"link={_word(link_of(node))}\nstate={state}\n" + _text("check.sh")
    )


def begin_script(node: Node, token: str) -> str:
    """Return the script that becomes Python, which says that it is ready and reads a request."""
    return preamble(node, token, "begin.py") + 'exec "$@" -c "$code" "$token"\n'


def preamble(node: Node, token: str, code: str) -> str:
    """Return assignments for sh: the token, a Python text on one line, and the node's python as "$@"."""
    python = " ".join(_word(item) for item in node.python)
    packed = base64.b64encode(_text(code).encode()).decode()  # `conda run` takes no line breaks in arguments
    line = f"import base64; exec(base64.b64decode('{packed}'))"
    return f"token={shlex.quote(token)}\ncode={shlex.quote(line)}\nset -- {python}\n"


def read_facts(node: Node, lines: Mapping[str, str], candidates: tuple[str, ...]) -> HostFacts:
    """Return what the script's lines say of the node's host. Raises: DeployFailed if its end is missing."""
    if lines.get("end") != "yes":
        raise DeployFailed(f"{node.name}: the host's answer has no end")
    found = {name: clean(value, VALUE_CHARACTERS) for name, value in lines.items()}
    said = found.get("python.said", "")
    error, is_python = found.get("python.error", ""), said.startswith("Python ")
    return HostFacts(
        system=found.get("system", ""),
        machine=found.get("machine", ""),
        home=found.get("home", ""),
        has_home="home.there" in found,
        link=found.get("link", ""),
        target=_place(found, "target"),
        state=_place(found, "state"),
        python=found.get("python"),
        python_version=found.get("python.version") or (said.removeprefix("Python ") if is_python else None),
        python_fits="python.fits" in found,
        python_said="" if is_python else error or said,
        torch_version=found.get("torch.version"),
        torch_cuda=found.get("torch.cuda", ""),
        missing=tuple(found.get("missing", "").split()),
        candidates=_candidates(candidates),
        driver=found.get("driver"),
        has_gpu="gpu" in found,
        previous=found.get("previous"),
        ends_at_logout="ends_at_logout" in found,
    )


def find_problems(node: Node, facts: HostFacts, needed_bytes: int) -> tuple[Problem, ...]:
    """Return what stands in the way, errors first; ``needed_bytes``: for the new version."""
    found = (*_of_system(facts), *_of_home(facts), *_of_target(facts, needed_bytes), *_of_state(facts))
    found = (*found, *_of_python(node, facts), *_of_gpu(facts))
    return tuple(sorted(found, key=lambda problem: problem.severity != "error"))


def _of_system(facts: HostFacts) -> Iterator[Problem]:
    if facts.system != "Linux":
        yield Problem("error", "system", f"the host runs {facts.system or '?'}", "the agent needs Linux")
    if facts.machine not in ("x86_64", "aarch64"):
        text = f"the host is a {facts.machine or '?'}"
        yield Problem("warning", "machine", text, "torch for GPUs is there for x86_64 and aarch64")
    if facts.ends_at_logout:
        text = "systemd ends the agent there, with all that is warm, when its user logs out (KillUserProcesses=yes)"
        yield Problem("warning", "logout", text, "run it as a user service, with linger: deploy/glowplug-agent.service")


def _of_home(facts: HostFacts) -> Iterator[Problem]:
    if _is_homeless(facts, facts.target) or _is_homeless(facts, facts.state):
        fix = "create it, or give the node an agent and a state_directory outside of it"
        yield Problem("error", "home_missing", f"the home directory {facts.home or '(none)'} is missing", fix)


def _is_homeless(facts: HostFacts, place: Place) -> bool:
    """Whether a place lies in a home that is missing, which is one problem, not one a place."""
    return not facts.has_home and place.directory.startswith(facts.home)


def _of_target(facts: HostFacts, needed_bytes: int) -> Iterator[Problem]:
    place = facts.target
    if not (place.is_writable or _is_homeless(facts, place)):
        fix = f"make {place.near} writable for this user, or set agent to a path that is"
        yield Problem("error", "not_writable", f"{place.directory} can't be written to", fix)
    if place.free_bytes is not None and place.free_bytes < needed_bytes:
        text = f"{place.directory} has {size_text(place.free_bytes)} free, {size_text(needed_bytes)} are needed"
        yield Problem("error", "full", text, "free some there, or set agent to a path with room")
    if place.is_shared:
        text = f"{place.directory} is on {place.filesystem}: what is deployed there is every host's that shares it"
        yield Problem("warning", "target_shared", text, "to upgrade hosts one by one, set agent to a local path")


def _of_state(facts: HostFacts) -> Iterator[Problem]:
    place = facts.state
    if not (place.is_writable or _is_homeless(facts, place)):
        fix = f"make {place.near} writable for this user, or set state_directory to a path that is"
        yield Problem("error", "state_not_writable", f"the agent's state {place.directory} can't be written to", fix)
    if place.free_bytes is not None and place.free_bytes < STATE_FREE_BYTES:
        text = f"the agent's state {place.directory} has {size_text(place.free_bytes)} free"
        fix = f"free {size_text(STATE_FREE_BYTES)}, or set state_directory: a full one keeps no journal"
        yield Problem("warning", "state_full", text, fix)
    if place.is_shared:
        text = f"the agent's state and sockets {place.directory} are on {place.filesystem}"
        fix = "set state_directory to a local directory, or hosts that share it lock each other out"
        yield Problem("warning", "state_shared", text, fix)
    if "noexec" in place.options:
        text = f"the agent's state {place.directory} is mounted noexec, and compiled kernels there can't be loaded"
        yield Problem("warning", "state_noexec", text, "set state_directory, or a recipe's compile.cache_directory")


def _of_python(node: Node, facts: HostFacts) -> Iterator[Problem]:
    name = " ".join(node.python)
    if not facts.python_fits:
        if facts.python_version:
            what = f"is {facts.python_version}"
        else:
            what = f"can't be run: {facts.python_said}" if facts.python_said else "is not there"
        text = f"no Python 3.10 or newer: {name} {what}"
        yield Problem("error", "python", text, _other_python(facts, needs_torch=False))
        return
    if facts.torch_version is None:
        fix = _other_python(facts, needs_torch=True)
        yield Problem("warning", "torch", f"{name} has no torch: only tier cached can be reached", fix)
        return
    missing = [word for word in facts.missing if word != "cuda.bindings" or facts.driver]
    if missing:
        packages = " ".join(word.replace("cuda.bindings", "cuda-python") for word in missing)
        fix = f"{facts.python} -m pip install {packages}"
        yield Problem("warning", "packages", f"{name} has torch but not {', '.join(missing)}", fix)
    if facts.driver and not facts.torch_cuda:
        text = f"{name} has torch {facts.torch_version}, a build for CPUs, and the host has an NVIDIA driver"
        yield Problem("warning", "torch_cpu", text, "install a CUDA build of torch there")


def _of_gpu(facts: HostFacts) -> Iterator[Problem]:
    if facts.driver:
        return
    if facts.has_gpu:
        text = "an NVIDIA device is there, and its driver is not loaded (/proc/driver/nvidia/version)"
        yield Problem(
            "warning", "driver", text, "install or load it (modprobe nvidia); until then only the CPU is used"
        )
    elif facts.torch_cuda:
        text = f"no NVIDIA driver or device, though torch {facts.torch_version} is a build for GPUs"
        yield Problem("warning", "driver", text, "in a container pass the GPUs in; else only the CPU is used")


def _other_python(facts: HostFacts, needs_torch: bool) -> str:
    fitting = [path for path, has_torch in facts.candidates.items() if has_torch or not needs_torch]
    best = sorted(fitting, key=lambda path: not facts.candidates[path])[:1]
    if best:
        return f'set python = "{best[0]}" for the node, which fits'
    packages = "torch safetensors transformers"
    if needs_torch and (facts.python or "").startswith("/usr/bin/"):  # which distributions keep pip out of
        made = f"{facts.python} -m venv ~/venv && ~/venv/bin/pip install {packages}"
        return f'{made}, then set python = "~/venv/bin/python" for the node'
    if needs_torch:
        return f"{facts.python} -m pip install {packages}, or set the node's python"
    return "install one (apt-get install python3) and set the node's python to it"


def _candidates(lines: tuple[str, ...]) -> dict[str, bool]:
    """Return the Pythons that fit among ``PATH KIND``."""
    split = [clean(line, VALUE_CHARACTERS).rpartition(" ") for line in lines]
    return {path: kind == "torch" for path, _, kind in split if kind in ("torch", "plain")}


def _place(found: Mapping[str, str], name: str) -> Place:
    filesystem, _, options = found.get(f"{name}.mount", "").partition(" ")
    free = found.get(f"{name}.free_kib", "")
    return Place(
        directory=found.get(name, ""),
        near=found.get(f"{name}.near", ""),
        filesystem=filesystem,
        options=frozenset(options.split(",")),
        free_bytes=int(free) * 1024 if free.isascii() and free.isdigit() else None,
        is_writable=f"{name}.writable" in found,
    )


def _word(item: str) -> str:
    """Return one word for sh; a leading ``~/`` or ``$HOME/`` is the host's home, and all else stands as it is."""
    for start in ("~/", "$HOME/"):
        if item.startswith(start):
            return f'"$HOME"/{shlex.quote(item.removeprefix(start))}'
    return shlex.quote(item)


def _text(name: str) -> str:
    return files("console.deployment").joinpath(name).read_text(encoding="utf-8")
