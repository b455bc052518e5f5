"""The embedded fleet: nodes on this machine behind a real SSH server, each with its own agent and state directory.

Everything lies in one directory: model, agent, keys, the nodes' homes, history, log.
The server is a process of its own (`console.transports.embedded`) that ends with
this one however it ends, and then ends every node and, unless it was named by the
operator, removes the directory. Killed together they leave that to the next demo
(`console.demo_lock`). Linux only, as the agent is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, NoReturn, Self

import remote_agent
from console.config import Config
from console.config_nodes import Node, shell_problem
from console.demo_check import check_host
from console.demo_lock import LOCK_NAME, TEMPORARY_PREFIX, claim, sweep_temporary
from console.demo_model import write_checkpoint
from console.demo_teardown import MARK, end_nodes
from console.errors import GlowplugError, UsageError
from console.locations import Locations
from console.rollout.settings import Gate, Rollout
from remote_agent.protocol.codec import DecodeError, decode, encode
from remote_agent.protocol.messages import FirstRequest, ModelSource, Recipe, Shape

if TYPE_CHECKING:
    from console.transports.embedded import ServerReady

RECIPE = "demo"
ROLLOUT = "demo"
START_S, STOP_S, LOOK_S = 60.0, 45.0, 0.2
_PASSED_ON = ("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
_PASSED_ON_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_")


class DemoError(GlowplugError):
    """The embedded fleet can't be started."""


class DemoLost(DemoError):
    """The embedded SSH server ended while its nodes were in use: none of them can be reached any more."""

    exit_code = 3


@dataclass(frozen=True)
class DemoSettings:
    """``model`` None: a small Llama is written. ``directory`` None: a temporary one, removed at the end."""

    nodes: int = 3
    model: Path | None = None
    directory: Path | None = None
    device: str = "auto"
    python: tuple[str, ...] = (sys.executable,)


