"""The whole chain to one host for tests that break it: sshd, bridge, agentd, zygote, worker, and a console's fleet.

NVML alone is not this machine's: the sampler runs against one GPU in plain Python, so
that it lives on where there is no NVIDIA driver. The keeper holds files for devices.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from console.config import load
from console.config_nodes import Node
from console.fleet import Fleet, LinkFactory
from console.link import NodeLink, Timing
from console.locations import locations
from console.session import Session
from console.state import LinkStatus, RunView
from console.transports.base import Stream
from console.transports.gate import Gate
from console.transports.ssh import open_ssh
from remote_agent.protocol.messages import (
    Actor,
    Event,
    Recipe,
    RunState,
    StageStatus,
    StatusResult,
)
from tests.end_to_end.hosts import REPOSITORY, OwnHost, node_table
from tests.faults.truth import replay, rows, stored
from tests.needs import need
from tests.remote_agent import checkpoints

T = TypeVar("T")

NODE = "x"
PATIENCE_S = 90.0
TIDY_S = 30.0
SLOW_SHAPES = tuple(range(1536, 2046, 32))
TIMING = Timing(silent_beats=1.5, backoff_first_s=0.1, backoff_limit_s=0.5)

_NVML = '''\
"""The bindings themselves, every call answered as if there were one GPU."""
import sys

sys.path.remove(__file__.rpartition("/")[0])
del sys.modules[__name__]
import pynvml  # noqa: E402
from tests.remote_agent.fake_nvml import FakeGpu, FakeNvml  # noqa: E402

nvml = FakeNvml([FakeGpu()])
for name in (name for name in dir(nvml) if name.startswith("nvml")):
    setattr(pynvml, name, getattr(nvml, name))
'''


class Chain:
    """One host and how a console reaches it. Recipes: ``quick``, and ``slow`` with many shapes to warm."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        bindings, self.devices = directory / "nvml", directory / "dev"
        bindings.mkdir()
        (bindings / "pynvml.py").write_text(_NVML)
        self.devices.mkdir()
        for name in ("nvidiactl", "nvidia0"):
            (self.devices / name).touch()
        self.host = OwnHost(directory / "host", environment={"PYTHONPATH": f"{bindings}:{REPOSITORY}"}).start()
        model = checkpoints.write_llama(directory / "model", hidden_size=128, max_position_embeddings=2048)
        shapes = ", ".join(f"{{ batch = 1, tokens = {tokens} }}" for tokens in SLOW_SHAPES)
        settings = f'model = {{ path = "{model}" }}\ndevices = ["cpu"]\n'
        self.config = directory / "fleet.toml"
        self.config.write_text(
            node_table(NODE, self.host.sshd, agent=["-m", "remote_agent"])
            + f"[recipes.quick]\n{settings}[recipes.slow]\n{settings}request = {{ shapes = [{shapes}] }}\n"
        )
        self.start_agent()

    def start_agent(self) -> None:
        """Start the agent as its user would, with the folder that stands for this host's devices.

        One that a bridge starts after this has ended looks for real devices, and starts no keeper.
        """
        server = self.host.sshd
        options = ["-F", "none", "-i", str(server.user_key), "-o", f"UserKnownHostsFile={server.known_hosts}"]
        command = f"{sys.executable} -m remote_agent agentd --devices-folder {self.devices}"
        argv = [need("ssh", "openssh-client"), *options, "-p", str(server.port), "127.0.0.1", command]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=60)

    def recipe(self, name: str, mark: str, **changes: object) -> Recipe:
        """Return a recipe that shares no standby with one of another ``mark``."""
        return replace(load(self.config).recipe(name), environment={"ROUND": mark}, **changes)  # type: ignore[arg-type]

    @asynccontextmanager
    async def watched(self, history: Path) -> AsyncIterator[Watch]:
        """A console that follows the host and stores what it tells; quick to see silence and to come back."""
        fleet = Fleet(load(self.config), history, actor=Actor("grace", "console"), links=_links(self.directory))
        async with fleet:
            yield Watch(self, fleet, history)

    def devices_held_by(self, pid: int) -> set[str]:
        """Return which of the files for devices a process has open."""
        targets = (link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
        return {target.name for target in targets if target.parent == self.devices}

    # --- the truth, past the console ---------------------------------------------

    def replay(self) -> tuple[str, list[tuple[Event, object]]]:
        """Return the journal's uuid and all of it, each event with its data as it was sent: what a new client hears."""
        return replay(self.host.state)

    def events(self) -> list[Event]:
        return [event for event, _ in self.replay()[1]]

    def strays(self, status: StatusResult) -> dict[int, tuple[str, ...]]:
        """Return what runs on the host and belongs neither to the agent nor to a connection."""
        known = {pid for pid in status.processes.values() if pid} | set(self.host.sshd.descendants())
        return {pid: words for pid, words in self.host.processes().items() if pid not in known}


class Watch:
    """One console at work: begins runs, sees them end, and compares what it stored with the journal."""

    def __init__(self, chain: Chain, fleet: Fleet, history: Path) -> None:
        self.chain, self.fleet, self.history = chain, fleet, history

    @property
    def link(self) -> LinkStatus:
        return self.fleet.state(NODE).link.status

    async def begin(self, recipe: Recipe) -> str:
        return await self.fleet.warm(NODE, recipe.name, recipe=recipe)

    async def begin_until(self, recipe: Recipe, stage: str) -> str:
        """Begin a run and return its uid once ``stage`` has begun, the run being unfinished."""
        run_uid = await self.begin(recipe)
        await eventually(lambda: self._has_begun(run_uid, stage), f"{stage} begins")
        assert self.fleet.state(NODE).runs[run_uid].state is RunState.RUNNING, "too late to break anything"
        return run_uid

    async def over(self, run_uid: str) -> RunView:
        """Return a run once it is over, its parts proven to be the whole."""
        run = await self.fleet.wait(NODE, run_uid, PATIENCE_S)
        parts = sum(stage.attributed_ns or 0 for stage in run.stages) + (run.unattributed_ns or 0)
        assert parts == run.wall_ns, run
        return run

    async def warm(self, recipe: Recipe) -> RunView:
        return await self.over(await self.begin(recipe))

    async def status(self) -> StatusResult:
        return await self.fleet.status(NODE)

    async def until_status(self, holds: Callable[[StatusResult], T | None]) -> T:
        """Ask the node until ``holds`` finds something in its answer."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := holds(status := await self.status())):
            assert time.monotonic() < deadline, f"it never came true: {status}"
            await asyncio.sleep(0.02)
        return found

    async def pid(self, process: str, run_uid: str | None = None) -> int:
        """Return the pid of a process by what it is, once there is one; a worker's by its run."""
        if process == "bridge":
            (pid,) = self.chain.host.bridges()
            return pid
        if process == "sshd":
            return self.chain.host.sshd.connection_processes()[-1]
        name = f"worker {run_uid}" if process == "worker" else process
        return await self.until_status(lambda status: pid_of(status, name))

    async def kill(self, process: str, run_uid: str | None = None) -> int:
        """End a process as the kernel would, and return its pid once it is gone."""
        pid = await self.pid(process, run_uid)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not is_running(pid), f"{process} ends")
        return pid

    async def settled(self) -> None:
        """The history is the journal, each event once; the host runs its agent's processes and one bridge."""
        await self.connected()
        journal_uuid, replayed = await asyncio.to_thread(self.chain.replay)
        told = rows(replayed)
        await eventually(lambda: self.fleet.state(NODE).seq >= told[-1][0], "everything has come")
        assert await self.fleet.flush()
        kept, gaps = stored(self.history, journal_uuid)
        assert [row[0] for row in told] == list(range(1, len(told) + 1))
        assert kept[: len(told)] == told
        assert gaps == 0
        assert self.fleet.history.cursor(journal_uuid) >= len(told)
        await self._tidy()

    async def connected(self) -> None:
        await eventually(lambda: self.link is LinkStatus.CONNECTED, "the link is there")

    async def _tidy(self) -> None:
        deadline = time.monotonic() + TIDY_S
        while True:
            status = await self.status()
            strays, bridges = self.chain.strays(status), self.chain.host.bridges()
            if not strays and len(bridges) == 1:
                return
            assert time.monotonic() < deadline, f"beside {status.processes} there are {strays}; bridges: {bridges}"
            await asyncio.sleep(0.02)

    def _has_begun(self, run_uid: str, name: str) -> bool:
        run = self.fleet.state(NODE).runs.get(run_uid)
        return run is not None and any(
            stage.name == name and stage.status is not StageStatus.PENDING for stage in run.stages
        )


async def eventually(holds: Callable[[], object], what: str) -> None:
    """Wait until ``holds()``; fail with ``what``."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.005)


def pid_of(status: StatusResult, name: str) -> int | None:
    """Return the pid of the agent's only process whose name begins so, or None."""
    found = [pid for known, pid in status.processes.items() if known.startswith(name) and pid]
    assert len(found) <= 1, found
    return found[0] if found else None


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _links(home: Path) -> LinkFactory:
    gate = Gate.create(locations({"GLOWPLUG_STATE": str(home)}), {"HOME": str(home)})

    async def open_stream(node: Node, token: str) -> Stream:
        return await open_ssh(node, token, gate)

    def make(node: Node, subscriber: str, cursor: Callable[[str], int], sink: Session) -> NodeLink:
        return NodeLink(node, subscriber, cursor, sink, open_stream=open_stream, timing=TIMING)

    return make
