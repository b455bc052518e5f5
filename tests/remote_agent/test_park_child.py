"""The process that parks others: what it asks of the driver, in which order, and how it leaves a process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from remote_agent import park_child
from remote_agent.devices.calls import Calls
from remote_agent.protocol.internal import ParkGo, ParkJob, ParkReady, ParkReport
from remote_agent.protocol.messages import Failure
from tests.remote_agent.fake_checkpoint import Code, FakeCheckpoints, Process, State
from tests.remote_agent.worker_ends import End, child

PID = 4242


@pytest.fixture
def driver() -> FakeCheckpoints:
    """Return a driver that knows one process."""
    fake = FakeCheckpoints()
    fake.processes[PID] = Process()
    return fake


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, End]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, End(ours)


def ask(
    driver: object, ends: tuple[socket.socket, End], action: Literal["park", "unpark"], go: bool = True
) -> ParkReport:
    """Have a job done as agentd does, and return the report."""
    theirs, end = ends
    serving = threading.Thread(target=park_child.serve, args=(theirs, Calls("fake", driver)))
    serving.start()
    end.send(ParkJob(PID, action, lock_timeout_ms=500))
    message = end.receive()
    if isinstance(message, ParkReady) and go:
        end.send(ParkGo())
        message = end.receive()
    serving.join(10)
    assert isinstance(message, ParkReport)
    return message


def detail(report: ParkReport) -> str:
    assert report.failure is not None, report
    return report.failure.detail


def test_a_process_is_parked_and_put_back(driver: FakeCheckpoints, ends: tuple[socket.socket, End]) -> None:
    """Lock and checkpoint, then restore and unlock; each step has its time."""
    parked = ask(driver, ends, "park")
    state = driver.processes[PID].state
    back = ask(driver, ends, "unpark")

    assert (parked.state, parked.failure, state) == ("parked", None, State.CU_PROCESS_STATE_CHECKPOINTED)
    assert (back.state, back.failure, driver.processes[PID].state) == ("running", None, State.CU_PROCESS_STATE_RUNNING)
    assert parked.steps.keys() == {"driver_ns", "lock_ns", "checkpoint_ns"}
    assert back.steps.keys() == {"driver_ns", "restore_ns", "unlock_ns"}


def test_nothing_is_touched_before_it_is_told_to_go(driver: FakeCheckpoints, ends: tuple[socket.socket, End]) -> None:
    """The driver is only asked; where the agent goes away then, nothing was done."""
    theirs, end = ends
    serving = threading.Thread(target=park_child.serve, args=(theirs, Calls("fake", driver)))
    serving.start()
    end.send(ParkJob(PID, "park"))
    assert end.receive() == ParkReady()
    end.sock.close()
    serving.join(10)

    assert driver.calls == ["cuInit", "cuCheckpointProcessGetState"]


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda fake: vars(fake).update(devices=0), "cuInit failed: CUDA_ERROR_NO_DEVICE (100)"),
        (lambda fake: vars(fake).update(version=12040), "the driver is of CUDA 12.4; it needs 12.8 (branch 570)"),
        (
            lambda fake: fake.fail.update(cuCheckpointProcessGetState=Code.CUDA_ERROR_NOT_SUPPORTED),
            "cuCheckpointProcessGetState failed: CUDA_ERROR_NOT_SUPPORTED (801)",
        ),
        (
            lambda fake: fake.processes.clear(),
            f"process {PID} has ended: cuCheckpointProcessGetState failed: CUDA_ERROR_OPERATING_SYSTEM (304)",
        ),
    ],
)
@pytest.mark.parametrize(("action", "left"), [("park", "running"), ("unpark", "parked")])
def test_a_driver_that_can_not_is_named_and_nothing_is_touched(
    driver: FakeCheckpoints, ends: tuple[socket.socket, End], prepare: object, words: str, action: str, left: str
) -> None:
    """No GPU, an older driver, no support, or a process that the driver does not know."""
    prepare(driver)  # type: ignore[operator]
    report = ask(driver, ends, action)  # type: ignore[arg-type]

    assert (report.state, report.failure) == (left, Failure("unsupported", words))
    assert not {"cuCheckpointProcessLock", "cuCheckpointProcessRestore"} & set(driver.calls)


def test_bindings_without_the_calls_are_named(ends: tuple[socket.socket, End]) -> None:
    """cuda-python before 12.8 has none of them."""
    old = SimpleNamespace(
        cuInit=lambda flags: (Code.CUDA_SUCCESS,), cuDriverGetVersion=lambda: (Code.CUDA_SUCCESS, 13000)
    )
    report = ask(old, ends, "park")

    assert detail(report).startswith("cuCheckpointProcessGetState can't be called: ")


def test_a_process_that_is_busy_for_too_long_runs_on(driver: FakeCheckpoints, ends: tuple[socket.socket, End]) -> None:
    """The lock's time is over; it was never locked."""
    driver.processes[PID].busy_ms = 501
    report = ask(driver, ends, "park")

    assert (report.state, driver.processes[PID].state) == ("running", State.CU_PROCESS_STATE_RUNNING)
    assert detail(report) == "cuCheckpointProcessLock failed: CUDA_ERROR_NOT_READY (600)"


