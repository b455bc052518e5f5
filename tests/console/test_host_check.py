"""What is said of a host's facts: one line a problem, with the number and the fix."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from console.config_nodes import Node
from console.deployment.host_check import HostFacts, begin_script, check_script, find_problems, read_facts
from console.errors import DeployFailed

NODE = Node("gpu-1", python=("/opt/venv/bin/python",))
GOOD = {
    "system": "Linux", "machine": "x86_64", "home": "/home/ann", "home.there": "yes",
    "link": "/home/ann/.local/share/glowplug/glowplug-agent.pyz",
    "target": "/home/ann/.local/share/glowplug", "target.near": "/home/ann/.local", "target.mount": "ext4 rw,relatime",
    "target.free_kib": "900000", "target.writable": "yes",
    "state": "/home/ann/.local/state/glowplug-agent", "state.near": "/home/ann/.local",
    "state.mount": "ext4 rw,relatime", "state.free_kib": "900000", "state.writable": "yes",
    "driver": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15", "gpu": "yes",
    "python": "/opt/venv/bin/python", "python.version": "3.12.3", "python.fits": "yes",
    "torch.version": "2.7.0", "torch.cuda": "12.8", "missing": "", "end": "yes",
}  # fmt: skip


def facts(*without: str, candidates: tuple[str, ...] = (), **changes: str) -> HostFacts:
    lines = {**GOOD, **{name.replace("__", "."): value for name, value in changes.items()}}
    return read_facts(NODE, {name: value for name, value in lines.items() if name not in without}, candidates)


def lines(*without: str, **changes: Any) -> list[str]:
    found = find_problems(NODE, facts(*without, **changes), needed_bytes=1_500_000)
    return [f"{problem.severity}: {problem.line()}" for problem in found]


def test_a_host_that_has_everything_has_no_problem() -> None:
    """And a host with neither a driver nor a GPU is none either, if its torch is for CPUs."""
    assert lines() == []
    assert lines("driver", "gpu", torch__cuda="", missing="cuda.bindings") == []


CASES = {
    "no directory to write to": (
        lines("target.writable", target__mount="ext4 ro"),
        "error: /home/ann/.local/share/glowplug can't be written to; "
        "make /home/ann/.local writable for this user, or set agent to a path that is",
    ),
    "full": (
        lines(target__free_kib="100"),
        "error: /home/ann/.local/share/glowplug has 102 kB free, 1.50 MB are needed; "
        "free some there, or set agent to a path with room",
    ),
    "state full": (
        lines(state__free_kib="1000"),
        "warning: the agent's state /home/ann/.local/state/glowplug-agent has 1.02 MB free; "
        "free 67.1 MB, or set state_directory: a full one keeps no journal",
    ),
    "state on NFS": (
        lines(state__mount="nfs4 rw"),
        "warning: the agent's state and sockets /home/ann/.local/state/glowplug-agent are on nfs4; "
        "set state_directory to a local directory, or hosts that share it lock each other out",
    ),
    "file on NFS": (
        lines(target__mount="nfs rw"),
        "warning: /home/ann/.local/share/glowplug is on nfs: what is deployed there is every host's that shares it; "
        "to upgrade hosts one by one, set agent to a local path",
    ),
    "noexec": (
        lines(state__mount="tmpfs rw,noexec"),
        "warning: the agent's state /home/ann/.local/state/glowplug-agent is mounted noexec, and compiled kernels "
        "there can't be loaded; set state_directory, or a recipe's compile.cache_directory",
    ),
    "no Python": (
        lines("python", "python.version", "python.fits", "torch.version", python__said="sh: 1: not found"),
        "error: no Python 3.10 or newer: /opt/venv/bin/python can't be run: sh: 1: not found; "
        "install one (apt-get install python3) and set the node's python to it",
    ),
    "an old Python": (
        lines("python", "python.version", "python.fits", "torch.version", python__said="Python 2.7.18"),
        "error: no Python 3.10 or newer: /opt/venv/bin/python is 2.7.18; "
        "install one (apt-get install python3) and set the node's python to it",
    ),
    "no torch, another has it": (
        lines("torch.version", "torch.cuda", candidates=("/usr/bin/python3 plain", "/opt/gpu/bin/python3 torch")),
        "warning: /opt/venv/bin/python has no torch: only tier cached can be reached; "
        'set python = "/opt/gpu/bin/python3" for the node, which fits',
    ),
    "no torch anywhere": (
        lines("torch.version", "torch.cuda", candidates=("/usr/bin/python3 plain", "/usr/bin/python2 old")),
        "warning: /opt/venv/bin/python has no torch: only tier cached can be reached; "
        "/opt/venv/bin/python -m pip install torch safetensors transformers, or set the node's python",
    ),
    "no torch, and the distribution's Python": (
        lines("torch.version", "torch.cuda", python="/usr/bin/python3"),
        "warning: /opt/venv/bin/python has no torch: only tier cached can be reached; "
        "/usr/bin/python3 -m venv ~/venv && ~/venv/bin/pip install torch safetensors transformers, "
        'then set python = "~/venv/bin/python" for the node',
    ),
    "torch for CPUs": (
        lines(torch__cuda=""),
        "warning: /opt/venv/bin/python has torch 2.7.0, a build for CPUs, and the host has an NVIDIA driver; "
        "install a CUDA build of torch there",
    ),
    "packages": (
        lines(missing="transformers cuda.bindings"),
        "warning: /opt/venv/bin/python has torch but not transformers, cuda.bindings; "
        "/opt/venv/bin/python -m pip install transformers cuda-python",
    ),
    "driver not loaded": (
        lines("driver"),
        "warning: an NVIDIA device is there, and its driver is not loaded (/proc/driver/nvidia/version); "
        "install or load it (modprobe nvidia); until then only the CPU is used",
    ),
    "no device in a container": (
        lines("driver", "gpu"),
        "warning: no NVIDIA driver or device, though torch 2.7.0 is a build for GPUs; "
        "in a container pass the GPUs in; else only the CPU is used",
    ),
    "not Linux": (lines(system="Darwin"), "error: the host runs Darwin; the agent needs Linux"),
    "another machine": (
        lines(machine="riscv64"),
        "warning: the host is a riscv64; torch for GPUs is there for x86_64 and aarch64",
    ),
    "ended at logout": (
        lines(ends_at_logout="yes"),
        "warning: systemd ends the agent there, with all that is warm, when its user logs out (KillUserProcesses=yes); "
        "run it as a user service, with linger: deploy/glowplug-agent.service",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_problem_is_one_line_with_its_fix(name: str) -> None:
    """Nothing else is said of a host that lacks one thing."""
    said, expected = CASES[name]

    assert said == [expected]


def test_a_missing_home_is_one_problem_wherever_it_is_needed() -> None:
    """A node whose agent and state lie elsewhere needs none."""
    gone = ("home.there", "target.writable", "state.writable")
    elsewhere = {"target": "/opt/glowplug", "target__writable": "yes", "state": "/var/lib/gp", "state__writable": "yes"}

    assert lines(*gone) == [
        "error: the home directory /home/ann is missing; "
        "create it, or give the node an agent and a state_directory outside of it"
    ]
    assert lines("home.there", **elsewhere) == []


def test_what_a_host_says_is_cleaned() -> None:
    """An escape sequence in a value reaches no terminal."""
    assert "\x1b" not in facts(torch__version="2.7\x1b]52;c;eA==\x07").torch_version  # type: ignore[operator]


def test_an_answer_that_was_cut_off_is_no_answer() -> None:
    """Half of the facts would look like a host that lacks the rest."""
    with pytest.raises(DeployFailed, match=r"^gpu-1: the host's answer has no end"):
        facts("end")


@pytest.mark.parametrize("agent", [("-m", "remote_agent"), ("agent.pyz",), ("/opt/agent",)])
def test_an_agent_that_is_no_absolute_single_file_is_not_deployed(agent: tuple[str, ...]) -> None:
    """The node's configuration says that its agent comes another way."""
    with pytest.raises(DeployFailed, match=r"its agent is .*, no single file; leave agent out"):
        check_script(Node("gpu-1", agent=agent), "token")


