"""The transition tables: every pair of state and event follows the table, or raises and changes nothing."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from remote_agent.agentd.lifecycle import (
    RUN_TABLE,
    STAGE_TABLE,
    IllegalTransitionError,
    RunEvent,
    StageEvent,
    next_run_state,
    next_stage_status,
)
from remote_agent.agentd.timeline import Figures, Timeline
from remote_agent.protocol.messages import RunState, StageStatus

ENDINGS = [StageStatus.DONE, StageStatus.REUSED, StageStatus.SKIPPED, StageStatus.FAILED]


@given(st.sampled_from(RunState), st.sampled_from(RunEvent))
def test_each_run_state_and_event_follows_the_table_or_raises(state: RunState, event: RunEvent) -> None:
    """What the table does not list can't happen, and the error names both."""
    if (state, event) in RUN_TABLE:
        assert next_run_state(state, event) is RUN_TABLE[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"{state.value} run can't {event.value}"):
            next_run_state(state, event)


@given(st.lists(st.sampled_from(RunEvent)))
def test_a_terminal_run_stays_what_it_is(events: list[RunEvent]) -> None:
    """Whatever happens in whatever order, a run ends at most once and its end is final."""
    state, ends = RunState.QUEUED, 0
    for event in events:
        before = state
        try:
            state = next_run_state(state, event)
        except IllegalTransitionError:
            assert state is before
            continue
        assert not before.is_terminal
        ends += state.is_terminal

    assert ends == int(state.is_terminal)


def test_every_unfinished_run_can_be_ended_by_each_fault() -> None:
    """Failing, cancelling and interrupting work from the queue as well as from running."""
    for state in (RunState.QUEUED, RunState.RUNNING):
        for event in (RunEvent.FAIL, RunEvent.CANCEL, RunEvent.INTERRUPT):
            assert next_run_state(state, event).is_terminal


@given(st.sampled_from(StageStatus), st.sampled_from(StageEvent))
def test_each_stage_status_and_event_follows_the_table_or_raises(status: StageStatus, event: StageEvent) -> None:
    """A stage that is over stays over; nothing but the table is possible."""
    if (status, event) in STAGE_TABLE:
        assert not status.is_over
        assert next_stage_status(status, event) is STAGE_TABLE[status, event]
    else:
        with pytest.raises(IllegalTransitionError):
            next_stage_status(status, event)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(ENDINGS), st.integers(0, 100)), max_size=6))
def test_an_illegal_change_leaves_the_timeline_as_it_was(steps: list[tuple[bool, StageStatus, int]]) -> None:
    """A stage's record is the same before and after something that can't happen to it."""
    timeline = Timeline(0)
    for is_begin, status, at in steps:
        before = timeline.record("probe")
        try:
            if is_begin:
                timeline.begin("probe", "", at)
            else:
                timeline.end("probe", "", status, at, Figures())
        except IllegalTransitionError:
            assert timeline.record("probe") == before
