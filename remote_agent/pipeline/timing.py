"""Times the stages of a worker and reports each as it begins, moves and ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Union

from remote_agent.loader.problems import shown
from remote_agent.protocol.internal import InternalMessage, WorkerMaps, WorkerProgress, WorkerStage
from remote_agent.protocol.messages import StageStatus

PROGRESS_INTERVAL_NS = 100_000_000

Fact = Union[int, float, str, bool, None]


class Synchronisable(Protocol):
    """What a span waits for before it closes, so that queued work counts where it was caused."""

    def synchronise(self) -> None: ...


@dataclass
class Measure:
    """What a stage says about itself while its span is open; reported when it closes.

    ``announce`` tells at once, from any thread, which file's pages may be touched from now on.
    """

    start_mono_ns: int
    status: StageStatus = StageStatus.DONE
    bytes: int | None = None
    rate_bytes_s: float | None = None
    ceiling_bytes_s: float | None = None
    path: str | None = None
    reason: str | None = None
    extra: dict[str, Fact] = field(default_factory=dict)
    announce: Callable[[Path], None] = lambda path: None


class Stages:
    """Opens spans, one within another at most, and sends what happens in it; progress at most ten times a second."""

    def __init__(self, send: Callable[[InternalMessage], None], now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._send = send
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._last_progress_ns = 0
        self.current: str | None = None
        self._open: str | None = None

    @contextlib.contextmanager
    def measure(
        self, stage: str, device: Synchronisable | None = None, start_mono_ns: int | None = None
    ) -> Iterator[Measure]:
        """Report ``stage`` as running, then as over with its times, whatever happens inside.

        ``device`` is synchronised before the span closes; a span left by an exception is ``failed``.
        """
        measure = Measure(self._now_ns() if start_mono_ns is None else start_mono_ns)
        measure.announce = lambda path: self._send(WorkerMaps(stage, shown(str(path), 400)))
        outer, self.current, self._last_progress_ns = self._open, stage, 0
        self._open = stage
        self._send(WorkerStage(stage, StageStatus.RUNNING, measure.start_mono_ns))
        status = StageStatus.FAILED
        try:
            yield measure
            if device is not None:
                device.synchronise()
            status = measure.status
        finally:
            self._send(self._record(stage, status, measure))
            self._open = outer
            if outer is not None and status is not StageStatus.FAILED:
                self.current = outer

    def reuse(self, stage: str, reason: str, start_mono_ns: int | None = None) -> None:
        """Report ``stage`` as over at once: what it would make is here already."""
        now = self._now_ns()
        start = now if start_mono_ns is None else start_mono_ns
        self._send(WorkerStage(stage, StageStatus.REUSED, start, now, reason=reason))

    def progress(
        self,
        stage: str,
        done: int,
        total: int | None,
        *,
        start_mono_ns: int,
        unit: str = "bytes",
        ceiling_bytes_s: float | None = None,
    ) -> None:
        """Report how far ``stage`` is, or drop the report when the last one was under 100 ms ago.

        May be called from any thread.
        """
        now = self._now_ns()
        with self._lock:
            if now - self._last_progress_ns < PROGRESS_INTERVAL_NS:
                return
            self._last_progress_ns = now
        elapsed_s = (now - start_mono_ns) / 1e9
        rate = done / elapsed_s if unit == "bytes" and elapsed_s > 0 else None
        self._send(WorkerProgress(stage, done, total, unit, rate, ceiling_bytes_s))

    def _record(self, stage: str, status: StageStatus, measure: Measure) -> WorkerStage:
        return WorkerStage(
            stage,
            status,
            measure.start_mono_ns,
            self._now_ns(),
            bytes=measure.bytes,
            rate_bytes_s=measure.rate_bytes_s,
            ceiling_bytes_s=measure.ceiling_bytes_s,
            path=measure.path,
            reason=measure.reason,
            extra=dict(measure.extra),
        )
