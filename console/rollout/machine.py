"""The rollout's machine: ``step(state, event)`` gives the next state and what is to be done; pure.

Abort beats everything. An event that fits nothing any more (of an older attempt or analysis, or about a node that is
not in the rollout) changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from console.rollout.advance import advance
from console.rollout.endings import ask_anew, count_answer
from console.rollout.events import (
    Abort,
    AvailabilityChanged,
    BackedOut,
    Begin,
    Event,
    GateSampled,
    HookEnded,
    Intent,
    NodeReached,
    Pause,
    Promote,
    ReadNode,
    Restarted,
    Resume,
    Retry,
    Skip,
    StopEnded,
    Tick,
)
from console.rollout.gates import count_sample
from console.rollout.states import BackOut, NodeRow, NodeState, Phase, RolloutState, Verdict
from console.rollout.turn import Turn

_AHEAD = (NodeState.DRAINING, NodeState.WARMING, NodeState.VERIFYING)
"""What an attempt goes through on its own, in order."""


def step(state: RolloutState, event: Event) -> tuple[RolloutState, tuple[Intent, ...]]:
    """Return what the rollout is after ``event``, and what it wants done, in order; nothing once it is over."""
    if state.phase.is_over:
        return state, ()
    turn = Turn(state)
    _HANDLERS[type(event)](turn, event)
    advance(turn)
    return turn.state, tuple(turn.intents)


def _begin(turn: Turn, event: Begin) -> None:
    pass


def _tick(turn: Turn, event: Tick) -> None:
    turn.change(now_s=max(turn.state.now_s, event.now_s))


def _node_reached(turn: Turn, event: NodeReached) -> None:
    row = turn.state.node(event.node)
    if row is None or row.attempt != event.attempt:
        return
    if row.state is NodeState.UNKNOWN:
        _node_read(turn, row, event)
    elif not row.state.is_under_way:
        return
    elif event.state is NodeState.FAILED:
        turn.fail(row, event.reason, event.unreachable)
    elif event.state is NodeState.UNKNOWN:
        since_s = turn.state.now_s if row.state is NodeState.VERIFYING else row.since_s
        turn.change_node(row.name, state=NodeState.UNKNOWN, reason=event.reason, since_s=since_s)
    elif row.state in _AHEAD and event.state in _AHEAD[_AHEAD.index(row.state) + 1 :]:
        turn.change_node(row.name, state=event.state, reason=event.reason)


def _node_read(turn: Turn, row: NodeRow, event: NodeReached) -> None:
    """Take over what a node that nobody could see has come to; ready only what was verified, and then shifted."""
    reached = event.state
    if reached is NodeState.UNKNOWN:
        return
    if reached is NodeState.READY and row.is_shifted:
        turn.become_ready(row)
    elif reached is NodeState.FAILED:
        turn.fail(row, event.reason, event.unreachable)
    elif turn.state.phase is Phase.ABORTING:
        turn.call_off(row, "aborted")
    elif reached in (NodeState.PENDING, NodeState.DRAINING, NodeState.SKIPPED):
        turn.call_off(row, event.reason)
        turn.change_node(row.name, tries=max(0, row.tries - 1))
    elif reached is NodeState.SHIFTING and row.is_shifted:
        turn.change_node(row.name, state=NodeState.SHIFTING, reason=event.reason)
    else:
        warming = reached is NodeState.WARMING
        turn.change_node(
            row.name,
            state=NodeState.WARMING if warming else NodeState.VERIFYING,
            reason=event.reason,
            hook=None,
            is_verified=False,
            is_shifted=False,
        )


def _hook_ended(turn: Turn, event: HookEnded) -> None:
    row = turn.state.node(event.node)
    if row is None or (row.attempt, row.hook) != (event.attempt, event.hook):
        return
    if event.succeeded:
        turn.hook_succeeded(row, event.hook)
    else:
        turn.fail(row, f"hook {event.hook}: {event.reason}")


def _backed_out(turn: Turn, event: BackedOut) -> None:
    row = turn.state.node(event.node)
    if row is None or row.back_out is not BackOut.ASKED:
        return
    if event.succeeded:
        turn.change_node(row.name, is_out=False, back_out=BackOut.NONE)
        return
    turn.change_node(row.name, back_out=BackOut.FAILED, reason=event.reason)
    if turn.state.phase is Phase.RUNNING:
        turn.pause(f"{row.name} is out of traffic and could not be backed out: {event.reason}")


def _availability_changed(turn: Turn, event: AvailabilityChanged) -> None:
    turn.change_node(event.node, is_down=event.is_down)
    if not event.is_down:
        ask_anew(turn, event.node)


def _gate_sampled(turn: Turn, event: GateSampled) -> None:
    analysis = turn.state.analysis
    if analysis is None or analysis.number != event.analysis:
        return
    rules, now_s = turn.state.rules.gates, turn.state.now_s
    gates = tuple(
        count_sample(gate, rules[gate.gate], event.verdict, event.reason, now_s)
        if gate.gate == event.gate and gate.is_asked
        else gate
        for gate in analysis.gates
    )
    turn.change(analysis=replace(analysis, gates=gates))


def _restarted(turn: Turn, event: Restarted) -> None:
    """What was under way is unknown until it was read; only the operator lets it go on."""
    passed_s = event.now_s - turn.state.now_s
    turn.change(now_s=event.now_s, progress_s=event.now_s, analysis=None)
    for row in turn.state.nodes:
        is_unknown = row.state.is_under_way or row.state is NodeState.UNKNOWN
        turn.change_node(
            row.name,
            state=NodeState.UNKNOWN if is_unknown else row.state,
            hook=None,
            since_s=event.now_s,
            due_s=max(event.now_s, row.due_s + passed_s),
            back_out=BackOut.NONE if row.back_out is BackOut.ASKED else row.back_out,
        )
        ask_anew(turn, row.name, was_cut_off=True)
        if is_unknown:
            turn.want(ReadNode(row.name, row.attempt))
    if turn.state.phase is Phase.RUNNING:
        turn.pause("restarted")


def _pause(turn: Turn, event: Pause) -> None:
    if turn.state.phase is Phase.RUNNING:
        turn.pause(event.reason or "by the operator")


def _resume(turn: Turn, event: Resume) -> None:
    refused = [row.name for row in turn.state.nodes if row.failed_at_gate]
    if refused and turn.state.phase is Phase.PAUSED:
        turn.pause(f"{', '.join(refused)} failed at a gate: retry or skip what failed, or promote without it")
        return
    analysis = turn.state.analysis
    if _goes_on(turn) and analysis is not None and analysis.verdict is Verdict.INCONCLUSIVE:
        turn.change(analysis=None)


def _promote(turn: Turn, event: Promote) -> None:
    if turn.state.phase is Phase.ABORTING:
        return
    turn.change(promoted_all=turn.state.promoted_all or event.everything)
    analysis = turn.state.analysis
    if not _goes_on(turn):
        return
    for row in turn.state.nodes:
        turn.change_node(row.name, failed_at_gate=False)
    if analysis is not None and analysis.verdict is Verdict.INCONCLUSIVE:
        for name in analysis.nodes:
            turn.change_node(name, is_verified=True)
        turn.change(analysis=None)


def _goes_on(turn: Turn) -> bool:
    """End a pause, unless there is a node whose state was not read yet; return whether it ended."""
    if turn.state.phase is not Phase.PAUSED:
        return False
    unknown = [row.name for row in turn.rows(NodeState.UNKNOWN)]
    if unknown:
        turn.pause(f"the state of {', '.join(unknown)} is not known yet")
        return False
    turn.change(phase=Phase.RUNNING, reason="")
    turn.progressed()
    return True


def _retry(turn: Turn, event: Retry) -> None:
    row = turn.state.node(event.node)
    if row is None or turn.state.phase is Phase.ABORTING:
        return
    if row.state is NodeState.VERIFYING:
        turn.call_off(row, "to be tried again")
    elif row.state is NodeState.FAILED:
        turn.wait(row, "to be tried again", turn.state.now_s)
    else:
        return
    back_out = BackOut.NONE if row.back_out is BackOut.FAILED else row.back_out
    turn.change_node(row.name, tries=0, back_out=back_out)


def _skip(turn: Turn, event: Skip) -> None:
    row, reason = turn.state.node(event.node), event.reason.strip()
    if row is None or not reason or row.state is NodeState.READY:
        return
    gives_up = row.back_out is BackOut.FAILED
    if row.state is NodeState.SKIPPED and not gives_up:
        return
    if row.state.is_under_way or row.state is NodeState.UNKNOWN:
        turn.call_off(row, reason)
    turn.change_node(
        row.name,
        state=NodeState.SKIPPED,
        skip_reason=reason,
        failed_at_gate=False,
        is_out=row.is_out and not gives_up,
        back_out=BackOut.NONE if gives_up else row.back_out,
    )
    turn.progressed()


def _abort(turn: Turn, event: Abort) -> None:
    if turn.state.phase is not Phase.ABORTING:
        turn.abort(event.reason or "by the operator")
    for row in turn.state.nodes:
        ask_anew(turn, row.name)
        if row.back_out is BackOut.FAILED:
            turn.change_node(row.name, back_out=BackOut.NONE)


_HANDLERS: dict[type, Callable[[Turn, Any], None]] = {
    Begin: _begin,
    Tick: _tick,
    NodeReached: _node_reached,
    HookEnded: _hook_ended,
    BackedOut: _backed_out,
    StopEnded: count_answer,
    AvailabilityChanged: _availability_changed,
    GateSampled: _gate_sampled,
    Restarted: _restarted,
    Pause: _pause,
    Resume: _resume,
    Promote: _promote,
    Retry: _retry,
    Skip: _skip,
    Abort: _abort,
}