def test_a_checkpoint_that_fails_lets_the_process_run_on(
    driver: FakeCheckpoints, ends: tuple[socket.socket, End]
) -> None:
    """A process with managed memory is refused by the driver, and unlocked."""
    driver.processes[PID].has_managed_memory = True
    report = ask(driver, ends, "park")

    assert (report.state, driver.processes[PID].state) == ("running", State.CU_PROCESS_STATE_RUNNING)
    assert detail(report) == "cuCheckpointProcessCheckpoint failed: CUDA_ERROR_NOT_SUPPORTED (801)"
    assert "unlock_ns" in report.steps


def test_a_process_that_can_not_be_unlocked_is_lost(driver: FakeCheckpoints, ends: tuple[socket.socket, End]) -> None:
    """The reason is what went wrong first."""
    driver.processes[PID].has_managed_memory = True
    driver.fail["cuCheckpointProcessUnlock"] = Code.CUDA_ERROR_ILLEGAL_STATE
    report = ask(driver, ends, "park")

    assert report.state == "lost"
    assert detail(report).startswith("cuCheckpointProcessCheckpoint failed")


@pytest.mark.parametrize("why", ["imported memory", "no room on the device"])
def test_a_restore_that_fails_is_final(driver: FakeCheckpoints, ends: tuple[socket.socket, End], why: str) -> None:
    """The driver still calls it checkpointed, and it is lost all the same."""
    driver.processes[PID].has_imported_memory = why == "imported memory"
    parked = ask(driver, ends, "park")
    driver.free_bytes = 0
    report = ask(driver, ends, "unpark")

    assert parked.state == "parked"
    assert (report.state, driver.processes[PID].state) == ("lost", State.CU_PROCESS_STATE_CHECKPOINTED)
    assert detail(report).startswith("cuCheckpointProcessRestore failed: CUDA_ERROR_")


def test_a_process_that_is_not_parked_is_let_run(driver: FakeCheckpoints, ends: tuple[socket.socket, End]) -> None:
    """So a park that was broken off can be taken back: one that runs is left, one that is locked is unlocked."""
    running = ask(driver, ends, "unpark")
    driver.processes[PID].state = State.CU_PROCESS_STATE_LOCKED
    unlocked = ask(driver, ends, "unpark")
    driver.processes[PID].state = State.CU_PROCESS_STATE_FAILED
    failed = ask(driver, ends, "unpark")

    assert (running.state, unlocked.state, failed.state) == ("running", "running", "lost")
    assert detail(failed) == f"process {PID} is in state 3 of the driver's, which nothing ends"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host has a driver")
def test_a_host_without_a_driver_says_so(tmp_path: Path) -> None:
    """The real child with the real bindings: one report, exit code 0."""
    with child("park-child", tmp_path / "log") as (process, end):
        end.send(ParkJob(os.getpid(), "park"))
        report = end.receive()
        assert isinstance(report, ParkReport), (tmp_path / "log").read_text()
        assert process.wait(30) == 0

    assert (report.state, report.failure is not None and report.failure.code) == ("running", "unsupported")
    assert "cuInit" in detail(report)
