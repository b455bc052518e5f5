"""Stages are timed and reported whatever happens inside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote_agent.pipeline.timing import Stages
from remote_agent.protocol.internal import InternalMessage, WorkerMaps, WorkerProgress, WorkerStage
from remote_agent.protocol.messages import StageStatus


class Clock:
    """A monotonic clock that moves when told."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


class QueuedWork:
    """A device whose queued work takes a while to finish."""

    def __init__(self, clock: Clock, takes_ns: int) -> None:
        self._clock = clock
        self._takes_ns = takes_ns

    def synchronise(self) -> None:
        self._clock.now_ns += self._takes_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sent() -> list[InternalMessage]:
    return []


@pytest.fixture
def stages(clock: Clock, sent: list[InternalMessage]) -> Stages:
    return Stages(sent.append, clock)


def test_a_stage_is_reported_as_it_starts_and_as_it_ends(
    stages: Stages, clock: Clock, sent: list[InternalMessage]
) -> None:
    """The start is sent before the work, the end with what the work said about itself."""
    with stages.measure("weights") as measure:
        assert sent == [WorkerStage("weights", StageStatus.RUNNING, 1_000)]
        clock.now_ns = 1_500
        measure.bytes = 7
        measure.extra["shards"] = 2

    assert sent[1:] == [WorkerStage("weights", StageStatus.DONE, 1_000, 1_500, bytes=7, extra={"shards": 2})]


def test_a_file_is_named_before_its_pages_are_touched(stages: Stages, sent: list[InternalMessage]) -> None:
    """The word goes out at once, for the process may not live to say more."""
    with stages.measure("weights") as measure:
        measure.announce(Path("/models/a\nb.safetensors"))

        assert sent[1:] == [WorkerMaps("weights", "/models/a\\nb.safetensors")]


def test_a_span_waits_for_the_work_it_queued(stages: Stages, clock: Clock, sent: list[InternalMessage]) -> None:
    """Asynchronous copies count in the stage that queued them."""
    with stages.measure("weights", QueuedWork(clock, 900)):
        pass

    assert isinstance(sent[-1], WorkerStage)
    assert sent[-1].end_mono_ns == 1_900


def test_a_stage_left_by_an_exception_is_failed(stages: Stages, sent: list[InternalMessage]) -> None:
    """The exception goes on; the span is closed all the same."""
    with pytest.raises(RuntimeError, match="no"), stages.measure("assign"):
        raise RuntimeError("no")

    assert isinstance(sent[-1], WorkerStage)
    assert (sent[-1].stage, sent[-1].status) == ("assign", StageStatus.FAILED)
    assert stages.current == "assign"


def test_init_starts_when_the_worker_was_asked_for(stages: Stages, sent: list[InternalMessage]) -> None:
    """A start from before the process existed is kept."""
    with stages.measure("init", start_mono_ns=400):
        pass

    assert [m.start_mono_ns for m in sent if isinstance(m, WorkerStage)] == [400, 400]


def test_progress_is_sent_ten_times_a_second_at_most(stages: Stages, clock: Clock, sent: list[InternalMessage]) -> None:
    """What comes in between is dropped, and the rate is counted from the stage's start."""
    clock.now_ns = 1_000_000_000
    for _ in range(1_000):
        clock.now_ns += 1_000_000
        stages.progress("weights", clock.now_ns // 1_000, None, start_mono_ns=0)

    reports = [m for m in sent if isinstance(m, WorkerProgress)]
    assert len(reports) == 10
    assert all(report.rate_bytes_s == pytest.approx(1e6, rel=1e-3) for report in reports)


def test_progress_in_other_units_has_no_byte_rate(stages: Stages, clock: Clock, sent: list[InternalMessage]) -> None:
    """Shapes warmed are not bytes moved."""
    clock.now_ns = 10**9
    stages.progress("compile", 1, 3, start_mono_ns=0, unit="shapes")

    assert sent == [WorkerProgress("compile", 1, 3, "shapes", None, None)]
