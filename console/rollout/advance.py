"""What follows once something has happened: time-outs, aborts, back-outs, shifts, starts, samples, the next batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from console.rollout.endings import ask_again
from console.rollout.events import BackOutNode, TakeSample
from console.rollout.gates import begin_analysis, describe
from console.rollout.states import Analysis, BackOut, NodeRow, NodeState, Phase, RolloutState, Verdict
from console.rollout.turn import Turn

_TIMED = (NodeState.DRAINING, NodeState.WARMING, NodeState.SHIFTING, NodeState.UNKNOWN)
_COMING = (NodeState.DRAINING, NodeState.WARMING, NodeState.UNKNOWN)


def advance(turn: Turn) -> None:
    """Bring the state to where nothing follows any more without an event."""
    _time_out(turn)
    ask_again(turn)
    _judge_analysis(turn)
    if turn.state.phase is not Phase.ABORTING:
        _abort_if_due(turn)
    _back_out(turn)
    while turn.state.phase is Phase.RUNNING:
        before = turn.state
        _shift(turn)
        _start(turn)
        _analyse(turn)
        _next_batch(turn)
        if turn.state == before:
            break
    is_settled = not any(row.is_out or row.state is NodeState.UNKNOWN or row.is_being_ended for row in turn.state.nodes)
    if turn.state.phase is Phase.ABORTING and is_settled:
        turn.finish(Phase.ABORTED, turn.state.reason)


def waiting_for(state: RolloutState) -> tuple[str, ...]:
    """Say what a rollout waits for, one line each; empty only once it is over."""
    if state.phase.is_over:
        return ()
    lines = [f"the operator: {state.reason}"] if state.phase is Phase.PAUSED else []
    unavailable = state.unavailable
    lines += [line for row in state.nodes for line in _node_waits(state, row, unavailable)]
    if state.analysis is not None:
        for gate in state.analysis.gates:
            if gate.verdict is None:
                of = state.rules.gates[gate.gate].count
                lines.append(f"gate {gate.gate + 1}: sample {gate.taken + 1} of {of}")
    return tuple(lines)


def _node_waits(state: RolloutState, row: NodeRow, unavailable: int) -> Iterator[str]:
    if row.state is NodeState.UNKNOWN:
        yield f"{row.name}: its state; skip leaves it out"
    elif row.state.is_under_way:
        yield f"{row.name}: {row.state.value}"
    elif row.is_being_ended and row.back_out is BackOut.NONE:
        yield f"{row.name}: the end of its run"
    if row.back_out is BackOut.ASKED:
        yield f"{row.name}: back into its traffic"
    elif row.back_out is BackOut.FAILED:
        yield f"the operator: {row.name} is out of traffic and could not be backed out"
    elif row.state is NodeState.PENDING and row.batch <= state.batch and state.phase is Phase.RUNNING:
        if row.due_s > state.now_s:
            yield f"{row.name}: attempt {row.attempt + 1} in {row.due_s - state.now_s:.0f} s"
        elif not _has_room(state, row, unavailable):
            yield f"{row.name}: max_unavailable {state.rules.max_unavailable} is reached"


def _time_out(turn: Turn) -> None:
    limit_s = turn.state.rules.node_timeout_s
    for row in turn.rows(*_TIMED):
        if turn.state.now_s - row.since_s >= limit_s:
            turn.stop(row)
            turn.fail(row, f"{row.state.value} took over {limit_s:g} s", unreachable=row.state is NodeState.UNKNOWN)


def _abort_if_due(turn: Turn) -> None:
    state = turn.state
    if state.failures >= state.rules.max_failures:
        names = ", ".join(row.name for row in state.nodes if row.has_failed)
        turn.abort(f"{state.failures} failed, max_failures {state.rules.max_failures}: {names}")
    elif state.phase is Phase.RUNNING and state.now_s - state.progress_s >= state.rules.progress_deadline_s:
        turn.abort(f"no progress for {state.rules.progress_deadline_s:g} s")


def _back_out(turn: Turn) -> None:
    """Ask for every node that is out of traffic and no longer on its way, in whatever phase the rollout is."""
    over: tuple[NodeState, ...] = (NodeState.FAILED, NodeState.SKIPPED)
    if turn.state.phase is Phase.ABORTING:
        over = (*over, NodeState.PENDING)
    for row in turn.rows(*over):
        if row.is_out and row.back_out is BackOut.NONE:
            turn.change_node(row.name, back_out=BackOut.ASKED)
            turn.want(BackOutNode(row.name, row.attempt))


def _judge_analysis(turn: Turn) -> None:
    """Drop an analysis whose nodes are not all still there to be looked at; carry out its verdict."""
    analysis = turn.state.analysis
    if analysis is None:
        return
    waiting = {row.name for row in turn.rows(NodeState.VERIFYING)}
    if not waiting.issuperset(analysis.nodes):
        turn.change(analysis=None)
    elif analysis.verdict is Verdict.FAIL:
        _fail_at_gate(turn, analysis)
    elif analysis.verdict is Verdict.INCONCLUSIVE:
        reason = describe(analysis, Verdict.INCONCLUSIVE)
        if turn.state.phase is Phase.RUNNING or turn.state.reason != reason:
            turn.pause(reason)
    elif analysis.verdict is Verdict.PASS:
        for name in analysis.nodes:
            turn.change_node(name, is_verified=True)
        turn.change(analysis=None)
        turn.progressed()


def _fail_at_gate(turn: Turn, analysis: Analysis) -> None:
    """Fail what was looked at together, without another try: abort where that makes too many, else ask the operator."""
    reason = describe(analysis, Verdict.FAIL)
    turn.change(analysis=None)
    for row in turn.rows(NodeState.VERIFYING):
        if row.name in analysis.nodes:
            turn.fail_for_good(row, reason, at_gate=True)
    if turn.state.failures >= turn.state.rules.max_failures:
        turn.abort(reason)
    else:
        turn.pause(reason)


def _shift(turn: Turn) -> None:
    for row in turn.rows(NodeState.VERIFYING, NodeState.SHIFTING):
        if row.is_verified and row.hook is None:
            turn.shift(row)


def _has_room(state: RolloutState, row: NodeRow, unavailable: int) -> bool:
    """Whether the node may be started where so many are unavailable: one that is so anyway makes it no worse."""
    return row.is_unavailable or unavailable < state.rules.max_unavailable


def _start(turn: Turn) -> None:
    unavailable = turn.state.unavailable
    for row in turn.rows(NodeState.PENDING):
        state = turn.state
        is_due = row.batch <= state.batch and row.due_s <= state.now_s and row.back_out is not BackOut.ASKED
        if is_due and _has_room(state, row, unavailable):
            turn.start(row)
            unavailable = turn.state.unavailable


def _analyse(turn: Turn) -> None:
    """Look at what is warm once nothing else is on its way to be looked at with it; take the samples that are due."""
    if turn.state.analysis is None:
        _begin_analysis(turn)
    analysis = turn.state.analysis
    if analysis is None:
        return
    gates = []
    for gate in analysis.gates:
        if gate.verdict is None and not gate.is_asked and gate.due_s <= turn.state.now_s:
            turn.want(TakeSample(analysis.number, gate.gate, analysis.nodes))
            gate = replace(gate, is_asked=True)
        gates.append(gate)
    turn.change(analysis=replace(analysis, gates=tuple(gates)))


def _begin_analysis(turn: Turn) -> None:
    state = turn.state
    rows = [row for row in turn.rows(NodeState.VERIFYING) if not row.is_verified]
    ungated = [row for row in rows if not any(rule.applies_to(row.batch) for rule in state.rules.gates)]
    for row in ungated:
        turn.change_node(row.name, is_verified=True)
    rows = [row for row in rows if row not in ungated]
    if not rows or turn.rows(*_COMING):
        return
    batch = min(row.batch for row in rows)
    names = tuple(row.name for row in rows if row.batch == batch)
    number = state.analyses + 1
    turn.change(analysis=begin_analysis(number, names, state.rules.gates, batch, state.now_s), analyses=number)


def _next_batch(turn: Turn) -> None:
    state = turn.state
    at_work = [row for row in state.nodes if row.batch <= state.batch]
    if not all(row.state.is_over and row.back_out is not BackOut.ASKED for row in at_work):
        return
    left_out = [row.name for row in at_work if row.is_out]
    number = state.batch + 1
    if left_out:
        turn.pause(f"out of traffic and not backed out: {', '.join(left_out)}")
    elif len(at_work) == len(state.nodes):
        if not any(row.is_being_ended for row in state.nodes):
            turn.finish(Phase.DONE, _summary(state))
    elif number in state.rules.pause_after and not state.promoted_all and number not in state.passed_pauses:
        turn.change(passed_pauses=(*state.passed_pauses, number))
        turn.pause(f"after batch {number}")
    else:
        turn.change(batch=number)
        turn.progressed()


def _summary(state: RolloutState) -> str:
    counts = ((len([row for row in state.nodes if row.state is one]), one.value) for one in NodeState)
    return ", ".join(f"{count} {word}" for count, word in counts if count)
