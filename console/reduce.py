"""Brings a node's state up to date: ``(state, change) -> state``, pure and total.

Events are applied in the order of their ``seq``; one that is not newer than the
last changes nothing, so a replay is harmless. A run that is over stays as it is,
and nothing that happens to a link changes a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from console import runlog
from console.runviews import advance, finish, from_record, progressed, staged, with_baseline
from console.state import (
    BASELINES_KEPT,
    GONE_KEPT,
    LOG_LINES,
    RESIDENTS_KEPT,
    RUNS_KEPT,
    BaselineLoaded,
    Change,
    EventReceived,
    GapReceived,
    HelloReceived,
    LinkChanged,
    LocalFinding,
    LogLine,
    NodeState,
    ProbeReceived,
    RunDropped,
    RunQueued,
    RunReceived,
    RunView,
    SampleReceived,
    StageBaseline,
    StatusReceived,
)
from remote_agent.protocol.messages import (
    Event,
    ResidentChanged,
    RunAccepted,
    RunFinished,
    RunRecord,
    RunStarted,
    RunState,
    StageChanged,
)


def reduce(state: NodeState, change: Change) -> NodeState:
    """Return ``state`` after ``change``; never raises, never touches its arguments."""
    match change:
        case LinkChanged(link):
            return replace(state, link=link)
        case HelloReceived():
            return _hello(state, change)
        case StatusReceived(status):
            state = _with_records(state, status.runs)
            state = replace(state, residents=status.residents[-RESIDENTS_KEPT:])
            return state if status.probe is None else replace(state, probe=status.probe)
        case RunReceived(run, baseline):
            return _with_record(state, run, baseline)
        case RunQueued(run):
            return state if run.run_uid in state.runs else _with_run(state, run)
        case RunDropped():
            return _drop(state, change)
        case ProbeReceived(probe):
            return replace(state, probe=probe)
        case EventReceived(event, console_mono_ns):
            return _event(state, event, console_mono_ns)
        case SampleReceived():
            return _sample(state, change)
        case GapReceived(gap):
            return _log(state, runlog.gap(gap, state))
        case BaselineLoaded():
            return _baseline(state, change)
        case LocalFinding(t_wall_ns, finding):
            return _log(state, LogLine(t_wall_ns, None, finding.severity, finding.text))


def _hello(state: NodeState, change: HelloReceived) -> NodeState:
    hello, before = change.hello, state.hello
    offset = change.console_mono_ns - hello.t_mono_ns
    if before is not None and before.boot_id == hello.boot_id and state.clock_offset_ns is not None:
        offset = min(offset, state.clock_offset_ns)
    if state.journal_uuid != hello.journal_uuid:
        if state.journal_uuid is not None:
            state = _log(state, runlog.journal_replaced(hello))
        state = replace(state, journal_uuid=hello.journal_uuid, seq=0)
    return replace(state, hello=hello, clock_offset_ns=offset)


def _event(state: NodeState, event: Event, console_mono_ns: int) -> NodeState:
    if event.seq <= state.seq:
        return state
    state = replace(state, seq=event.seq)
    if _is_live(state, event) and state.clock_offset_ns is not None:
        state = replace(state, clock_offset_ns=min(state.clock_offset_ns, console_mono_ns - event.t_mono_ns))
    line = runlog.event(event, state)
    state = _apply(state, event)
    return state if line is None else _log(state, line)


def _is_live(state: NodeState, event: Event) -> bool:
    """Whether the event happened since hello: an older one may carry the clock of an earlier boot."""
    hello = state.hello
    return hello is not None and event.t_mono_ns >= hello.t_mono_ns and event.t_wall_ns >= hello.t_wall_ns


def _apply(state: NodeState, event: Event) -> NodeState:
    data, uid = event.data, event.run_uid
    if isinstance(data, ResidentChanged):
        return _resident(state, data)
    if isinstance(data, RunFinished):
        known = state.runs.get(data.run.run_uid)
        return _with_run(state, with_baseline(finish(known, data.run, event), state.baselines))
    if uid is None:
        return state
    run = state.runs.get(uid)
    if isinstance(data, RunAccepted):
        return _with_run(state, with_baseline(advance(run, uid, data, event), state.baselines))
    if run is None or run.state.is_terminal:
        return state
    if isinstance(data, RunStarted):
        return _with_run(state, replace(run, state=RunState.RUNNING))
    if isinstance(data, StageChanged):
        return _with_run(state, with_baseline(staged(run, data.stage), state.baselines))
    return state


def _sample(state: NodeState, change: SampleReceived) -> NodeState:
    sample = change.sample
    if state.hello is not None and state.clock_offset_ns is not None:
        offset = min(state.clock_offset_ns, change.console_mono_ns - sample.t_mono_ns)
        state = replace(state, clock_offset_ns=offset)
    if sample.host is not None:
        state = replace(state, host=sample.host)
    run = state.runs.get(sample.progress.run_uid) if sample.progress is not None else None
    if sample.progress is None or run is None:
        return state
    return _with_run(state, progressed(run, sample.progress))


def _resident(state: NodeState, data: ResidentChanged) -> NodeState:
    if data.state == "gone":
        state = replace(state, gone=(*state.gone, data)[-GONE_KEPT:])
    if state.residents is None:
        return state
    key = (data.resident.run_uid, data.resident.device)
    others = tuple(one for one in state.residents if (one.run_uid, one.device) != key)
    kept = (*others, data.resident) if data.state == "held" else others
    return replace(state, residents=kept[-RESIDENTS_KEPT:])


def _with_records(state: NodeState, records: tuple[RunRecord, ...]) -> NodeState:
    for record in records[-RUNS_KEPT:]:
        state = _with_record(state, record)
    return state


def _with_record(state: NodeState, record: RunRecord, baseline: StageBaseline | None = None) -> NodeState:
    run = from_record(state.runs.get(record.run_uid), record, state.hello)
    if baseline is not None and run.baseline is None:
        run = replace(run, baseline=baseline)
    return _with_run(state, with_baseline(run, state.baselines))


def _drop(state: NodeState, change: RunDropped) -> NodeState:
    run = state.runs.get(change.run_uid)
    if run is None or run.is_accepted or run.state.is_terminal:
        return state
    outcome = RunState.CANCELLED if change.failure is None else RunState.FAILED
    state = _with_run(state, replace(run, state=outcome, failure=change.failure))
    return _log(state, runlog.dropped(run, change))


def _baseline(state: NodeState, change: BaselineLoaded) -> NodeState:
    others = {key: value for key, value in state.baselines.items() if key != change.key}
    while len(others) >= BASELINES_KEPT:
        del others[next(iter(others))]
    baselines = {**others, change.key: change.baseline}
    runs = {uid: with_baseline(run, baselines) for uid, run in state.runs.items()}
    return replace(state, baselines=baselines, runs=runs)


def _with_run(state: NodeState, run: RunView) -> NodeState:
    runs = {**state.runs, run.run_uid: run}
    while len(runs) > RUNS_KEPT and (oldest := _least_wanted(runs)) is not None:
        del runs[oldest]
    return replace(state, runs=runs, latest_run=_most_wanted(runs))


def _least_wanted(runs: Mapping[str, RunView]) -> str | None:
    """The run to forget first: one that is over, then the oldest; never one that waits in this console."""
    candidates = [run for run in runs.values() if run.is_accepted or run.state.is_terminal]
    if not candidates:
        return None
    return min(candidates, key=lambda run: (not run.state.is_terminal, run.accepted_wall_ns, run.run_uid)).run_uid


def _most_wanted(runs: Mapping[str, RunView]) -> str | None:
    """The run a panel shows: one that runs, else one that waits, else the newest."""
    if not runs:
        return None
    rank = {RunState.RUNNING: 2, RunState.QUEUED: 1}
    return max(runs.values(), key=lambda run: (rank.get(run.state, 0), run.accepted_wall_ns, run.run_uid)).run_uid


def _log(state: NodeState, line: LogLine) -> NodeState:
    return replace(state, log=(*state.log, line)[-LOG_LINES:])