def test_nothing_of_a_configuration_is_read_by_the_shell() -> None:
    """Quotes, dollars and blanks in a node's python are data in both scripts, whatever the shell is called."""
    node = Node("gpu-1", python=("printf", "<%s>", 'a\'b "$(id)" `id` *'), state_directory="~/it's; here")
    for script in (begin_script(node, "token"), check_script(node, "token")):
        said = subprocess.run(["sh", "-s"], input=script, capture_output=True, text=True, check=True).stdout
        assert '<a\'b "$(id)" `id` *><-c>' in said


@pytest.mark.parametrize(
    ("kills", "user", "is_service", "ends"),
    [
        ("true", 1000, False, True),
        ("false", 1000, False, False),
        ("true", 0, False, False),
        ("true", 1000, True, False),
        (None, 1000, False, False),
    ],
)
def test_an_account_whose_processes_end_at_logout_is_told(
    kills: str | None, user: int, is_service: bool, ends: bool, tmp_path: Path
) -> None:
    """As logind is set up, but for root, for an enabled service that lingers, and where there is no logind."""
    linger = tmp_path / "linger"
    answers = {
        "id": f'[ "$1" = -u ] && echo {user} || echo ann',
        "systemctl": f"exit {int(not is_service)}",
        "busctl": "exit 1" if kills is None else f"echo b {kills}",
    }
    if is_service:
        linger.mkdir()
        (linger / "ann").touch()
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    script = check_script(Node("gpu-1", python=("true",)), "token").replace("/var/lib/systemd/linger", str(linger))
    said = subprocess.run(
        ["sh"], input=script, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}, capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip

    assert "token end=yes" in said
    assert ("token ends_at_logout=yes" in said) is ends
