"""The stages of one run as they were: parts of several workers merged, wall time divided exactly. No clock here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Union

from remote_agent.agentd.lifecycle import StageEvent, next_stage_status
from remote_agent.pipeline.spans import Span, attribute
from remote_agent.protocol.messages import NATIVE_STAGES, StageRecord, StageStatus

Figure = Union[int, float, str, bool, None]

_ENDINGS = {
    StageStatus.DONE: StageEvent.FINISH,
    StageStatus.REUSED: StageEvent.REUSE,
    StageStatus.SKIPPED: StageEvent.SKIP,
    StageStatus.FAILED: StageEvent.FAIL,
}


@dataclass(frozen=True)
class Figures:
    """What a stage says about itself beside its times."""

    bytes: int | None = None
    rate_bytes_s: float | None = None
    ceiling_bytes_s: float | None = None
    path: str | None = None
    reason: str | None = None
    extra: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One worker's share of a stage, in nanoseconds since the run was accepted."""

    status: StageStatus = StageStatus.PENDING
    start_ns: int = 0
    end_ns: int | None = None
    figures: Figures = field(default_factory=Figures)


class Timeline:
    """Every stage's parts. ``parts`` names them (devices); agentd's own stages have one, named by ``""``."""

    def __init__(self, accepted_mono_ns: int, stages: Sequence[str] = NATIVE_STAGES) -> None:
        self.accepted_mono_ns, self.stages = accepted_mono_ns, tuple(stages)
        self._parts: dict[str, dict[str, Part]] = {stage: {"": Part()} for stage in stages}

    def divide(self, stages: Sequence[str], parts: Sequence[str]) -> None:
        """Say that each of ``stages``, still pending, is done once by each of ``parts``."""
        for stage in stages:
            self._parts[stage] = {part: Part() for part in parts}

    def status(self, stage: str) -> StageStatus:
        return _merged_status([part.status for part in self._parts[stage].values()])

    def part_status(self, stage: str, part: str) -> StageStatus:
        return self._parts[stage][part].status

    def begin(self, stage: str, part: str, mono_ns: int) -> None:
        """Start a part. Raises: IllegalTransitionError if it was started before."""
        old = self._parts[stage][part]
        status = next_stage_status(old.status, StageEvent.START)
        self._parts[stage][part] = replace(old, status=status, start_ns=self._since(mono_ns))

    def end(self, stage: str, part: str, status: StageStatus, mono_ns: int, figures: Figures) -> None:
        """End a part with ``status``. Raises: IllegalTransitionError if it can't end so."""
        old = self._parts[stage][part]
        now_ns = self._since(mono_ns)
        start_ns = now_ns if old.status is StageStatus.PENDING else min(old.start_ns, now_ns)
        status = next_stage_status(old.status, _ENDINGS[status])
        self._parts[stage][part] = Part(status, start_ns, now_ns, figures)

    def close(self, mono_ns: int, reason: str, skip_reason: str | None) -> None:
        """End what is unfinished: running parts fail with ``reason``, pending ones were never reached."""
        for stage, parts in self._parts.items():
            for name, part in parts.items():
                if part.status is StageStatus.RUNNING:
                    self.end(stage, name, StageStatus.FAILED, mono_ns, replace(part.figures, reason=reason))
                elif part.status is StageStatus.PENDING:
                    figures = Figures(reason=skip_reason)
                    self._parts[stage][name] = Part(StageStatus.SKIPPED, figures=figures)

    def record(self, stage: str) -> StageRecord:
        """Return the stage as it stands: earliest start, latest end, bytes summed."""
        return _merge(stage, self._parts[stage])

    def records(self) -> tuple[StageRecord, ...]:
        return tuple(self.record(stage) for stage in self.stages)

    def settle(self, wall_ns: int) -> tuple[tuple[StageRecord, ...], int]:
        """Return every stage with its share of ``wall_ns``, and what no stage covers; together exactly that."""
        spans = [
            Span(stage, part.start_ns, part.end_ns)
            for stage, parts in self._parts.items()
            for part in parts.values()
            if part.end_ns is not None
        ]
        shares, unattributed_ns = attribute(spans, self.stages, wall_ns)
        return tuple(share_out(record, shares[record.name]) for record in self.records()), unattributed_ns

    def _since(self, mono_ns: int) -> int:
        return max(0, mono_ns - self.accepted_mono_ns)


def share_out(record: StageRecord, share_ns: int) -> StageRecord:
    """Return ``record`` with its share of the wall time; a stage that was never reached has none."""
    reached = record.status is not StageStatus.SKIPPED or record.start_ns is not None
    return replace(record, attributed_ns=share_ns if reached else 0)


def _merged_status(statuses: Sequence[StageStatus]) -> StageStatus:
    kinds = set(statuses)
    if StageStatus.FAILED in kinds:
        return StageStatus.FAILED
    if len(kinds) == 1:
        return statuses[0]
    if kinds & {StageStatus.RUNNING, StageStatus.PENDING}:
        return StageStatus.RUNNING
    return StageStatus.DONE


def _merge(stage: str, parts: Mapping[str, Part]) -> StageRecord:
    status = _merged_status([part.status for part in parts.values()])
    begun = [part for part in parts.values() if part.status is not StageStatus.PENDING and not _unreached(part)]
    if not begun:
        reason = _joined([part.figures.reason for part in parts.values()])
        return StageRecord(stage, status, reason=reason)
    start_ns = min(part.start_ns for part in begun)
    ends = [part.end_ns for part in begun if part.end_ns is not None]
    duration_ns = max(ends) - start_ns if status.is_over and ends else None
    figures = [part.figures for part in begun]
    sizes = [figure.bytes for figure in figures if figure.bytes is not None]
    return StageRecord(
        stage,
        status,
        start_ns,
        duration_ns,
        bytes=sum(sizes) if sizes else None,
        rate_bytes_s=_rate(figures, sum(sizes), duration_ns),
        ceiling_bytes_s=_total([figure.ceiling_bytes_s for figure in figures]),
        path=_joined([figure.path for figure in figures]),
        reason=_joined([figure.reason for figure in figures]),
        extra=_extras({name: part.figures.extra for name, part in parts.items()}),
    )


def _unreached(part: Part) -> bool:
    return part.status is StageStatus.SKIPPED and part.end_ns is None


def _rate(figures: Sequence[Figures], total_bytes: int, duration_ns: int | None) -> float | None:
    if len(figures) == 1:
        return figures[0].rate_bytes_s
    if any(figure.rate_bytes_s is None for figure in figures) or not duration_ns:
        return None
    return total_bytes / (duration_ns / 1e9)


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _joined(texts: Sequence[str | None]) -> str | None:
    return "; ".join(dict.fromkeys(text for text in texts if text)) or None


def _extras(extras: Mapping[str, Mapping[str, Figure]]) -> Mapping[str, Figure]:
    """Return the figures under their names; where devices differ, under ``device.name``."""
    merged: dict[str, Figure] = {}
    for key in dict.fromkeys(key for extra in extras.values() for key in extra):
        values = [extra[key] for extra in extras.values() if key in extra]
        if len(extras) == 1 or (len(values) == len(extras) and len(set(values)) == 1):
            merged[key] = values[0]
        else:
            merged.update({f"{name}.{key}": extra[key] for name, extra in extras.items() if key in extra})
    return merged
