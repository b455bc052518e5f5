"""What the journal says is unfinished: open runs and held models, folded event by event. Pure.

A checkpoint of it lets old segments go without forgetting what is still open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from remote_agent.agentd.timeline import share_out
from remote_agent.pipeline.spans import Span, attribute
from remote_agent.protocol.messages import (
    Event,
    Failure,
    Resident,
    ResidentChanged,
    RunAccepted,
    RunFinished,
    RunRecord,
    RunStarted,
    RunState,
    StageChanged,
    StageRecord,
    StageStatus,
    Tier,
)


@dataclass(frozen=True)
class OpenRun:
    """A run that was accepted and has not ended, as its events tell it."""

    record: RunRecord
    accepted_mono_ns: int
    last_mono_ns: int


@dataclass(frozen=True)
class Checkpoint:
    """Everything open after event ``seq``."""

    journal_uuid: str
    seq: int
    runs: tuple[OpenRun, ...]
    residents: tuple[Resident, ...]


class Ledger:
    """Folds events, each once and in order, into what is open now."""

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        self.seq = checkpoint.seq if checkpoint else 0
        self.runs = {run.record.run_uid: run for run in (checkpoint.runs if checkpoint else ())}
        self.residents = {(r.run_uid, r.device): r for r in (checkpoint.residents if checkpoint else ())}

    def checkpoint(self, journal_uuid: str) -> Checkpoint:
        return Checkpoint(journal_uuid, self.seq, tuple(self.runs.values()), tuple(self.residents.values()))

    def apply(self, event: Event) -> None:
        """Take ``event`` in, its data being the dataclass of its kind."""
        self.seq = event.seq
        data, uid = event.data, event.run_uid or ""
        if isinstance(data, RunAccepted):
            self.runs[uid] = OpenRun(_accepted(uid, event, data), event.t_mono_ns, event.t_mono_ns)
        elif isinstance(data, RunFinished):
            self.runs.pop(uid, None)
        elif isinstance(data, ResidentChanged):
            key = (data.resident.run_uid, data.resident.device)
            if data.state == "held":
                self.residents[key] = data.resident
            else:
                self.residents.pop(key, None)
        elif uid in self.runs:
            open_run = self.runs[uid]
            self.runs[uid] = replace(open_run, record=_changed(open_run.record, data), last_mono_ns=event.t_mono_ns)


def interrupted(run: OpenRun, reason: str) -> RunRecord:
    """Return the run as it ended when its agent did: what is not known to have been spent is not claimed."""
    wall_ns = max(0, run.last_mono_ns - run.accepted_mono_ns)
    stages = [_closed(stage, wall_ns, reason) for stage in run.record.stages]
    spans = [
        Span(stage.name, stage.start_ns, stage.start_ns + (stage.duration_ns or 0))
        for stage in stages
        if stage.start_ns is not None
    ]
    shares, unattributed_ns = attribute(spans, [stage.name for stage in stages], wall_ns)
    current = next((stage.name for stage in stages if stage.status is StageStatus.FAILED), None)
    return replace(
        run.record,
        state=RunState.INTERRUPTED,
        wall_ns=wall_ns,
        unattributed_ns=unattributed_ns,
        stages=tuple(share_out(stage, shares[stage.name]) for stage in stages),
        failure=Failure("interrupted", reason, current),
    )


def _accepted(uid: str, event: Event, data: RunAccepted) -> RunRecord:
    return RunRecord(
        uid,
        data.recipe.name,
        data.recipe_hash,
        data.recipe.model.path,
        data.actor,
        RunState.QUEUED,
        data.tier_from,
        None,
        event.t_wall_ns,
        data.devices,
        stages=tuple(StageRecord(stage, StageStatus.PENDING) for stage in data.recipe.stages),
    )


def _changed(record: RunRecord, data: object) -> RunRecord:
    if isinstance(data, RunStarted):
        return replace(record, state=RunState.RUNNING)
    if isinstance(data, StageChanged):
        stages = (data.stage if stage.name == data.stage.name else stage for stage in record.stages)
        tier = data.stage.extra.get("tier_from")
        known = tier if isinstance(tier, str) and tier in {member.value for member in Tier} else record.tier_from
        return replace(record, stages=tuple(stages), tier_from=Tier(known))
    return record


def _closed(stage: StageRecord, wall_ns: int, reason: str) -> StageRecord:
    if stage.status is StageStatus.RUNNING:
        start_ns = min(stage.start_ns or 0, wall_ns)
        return replace(
            stage, status=StageStatus.FAILED, start_ns=start_ns, duration_ns=wall_ns - start_ns, reason=reason
        )
    if stage.status is StageStatus.PENDING:
        return replace(stage, status=StageStatus.SKIPPED)
    return stage
