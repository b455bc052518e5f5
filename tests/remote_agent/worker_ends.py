"""agentd's side of a worker or zygote: real processes over real socket pairs."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from remote_agent.protocol.framing import FrameReader
from remote_agent.protocol.internal import (
    InternalMessage,
    WorkerFailed,
    WorkerGo,
    WorkerJob,
    WorkerReady,
    WorkerRelease,
    WorkerStage,
    ZygoteFork,
    ZygoteForked,
    ZygoteReady,
    dump,
    parse,
)
from remote_agent.protocol.messages import Recipe, StageStatus

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 90.0
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37

T = TypeVar("T")


class End:
    """The other end of a child's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()
        self._pending: list[InternalMessage] = []

    def send(self, message: InternalMessage, *fds: int) -> None:
        """Send one message, with descriptors where it needs them."""
        if fds:
            socket.send_fds(self.sock, [dump(message)], list(fds))
        else:
            self.sock.sendall(dump(message))

    def receive(self, deadline_s: float = DEADLINE_S) -> InternalMessage | None:
        """Return the next message, or None once the child has closed."""
        end = time.monotonic() + deadline_s
        while not self._pending:
            ready, _, _ = select.select([self.sock], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no message within {deadline_s} s"
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._pending += [parse(line) for line in self._reader.feed(data)]
        return self._pending.pop(0)

    def receive_until(self, *kinds: type) -> list[InternalMessage]:
        """Return all messages up to the first of ``kinds``, that one included."""
        messages: list[InternalMessage] = []
        while True:
            message = self.receive()
            assert message is not None, f"the child closed after {messages[-3:]}"
            messages.append(message)
            if isinstance(message, kinds):
                return messages


def job_for(recipe: Recipe, cache: Path, reason: str | None = None) -> WorkerJob:
    """Return a CPU job whose init starts now."""
    return WorkerJob("run-00000001", recipe, "cpu", time.monotonic_ns(), str(cache), reason)


def do_job(end: End, job: WorkerJob, go: WorkerGo | None = None, log: int | None = None) -> list[InternalMessage]:
    """Send one job with its go, and its log if it has one, and return what came back, to the end of the job."""
    end.send(job, *([] if log is None else [log]))
    end.send(go or WorkerGo(()))
    return end.receive_until(WorkerReady, WorkerFailed)


def stages_over(messages: list[InternalMessage]) -> dict[str, WorkerStage]:
    """Return each stage's last word."""
    return {m.stage: m for m in messages if isinstance(m, WorkerStage) and m.status is not StageStatus.RUNNING}


def only(messages: list[InternalMessage], kind: type[T]) -> T:
    """Return the one message of ``kind``."""
    found = [message for message in messages if isinstance(message, kind)]
    assert len(found) == 1, messages[-4:]
    return found[0]


def wait_for(check: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return the first true answer of ``check``, asked again and again until the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if answer := check():
            return answer
        time.sleep(0.01)
    raise AssertionError(f"not within {deadline_s} s: {what}")


@contextmanager
def child(verb: str, log: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], End]]:
    """Start ``python -m remote_agent VERB`` as agentd does; kill it afterwards if it still runs."""
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "remote_agent", verb, "--fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": python_path(), **environment},
        )
    with ours:
        try:
            yield process, End(ours)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass
class Zygote:
    """A running zygote and agentd's end of its socket."""

    process: subprocess.Popen[bytes]
    end: End
    ready: ZygoteReady

    def ask(self, log: Path, *preimport: str, **environment: str) -> tuple[InternalMessage | None, End]:
        """Ask for a worker; return the answer and the worker's socket."""
        return ask_for_fork(self.end, log, *preimport, **environment)

    @contextmanager
    def worker(self, log: Path, **environment: str) -> Iterator[Forked]:
        """Return a forked worker; end it afterwards if it still runs."""
        answer, end = self.ask(log, **environment)
        with end.sock:
            assert isinstance(answer, ZygoteForked), answer
            forked = Forked(answer.pid, end)
            try:
                yield forked
            finally:
                if forked.code is None:
                    os.kill(forked.pid, signal.SIGKILL)
                    forked.wait()


@dataclass
class Forked:
    """A worker that is this process's child by adoption."""

    pid: int
    end: End
    code: int | None = None

    def wait(self) -> int:
        """Return its exit code as `subprocess` has it, once it has ended."""
        self.code = os.waitstatus_to_exitcode(wait_for(self._poll, f"the end of worker {self.pid}")[1])
        return self.code

    def _poll(self) -> tuple[int, int] | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return (pid, status) if pid else None

    def release(self) -> int:
        """Let it go and return its exit code."""
        self.end.send(WorkerRelease())
        assert self.end.receive() is None
        return self.wait()


def ask_for_fork(end: End, log: Path, *preimport: str, **environment: str) -> tuple[InternalMessage | None, End]:
    """Send a zygote a fork's message and descriptors; return its answer and the worker's socket."""
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as stderr:
        end.send(ZygoteFork(environment, preimport), theirs.fileno(), stderr.fileno())
    return end.receive(), End(ours)


@contextmanager
def running_zygote(log: Path, **environment: str) -> Iterator[Zygote]:
    """Start a real zygote with everything imported; this process becomes its workers' parent, as agentd is."""
    with subreaper(), child("zygote", log, OMP_NUM_THREADS="2", **environment) as (process, end):
        ready = end.receive()
        assert isinstance(ready, ZygoteReady), log.read_text()
        yield Zygote(process, end, ready)
        end.sock.close()
        assert process.wait(30) == 0, log.read_text()


@contextmanager
def python_child(code: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], End]]:
    """Run ``code`` in a Python process that finds its socket's descriptor in ``sys.argv[1]``."""
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdout=stderr,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
    with ours:
        try:
            yield process, End(ours)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def python_path() -> str:
    """Return a PYTHONPATH with this repository first."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


@contextmanager
def subreaper() -> Iterator[None]:
    """Make this process the parent of orphans, as agentd is, for a while."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    assert libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) == 0
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def process_state(pid: int) -> str | None:
    """Return the state letter of ``pid`` (``Z``: dead and not waited for), None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def parent_of(pid: int) -> int:
    """Return the pid of the parent of ``pid``."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
