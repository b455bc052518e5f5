"""Drives a real agent process with stub children, as a client would, with a deadline on every wait."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from remote_agent.agentd.daemon import holder
from remote_agent.agentd.launch import connect
from remote_agent.agentd.paths import StateDir
from remote_agent.client import Client
from remote_agent.keeper.client import tell_keeper
from remote_agent.protocol.messages import (
    Actor,
    Empty,
    Event,
    Failure,
    HelloResult,
    ModelSource,
    Probe,
    Recipe,
    RunFinished,
    RunRecord,
    RunStartParams,
    RunStartResult,
    StageChanged,
    StageRecord,
    StageStatus,
    StatusResult,
    SubscribeParams,
    SubscribeResult,
)

REPOSITORY = Path(__file__).resolve().parents[3]
DEADLINE_S = 30.0

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return the first true answer of ``look``, asked again and again until the deadline."""
    give_up = time.monotonic() + deadline_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < give_up, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> dict[int, str]:
    """Return the state letter of each child process."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[1]) == pid:
            found[int(stat.parent.name)] = words[0]
    return found


class Agent:
    """One agent process and its folders; `start` again after `kill` to see what is left."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.state, self.orders = StateDir(folder / "state"), folder / "orders"
        self.orders.mkdir()
        for name, text in options.pop("orders", {}).items():
            self.order(name, text)
        (self.orders / "dev").mkdir()
        (self.orders / "locks").mkdir()
        (self.orders / "locks").chmod(0o1777)
        for device in options.pop("devices", ()):
            (self.orders / "dev" / device).touch()
        self.model = folder / "model.safetensors"
        self.model.write_bytes(b"weights")
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Agent:
        command = [sys.executable, "-m", "tests.remote_agent.agentd.stub_agent", str(self.state.root), str(self.orders)]
        log = (self.orders / "agent.log").open("ab")
        self.process = subprocess.Popen(
            [*command, json.dumps(self.options)], cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        log.close()
        eventually(self._listens, "the agent listens")
        return self

    def log(self) -> str:
        return (self.orders / "agent.log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """End the agent as the kernel would, without a chance to clean up."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.order("unkillable", None)
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(DEADLINE_S)
        if self.state.run.exists():
            tell_keeper(self.state, "stop!")

    def order(self, name: str, text: str | None) -> None:
        """Tell a stub what to do from now on; None takes it back."""
        path = self.orders / name
        if text is None:
            path.unlink(missing_ok=True)
        else:
            beside = path.with_name(f".{name}.new")
            beside.write_text(text)
            beside.replace(path)  # a stub never sees half an order

    def client(self, subscriber: str | None = None, after_seq: int = 0, samples: bool = False) -> Watcher:
        """Return a greeted client; with a ``subscriber``, even an empty one, it is told every event."""
        link = connect(self.state)
        assert link is not None
        link.settimeout(DEADLINE_S)
        watcher = Watcher(link, self.state)
        try:
            watcher.greeting = watcher.hello("test")
            if subscriber is not None:
                watcher.call("subscribe", SubscribeParams(subscriber, after_seq, samples), SubscribeResult)
        except BaseException:
            link.close()
            raise
        return watcher

    def params(self, stub: str = "", devices: tuple[str, ...] = ("cpu",), **recipe: Any) -> RunStartParams:
        """Return a request for a run whose children do what ``stub`` says."""
        told = {"STUB": stub} if stub else {}
        environment: Mapping[str, str] = {**told, **recipe.pop("environment", {})}
        wanted = Recipe("tiny", ModelSource(str(self.model)), devices=devices, environment=environment, **recipe)
        return RunStartParams(str(uuid.uuid4()), wanted, Actor("ann", "laptop"))

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        link = connect(self.state)
        if link is not None:
            link.close()
        return link is not None and holder(self.state) == self.pid  # not what a child of a killed one still has open


class Watcher(Client):
    """A client that follows runs."""

    greeting: HelloResult

    def begin(self, params: RunStartParams) -> RunRecord:
        return self.call("run.start", params, RunStartResult).run

    def arm(self, params: RunStartParams) -> RunRecord:
        """Start a standby without its weights and return how that ended."""
        self.call("standby.start", params, RunStartResult)
        return self.finished(params.run_uid)

    def warm(self, params: RunStartParams) -> RunRecord:
        """Start a run and return how it ended."""
        self.begin(params)
        return self.finished(params.run_uid)

    def next_event(self, wanted: Callable[[Event], bool]) -> Event:
        """Return the next event of that kind, skipping others."""
        for notification in self.notifications():
            if isinstance(notification.params, Event) and wanted(notification.params):
                return notification.params
        raise AssertionError

    def finished(self, run_uid: str) -> RunRecord:
        event = self.next_event(lambda event: event.run_uid == run_uid and isinstance(event.data, RunFinished))
        assert isinstance(event.data, RunFinished)
        return event.data.run

    def stage(self, run_uid: str, name: str, status: StageStatus = StageStatus.RUNNING) -> StageRecord:
        """Wait until a stage of the run has ``status``."""

        def is_it(event: Event) -> bool:
            data = event.data
            return (
                event.run_uid == run_uid
                and isinstance(data, StageChanged)
                and (data.stage.name, data.stage.status) == (name, status)
            )

        data = self.next_event(is_it).data
        assert isinstance(data, StageChanged)
        return data.stage

    def status(self) -> StatusResult:
        return self.call("status", Empty(), StatusResult)

    def worker_pid(self) -> int:
        """Return the pid of the only worker."""
        (pid,) = [pid for name, pid in self.status().processes.items() if name.startswith("worker") and pid]
        return pid

    def everything(self, up_to_seq: int) -> list[Event]:
        """Return events until one of that seq."""
        events: list[Event] = []
        while not events or events[-1].seq < up_to_seq:
            events.append(self.next_event(lambda _: True))
        return events


def stage_of(run: RunRecord, name: str) -> StageRecord:
    return next(stage for stage in run.stages if stage.name == name)


def failure_of(run: RunRecord) -> Failure:
    assert run.failure is not None, run
    return run.failure


def parts_sum_to_wall(run: RunRecord) -> bool:
    """Return whether the run's parts are exactly its wall time."""
    assert run.wall_ns is not None
    assert run.unattributed_ns is not None
    return sum(stage.attributed_ns or 0 for stage in run.stages) + run.unattributed_ns == run.wall_ns


def pid_of(client: Watcher, name: str) -> int | None:
    """Return the pid of the first process whose name starts so."""
    processes = client.status().processes
    return next((pid for known, pid in processes.items() if known.startswith(name) and pid), None)


def probe(client: Watcher) -> Probe:
    return client.call("probe", Empty(), Probe)
