"""What a node's event log says about each change: one line, or nothing."""

from __future__ import annotations

from console.format import duration_text, rate_text, size_text
from console.state import LogLine, NodeState, RunDropped, RunView
from remote_agent.protocol.messages import (
    DaemonStarted,
    Event,
    Finding,
    Gap,
    HelloResult,
    ResidentChanged,
    RunAccepted,
    RunFinished,
    RunRecord,
    RunStarted,
    RunState,
    StageChanged,
    StageRecord,
    StageStatus,
    UnknownData,
)


def event(event: Event, state: NodeState) -> LogLine | None:
    """Return the line for a durable event; None where another event says it better."""
    severity, text = _describe(event, state)
    return LogLine(event.t_wall_ns, event.run_uid, severity, text) if text else None


def gap(gap: Gap, state: NodeState) -> LogLine:
    text = f"events {gap.from_seq} to {gap.to_seq} were trimmed on the host before they were stored here"
    return LogLine(state.hello.t_wall_ns if state.hello else 0, None, "warning", text)


def journal_replaced(hello: HelloResult) -> LogLine:
    text = "the agent has a new journal: runs it had not finished can no longer be followed"
    return LogLine(hello.t_wall_ns, None, "warning", text)


def dropped(run: RunView, change: RunDropped) -> LogLine:
    if change.failure is None:
        return LogLine(change.t_wall_ns, run.run_uid, "info", f"{run.recipe} withdrawn before it was started")
    return LogLine(change.t_wall_ns, run.run_uid, "error", f"{run.recipe} not started: {change.failure.detail}")


def stage_line(stage: StageRecord) -> str:
    """Return what one stage came to: ``weights done 0.29 s, 13.5 GB at 46.4 GB/s``."""
    parts = [f"{stage.name} {stage.status.value}"]
    if stage.duration_ns is not None and stage.status is not StageStatus.SKIPPED:
        parts.append(duration_text(stage.duration_ns))
    line = " ".join(parts)
    if stage.bytes:
        line += f", {size_text(stage.bytes)}"
        line += f" at {rate_text(stage.rate_bytes_s)}" if stage.rate_bytes_s else ""
        line += f" ({stage.path})" if stage.path else ""
    return f"{line}: {stage.reason}" if stage.reason else line


def finish_line(run: RunRecord | RunView) -> str:
    """Return how a run ended: ``ready in 1.08 s``, or what failed and why."""
    took = f" after {duration_text(run.wall_ns)}" if run.wall_ns is not None else ""
    if run.state is RunState.READY:
        return f"ready in {duration_text(run.wall_ns or 0)}"
    if run.failure is None:
        return f"{run.state.value}{took}"
    where = f" in {run.failure.stage}" if run.failure.stage else ""
    return f"{run.state.value}{where}{took}: {run.failure.detail}"


def _describe(event: Event, state: NodeState) -> tuple[str, str]:
    data = event.data
    if isinstance(data, DaemonStarted):
        return "info", f"agent {data.agent_version} started, pid {data.pid}"
    if isinstance(data, RunAccepted):
        return "info", f"{data.recipe.name} accepted from {data.actor.user}@{data.actor.host}"
    if isinstance(data, RunStarted):
        return "info", ""
    if isinstance(data, StageChanged):
        severity = "error" if data.stage.status is StageStatus.FAILED else "info"
        return severity, stage_line(data.stage) if data.stage.status.is_over else ""
    if isinstance(data, RunFinished):
        return ("info" if data.run.state is RunState.READY else "error"), f"{data.run.recipe} {finish_line(data.run)}"
    if isinstance(data, ResidentChanged):
        return "info", _resident_line(data)
    if isinstance(data, Finding):
        return data.severity, data.text
    if isinstance(data, UnknownData) and data.problem is not None:
        return "warning", f"event {event.seq} can't be read by this version: {data.problem}"
    return "info", f"an event of a kind this version does not know: {event.kind}"


def _resident_line(data: ResidentChanged) -> str:
    resident = data.resident
    if data.state == "held":
        attached = f", attached {resident.attached} times" if resident.attached else ""
        took_ns = data.steps.get("park_ns") or data.steps.get("unpark_ns")
        took = f", {'parked' if 'park_ns' in data.steps else 'put back'} in {duration_text(took_ns)}" if took_ns else ""
        attached += "".join(f", served on {server.address}" for server in resident.servers)
        what = f"{resident.tier.value} on {resident.device}, {size_text(resident.bytes)}"
        return f"{resident.recipe} is {what}{attached}{took}"
    return f"{resident.recipe} left {resident.device}" + (f": {data.reason}" if data.reason else "")
