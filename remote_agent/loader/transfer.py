"""Moves every planned byte to a GPU along a route: one thread that makes CUDA calls, readers beside it, one queue.

Memory comes from an allocator on the caller's stream, so every copy first waits for what is queued
there: the memory's last user may still run. When a transfer has run, or a part of it raised, no copy is
under way and no thread of it is alive; when it was closed, nothing is registered, mapped, locked or open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.cleanup import finally_do, on_failure
from remote_agent.loader.direct import DirectShards
from remote_agent.loader.plan import Plan
from remote_agent.loader.progress import Announce, Progress, Tally
from remote_agent.loader.registrar import Registrar
from remote_agent.loader.registrations import Registrations
from remote_agent.loader.ring import Buffer
from remote_agent.loader.route import Route
from remote_agent.loader.schedule import SegmentQueue
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.staged import Readers
from remote_agent.loader.submitter import WAYS, Submitter
from remote_agent.loader.switching import quickly

if TYPE_CHECKING:
    from remote_agent.devices.cuda import CudaDevice


@dataclass
class Moved:
    """What a transfer did. ``steps``: nanoseconds, summed over threads; ``path``: the ways that bytes went by."""

    steps: dict[str, int]
    counters: dict[str, int]
    reasons: list[str]

    @property
    def path(self) -> str:
        return "+".join(way for way in WAYS if self.counters[f"{way}_bytes"]) or "staged"


class Transfer:
    """One transfer: `begin` and `run` it once, in one thread, whichever; then `close` it, in any.

    That gives back all registrations but ``kept``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        device: CudaDevice,
        shards: OpenShards,
        route: Route,
        announce: Announce,
        kept: Registrations | None = None,
    ) -> None:
        self._route, self._device, self._ring = route, device, device.ring
        limits, headers = self._ring.limits, checkpoint.shards
        self._tally = Tally(sum(chunk.segment.length for chunk in (*route.cached, *route.uncached)))
        maps = route.maps and bool(route.cached)
        segments = SegmentQueue(
            route.cached, route.uncached, [header.data_start for header in headers], route.cut.buffer_bytes, maps
        )
        self._using = contextlib.ExitStack()
        self._direct = DirectShards(headers, shards) if route.reads_direct else None
        self._readers = Readers(
            headers, shards, segments, self._tally, self._direct, route.reads_all_direct, self._ring.processors
        )
        self._registrar = Registrar(
            checkpoint, plan, shards, device.runtime, self._ring, announce, kept, limits.registered_bytes
        )
        self._submitter = Submitter(
            headers, plan, self._ring, segments, self._tally, self._readers, self._registrar,
            maps, route.maps_alone,
        )  # fmt: skip

    @property
    def has_to_close(self) -> bool:
        """Return whether `close` has registrations to give back, which takes a while."""
        return self._registrar.has_own

    def begin(self) -> None:
        """Have readers fill buffers, for which no memory is needed yet. Raises: LoadError if a thread can't be had."""
        if not self._tally.total:
            return
        with on_failure(self._using.close):
            self._using.enter_context(quickly(self._ring.limits.switch_interval_s))
            buffers = self._using.enter_context(self._ring.use(self._route.cut))
            self._using.callback(self._readers.stop)
            self._start = partial(self._start_readers, buffers)
            self._submitter.begin(self._start)

    def run(self, base: int, stream: int, progress: Progress, meanwhile: Callable[[], None]) -> None:
        """Move every byte to device address ``base``, memory of ``stream``, and wait for the last copy.

        ``meanwhile`` is called once all of them are queued. The calling thread makes every CUDA call.
        Raises: LoadError, DeviceError, or what ``progress`` or ``meanwhile`` raised.
        """
        if not self._tally.total:
            meanwhile()
            return
        with self._using:
            self._ring.follow(stream)
            self._submitter.run(base, self._start, progress)
            self._readers.stop()
            if self._tally.error is not None:
                raise self._tally.error
            self._registrar.unlock()
            meanwhile()
        progress(self._tally.total, self._tally.total)

    def close(self) -> None:
        """Give back whatever is still registered, mapped, locked or open; every copy must be over."""
        self._using.close()
        with finally_do(self._registrar.close, *([self._direct.close] if self._direct is not None else [])):
            pass

    def moved(self) -> Moved:
        """Return what was done, once `run` has returned."""
        reasons = [*self._route.reasons, *dict.fromkeys(self._submitter.refusals)]
        if self._direct is not None and self._direct.refusal is not None:
            reasons.append(f"{self._direct.refusal}; read through the page cache")
        counters = {
            **{f"{way}_bytes": count for way, count in self._submitter.sent.items()},
            "registrations": self._registrar.registrations,
            "registrations_refused": len(self._submitter.refusals),
            **self._route.counters,
        }
        return Moved({**self._readers.steps(), **self._submitter.times, **self._registrar.times}, counters, reasons)

    def _start_readers(self, buffers: Sequence[Buffer]) -> int:
        """Start no more than there are segments; some prefer cached ones, so that both kinds move."""
        route = self._route
        count = min(route.cut.readers, max(1, route.counters["segments"]))
        cached_first = 0 if route.maps else self._ring.limits.mixed.readers
        return self._readers.start(buffers, count, cached_first if route.uncached else count)
