"""Which states a run and a stage may go through. Tables only: effects live elsewhere.

A pair that is not in a table is illegal: it raises, and the state stays what it was.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from remote_agent.protocol.messages import RunState, StageStatus


class IllegalTransitionError(Exception):
    """Something happened that can't happen in this state; a mistake of this program."""


class RunEvent(enum.Enum):
    """What happens to a run."""

    DEQUEUE = "dequeue"
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    INTERRUPT = "interrupt"
    HANG = "hang"


class StageEvent(enum.Enum):
    """What happens to a stage of a run."""

    START = "start"
    FINISH = "finish"
    REUSE = "reuse"
    SKIP = "skip"
    FAIL = "fail"


RUN_TABLE: Mapping[tuple[RunState, RunEvent], RunState] = {
    (RunState.QUEUED, RunEvent.DEQUEUE): RunState.RUNNING,
    (RunState.QUEUED, RunEvent.FAIL): RunState.FAILED,
    (RunState.QUEUED, RunEvent.CANCEL): RunState.CANCELLED,
    (RunState.QUEUED, RunEvent.INTERRUPT): RunState.INTERRUPTED,
    (RunState.RUNNING, RunEvent.SUCCEED): RunState.READY,
    (RunState.RUNNING, RunEvent.FAIL): RunState.FAILED,
    (RunState.RUNNING, RunEvent.CANCEL): RunState.CANCELLED,
    (RunState.RUNNING, RunEvent.INTERRUPT): RunState.INTERRUPTED,
    (RunState.RUNNING, RunEvent.HANG): RunState.STUCK,
}

STAGE_TABLE: Mapping[tuple[StageStatus, StageEvent], StageStatus] = {
    (StageStatus.PENDING, StageEvent.START): StageStatus.RUNNING,
    (StageStatus.PENDING, StageEvent.REUSE): StageStatus.REUSED,
    (StageStatus.PENDING, StageEvent.SKIP): StageStatus.SKIPPED,
    (StageStatus.RUNNING, StageEvent.FINISH): StageStatus.DONE,
    (StageStatus.RUNNING, StageEvent.REUSE): StageStatus.REUSED,
    (StageStatus.RUNNING, StageEvent.SKIP): StageStatus.SKIPPED,
    (StageStatus.RUNNING, StageEvent.FAIL): StageStatus.FAILED,
}


def next_run_state(state: RunState, event: RunEvent) -> RunState:
    """Return the state after ``event``. Raises: IllegalTransitionError if it can't happen then."""
    try:
        return RUN_TABLE[state, event]
    except KeyError:
        raise IllegalTransitionError(f"a {state.value} run can't {event.value}") from None


def next_stage_status(status: StageStatus, event: StageEvent) -> StageStatus:
    """Return the status after ``event``. Raises: IllegalTransitionError if it can't happen then."""
    try:
        return STAGE_TABLE[status, event]
    except KeyError:
        raise IllegalTransitionError(f"a {status.value} stage can't {event.value}") from None