class EmbeddedFleet:
    """Use as a context manager: inside it the nodes can be reached, after it nothing of them is left running.

    ``problems`` holds, afterwards, what had to be killed, one line each.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self._mark = secrets.token_hex(16)
        self._names = tuple(f"demo-{number}" for number in range(1, settings.nodes + 1))
        self._lock: IO[str] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self.problems: tuple[str, ...] = ()
        self.config = Config()

    @property
    def directory(self) -> Path:
        assert self._directory is not None, "enter the embedded fleet first"
        return self._directory

    @property
    def locations(self) -> Locations:
        """Where this fleet's own history, log and keys are: nothing of the operator's is touched."""
        return Locations(
            config_file=self.directory / "fleet.toml",
            history_file=self.directory / "history.db",
            log_file=self.directory / "glowplug.log",
            state_directory=self.directory,
            known_hosts_file=self.directory / "keys" / "known_hosts",
            cache_directory=self.directory / "cache",
        )

    def __enter__(self) -> Self:
        """Raises: UsageError, DemoError."""
        check_host(self._settings.model, self._settings.python)
        try:
            self._directory = self._claim_directory()
            model = self._settings.model or self._write_model()
            agent = write_agent(self.directory / "agent.pyz")
            ready = self._start_server()
        except OSError as error:
            self._stop()
            raise DemoError(f"the embedded fleet can't be set up: {error}") from error
        except BaseException:
            self._stop()
            raise
        self.config = self._build_config(ready, model, agent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    # --- the directory ----------------------------------------------------------

    def _claim_directory(self) -> Path:
        wanted = self._settings.directory
        if wanted is None:
            sweep_temporary()
            wanted = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX)).resolve()
            self._lock = claim(wanted, self._mark)
            return wanted
        try:
            wanted = wanted.expanduser().resolve()
            self._lock = self._claim_named(wanted)
        except BlockingIOError:
            raise UsageError(f"another demo runs in {wanted}, or is being ended") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: no such home
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"--directory {wanted} can't be used: {reason}") from error
        return wanted

    def _claim_named(self, wanted: Path) -> IO[str]:
        problem = shell_problem(str(wanted))
        if problem:
            raise UsageError(f"the directory's path can't be used: {problem}")
        if wanted.exists() and not wanted.is_dir():
            raise UsageError(f"--directory {wanted} can't be used: it is a file")
        if wanted.is_dir() and any(wanted.iterdir()) and not (wanted / LOCK_NAME).exists():
            raise UsageError(f"{wanted} holds other files; name an empty or a new directory")
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        return claim(wanted, self._mark)

    def _write_model(self) -> Path:
        model = self.directory / "model"
        if not (model / "config.json").exists():
            unfinished = self.directory / "model.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            write_checkpoint(unfinished)
            unfinished.rename(model)
        return model

    # --- the server ---------------------------------------------------------------

    def _start_server(self) -> ServerReady:
        from console.transports.embedded import ServerNode, ServerOrder, ServerReady

        keys = self.directory / "keys"
        keys.mkdir(mode=0o700, exist_ok=True)
        nodes = []
        for name in self._names:
            home = self._home(name)
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            nodes.append(ServerNode(name, str(home), str(self._state(name)), self._environment(name)))
        remove = self._settings.directory is None
        order = ServerOrder(str(self.directory), str(keys), self._mark, tuple(nodes), remove)
        assert self._lock is not None
        with (self.directory / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "console.transports.embedded"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": _with_our_packages(os.environ.get("PYTHONPATH"))},
                pass_fds=(self._lock.fileno(),),  # the directory stays locked until the server, too, has ended
                start_new_session=True,  # Ctrl-C is the console's, which then ends the server in order
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(encode(order)).encode() + b"\n")
        self._server.stdin.flush()
        line = _read_line(self._server.stdout.fileno(), START_S)
        try:
            return decode(ServerReady, json.loads(line))
        except (ValueError, DecodeError) as error:
            raise DemoError(f"the embedded SSH server did not start; see {self.directory / 'server.log'}") from error

    async def until_lost(self) -> NoReturn:
        """Wait for ever, unless the server ends. Raises: DemoLost."""
        assert self._server is not None, "enter the embedded fleet first"
        while (code := self._server.poll()) is None:  # noqa: ASYNC110 - a process is no event
            await asyncio.sleep(LOOK_S)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        raise DemoLost(f"the embedded SSH server {how}; the demo's nodes can't be reached any more")

    def _stop(self) -> None:
        """End server and nodes; when the server can't do it any more, do it here."""
        clean_end = False
        if self._server is not None:
            clean_end = _end_server(self._server)
        if self._directory is not None and not clean_end:
            states = [self._state(name) for name in self._names]
            self.problems = end_nodes(states, self._mark)
            if self._settings.directory is None:
                shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- the nodes ------------------------------------------------------------------

    def _home(self, name: str) -> Path:
        return self.directory / "nodes" / name / "home"

    def _state(self, name: str) -> Path:
        return self.directory / "nodes" / name / "state"

    def _environment(self, name: str) -> Mapping[str, str]:
        """What a login to the node finds: little of ours, and every place to write inside the node's home."""
        home = self._home(name)
        environment = {
            key: value for key, value in os.environ.items() if key in _PASSED_ON or key.startswith(_PASSED_ON_PREFIXES)
        }
        places = {
            "HOME": home,
            "TMPDIR": home / "tmp",
            "XDG_CACHE_HOME": home / "cache",
            "XDG_CONFIG_HOME": home / "config",
            "XDG_DATA_HOME": home / "data",
            "XDG_STATE_HOME": home / "state",
            "TORCHINDUCTOR_CACHE_DIR": home / "cache" / "inductor",
            "TRITON_CACHE_DIR": home / "cache" / "triton",
            "CUDA_CACHE_PATH": home / "cache" / "cuda",
            "HF_HOME": home / "cache" / "huggingface",
        }
        (home / "tmp").mkdir(exist_ok=True)
        environment.update({key: str(place) for key, place in places.items()})
        environment.update(
            {
                "USER": name,
                "LOGNAME": name,
                "SHELL": "/bin/sh",
                "HF_HUB_OFFLINE": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                MARK: self._mark,
            }
        )
        return environment

    def _build_config(self, ready: ServerReady, model: Path, agent: Path) -> Config:
        nodes = tuple(
            Node(
                name,
                host="127.0.0.1",
                user=name,
                port=ready.port,
                identity=(ready.identity,),
                known_hosts=(ready.known_hosts,),
                python=self._settings.python,
                agent=(str(agent),),
                state_directory=str(self._state(name)),
                tags=("demo",),
                recipes=(RECIPE,),
            )
            for name in self._names
        )
        request = FirstRequest(prompt_tokens=128, shapes=(Shape(1, 128),))
        recipe = Recipe(RECIPE, ModelSource(str(model)), devices=(self._settings.device,), request=request)
        gate = Gate(measure="first_request", limit_s=10.0, count=3, interval_s=1.0)
        rollout = Rollout(
            ROLLOUT, "all", RECIPE, canary=1, max_unavailable=2, max_failures=2, pause_after=(1,), gates=(gate,)
        )
        return Config(nodes, {RECIPE: recipe}, rollouts=(rollout,), path=self.directory / "fleet.toml")


def write_agent(path: Path) -> Path:
    """Write the agent as one file, as a host gets it, and return its path."""
    package = Path(remote_agent.__file__).parent
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__main__.py", "import sys\nfrom remote_agent.__main__ import main\nsys.exit(main())\n")
        for source in sorted(package.rglob("*.py")):
            archive.write(source, f"remote_agent/{source.relative_to(package)}")
    return path


def _with_our_packages(path: str | None) -> str:
    """Return a PYTHONPATH under which a child finds the very packages that run here."""
    ours = str(Path(remote_agent.__file__).parent.parent)
    return os.pathsep.join([ours, *([path] if path else [])])


def _read_line(descriptor: int, timeout_s: float) -> bytes:
    """Return one line, or what there was of it when the time was over or the stream ended."""
    until = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            break
        part = os.read(descriptor, 65536)
        if not part:
            break
        line += part
    return line


def _end_server(server: subprocess.Popen[bytes]) -> bool:
    """Cut the lifeline and wait; True if the server ended everything by itself."""
    assert server.stdin is not None
    assert server.stdout is not None
    with contextlib.suppress(OSError):
        server.stdin.close()
    try:
        code = server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        code = server.wait()
    server.stdout.close()
    return code == 0
