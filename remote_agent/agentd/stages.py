"""The stages of one run as events and deadlines: every change of a stage's status is told exactly once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from remote_agent.agentd.timeline import Figure, Figures, Timeline
from remote_agent.errors import StageError
from remote_agent.loader.problems import gigabytes
from remote_agent.protocol.internal import WorkerProgress, WorkerStage
from remote_agent.protocol.messages import NATIVE_STAGES, Failure, Progress, StageRecord, StageStatus

WORKER_STAGES = NATIVE_STAGES[NATIVE_STAGES.index("init") :]

_MAX_TEXT = 500
_MAX_EXTRAS = 64


class StageBoard:
    """Writes a timeline and tells its changes; ``on_overdue`` is called once for a stage over its deadline."""

    def __init__(
        self,
        timeline: Timeline,
        deadlines_s: Mapping[str, float],
        on_change: Callable[[StageRecord], None],
        on_overdue: Callable[[StageError], None],
    ) -> None:
        self.timeline = timeline
        self._deadlines_s, self._on_change, self._on_overdue = deadlines_s, on_change, on_overdue
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._progress: dict[str, dict[str, WorkerProgress]] = {}
        self._notes: dict[tuple[str, str], Figures] = {}

    @property
    def current(self) -> str | None:
        """The latest stage that runs, else the latest that is over."""
        for wanted in ((StageStatus.RUNNING,), (StageStatus.FAILED, StageStatus.DONE, StageStatus.REUSED)):
            for stage in reversed(self.timeline.stages):
                if self.timeline.status(stage) in wanted:
                    return stage
        return None

    def begin(self, stage: str, part: str = "", mono_ns: int | None = None) -> None:
        before = self.timeline.status(stage)
        self.timeline.begin(stage, part, time.monotonic_ns() if mono_ns is None else mono_ns)
        self._tell(stage, before)

    def end(
        self,
        stage: str,
        status: StageStatus = StageStatus.DONE,
        figures: Figures | None = None,
        part: str = "",
        mono_ns: int | None = None,
    ) -> None:
        before = self.timeline.status(stage)
        end_ns = time.monotonic_ns() if mono_ns is None else mono_ns
        self.timeline.end(stage, part, status, end_ns, figures or Figures())
        self._tell(stage, before)

    def note(self, stage: str, device: str, figures: Figures) -> None:
        """Have a reason and extras of the agent's own told beside those that a worker will report of its part."""
        self._notes[stage, device] = figures

    def from_worker(self, device: str, message: WorkerStage, zygote_reason: str | None) -> None:
        """Take in what a worker says of a stage; its times count where they lie within the run.

        Raises: IllegalTransitionError for a stage that can't change so; KeyError for one that is no worker's.
        """
        if message.stage not in WORKER_STAGES:
            raise KeyError(message.stage)
        status = self.timeline.part_status(message.stage, device)
        if status is StageStatus.PENDING:
            self.begin(message.stage, device, message.start_mono_ns)
        if not message.status.is_over:
            return
        noted = self._notes.get((message.stage, device), Figures())
        reason = message.reason or (zygote_reason if message.stage == "init" else None)
        figures = Figures(
            message.bytes,
            message.rate_bytes_s,
            message.ceiling_bytes_s,
            _short(message.path),
            _short("; ".join(filter(None, (noted.reason, reason))) or None),
            _bounded({**noted.extra, **message.extra}),
        )
        end_ns = min(message.end_mono_ns or time.monotonic_ns(), time.monotonic_ns())
        self.end(message.stage, message.status, figures, device, end_ns)

    def progress(self, run_uid: str, device: str, message: WorkerProgress) -> Progress:
        """Return how far a stage is over all devices."""
        parts = self._progress.setdefault(message.stage, {})
        parts[device] = message
        totals = [part.total for part in parts.values()]
        rates = [part.rate_bytes_s for part in parts.values() if part.rate_bytes_s is not None]
        ceilings = [part.ceiling_bytes_s for part in parts.values() if part.ceiling_bytes_s is not None]
        return Progress(
            run_uid,
            message.stage,
            sum(part.done for part in parts.values()),
            sum(total for total in totals if total is not None) if None not in totals else None,
            message.unit[:_MAX_TEXT],
            sum(rates) if rates else None,
            sum(ceilings) if ceilings else None,
        )

    def close(self, reason: str, skip_reason: str | None = None) -> None:
        """End what runs and skip what was not reached; no deadline is left."""
        running = [stage for stage in self.timeline.stages if self.timeline.status(stage) is StageStatus.RUNNING]
        self.timeline.close(time.monotonic_ns(), reason, skip_reason)
        for timer in self._timers.values():
            timer.cancel()
        for stage in running:
            self._on_change(self.timeline.record(stage))

    def _tell(self, stage: str, before: StageStatus) -> None:
        record = self.timeline.record(stage)
        if record.status is before:
            return
        self._on_change(record)
        limit_s = self._deadlines_s.get(stage)
        if record.status is StageStatus.RUNNING and limit_s is not None:
            self._timers[stage] = asyncio.get_running_loop().call_later(limit_s, self._overdue, stage, limit_s)
        elif record.status.is_over and stage in self._timers:
            self._timers.pop(stage).cancel()

    def _overdue(self, stage: str, limit_s: float) -> None:
        start_ns = self.timeline.accepted_mono_ns + (self.timeline.record(stage).start_ns or 0)
        detail = f"{stage} ran {(time.monotonic_ns() - start_ns) / 1e9:.1f} s; its deadline is {limit_s:g} s"
        parts = self._progress.get(stage, {}).values()
        if parts:
            done, total = sum(part.done for part in parts), sum(part.total or 0 for part in parts)
            in_bytes = all(part.unit == "bytes" for part in parts)
            figure = gigabytes if in_bytes else str
            detail += f"; {figure(done)} of {figure(total)} done"
        self._on_overdue(StageError(Failure("deadline", detail, stage)))


def _short(text: str | None) -> str | None:
    return text if text is None else text[:_MAX_TEXT]


def _bounded(extra: Mapping[str, Figure]) -> Mapping[str, Figure]:
    items = list(extra.items())[:_MAX_EXTRAS]
    return {name[:_MAX_TEXT]: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in items}
