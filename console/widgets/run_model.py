"""A run as its screen draws it, whether it is under way or comes out of the history. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from console import runlog
from console.state import LogLine, NodeState, RunView
from db.records import EventRow, RunRow, StageRow
from remote_agent.protocol.codec import DecodeError, decode
from remote_agent.protocol.messages import EVENT_KINDS, Event, Failure, Progress, StageRecord, StageStatus


@dataclass(frozen=True)
class RunDetail:
    """``state`` is the run's own word; ``wall_ns`` is None until it is over."""

    run_uid: str
    node: str
    recipe: str
    model: str
    actor: str
    state: str
    tier_from: str
    tier_to: str | None
    started_ns: int
    devices: tuple[str, ...] = ()
    wall_ns: int | None = None
    unattributed_ns: int | None = None
    first_output_ns: int | None = None
    output: str | None = None
    failure: Failure | None = None
    stages: tuple[StageRecord, ...] = ()
    progress: Progress | None = None

    @property
    def is_over(self) -> bool:
        return self.state not in ("queued", "running")

    def stage(self, name: str) -> StageRecord | None:
        return next((stage for stage in self.stages if stage.name == name), None)


@dataclass(frozen=True)
class Before:
    """The run to compare with: the previous ready one of the same node and recipe."""

    run_uid: str
    wall_ns: int
    spans_ns: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Start and duration by stage, of stages that were done."""


def detail_of_view(node: str, run: RunView) -> RunDetail:
    return RunDetail(
        run_uid=run.run_uid,
        node=node,
        recipe=run.recipe,
        model=run.model,
        actor=f"{run.actor.user}@{run.actor.host}",
        state=run.state.value,
        tier_from=run.tier_from.value,
        tier_to=run.tier_to.value if run.tier_to else None,
        started_ns=run.accepted_wall_ns,
        devices=run.devices,
        wall_ns=run.wall_ns,
        unattributed_ns=run.unattributed_ns,
        first_output_ns=run.first_output_ns,
        output=run.output,
        failure=run.failure,
        stages=run.stages,
        progress=run.progress,
    )


def detail_of_rows(run: RunRow, stages: Iterable[StageRow]) -> RunDetail:
    failure = None
    if run.failure_code is not None:
        failure = Failure(run.failure_code, run.failure_detail or run.failure_code, run.failure_stage)
    return RunDetail(
        run_uid=run.run_uid,
        node=run.node,
        recipe=run.recipe,
        model=run.model,
        actor=f"{run.actor_user}@{run.actor_host}",
        state=run.state,
        tier_from=run.tier_from,
        tier_to=run.tier_to,
        started_ns=run.started_ns,
        devices=run.devices,
        wall_ns=run.wall_ns,
        unattributed_ns=run.unattributed_ns,
        first_output_ns=run.first_output_ns,
        output=run.output,
        failure=failure,
        stages=tuple(_stage(row) for row in stages),
    )


def _stage(row: StageRow) -> StageRecord:
    known = {status.value: status for status in StageStatus}
    return StageRecord(
        name=row.name,
        status=known.get(row.status, StageStatus.SKIPPED),
        start_ns=row.start_ns,
        duration_ns=row.duration_ns,
        attributed_ns=row.attributed_ns,
        bytes=row.bytes,
        rate_bytes_s=row.rate_bytes_s,
        ceiling_bytes_s=row.ceiling_bytes_s,
        path=row.path,
        reason=row.reason,
        extra=_extra(row.extra_json),
    )


def _extra(text: str) -> dict[str, int | float | str | bool | None]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(content, dict):
        return {}
    return {
        str(key): value for key, value in content.items() if value is None or isinstance(value, (int, float, str, bool))
    }


def before_of_rows(run: RunRow, stages: Iterable[StageRow]) -> Before | None:
    """Return that run as something to compare with; None if it never got a wall time."""
    if run.wall_ns is None:
        return None
    spans = {
        row.name: (row.start_ns, row.duration_ns)
        for row in stages
        if row.status == StageStatus.DONE.value and row.start_ns is not None and row.duration_ns is not None
    }
    return Before(run.run_uid, run.wall_ns, spans)


def log_of_rows(node: str, rows: Iterable[EventRow]) -> tuple[LogLine, ...]:
    """Return the event log's lines of stored events, in the words that a live node's log has."""
    lines = []
    for row in rows:
        event = Event(row.seq, row.run_uid, row.t_mono_ns, row.t_wall_ns, row.kind, _data(row))
        line = runlog.event(event, NodeState(node))
        if line is not None:
            lines.append(line)
    return tuple(lines)


def _data(row: EventRow) -> object:
    """Return an event's data as its type; anything else where it does not fit, which the log then says."""
    cls = EVENT_KINDS.get(row.kind)
    if cls is None:
        return None
    try:
        return decode(cls, json.loads(row.data_json))
    except (ValueError, DecodeError):
        return None
