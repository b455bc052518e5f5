"""Readers: threads that bring segments into pinned buffers, from where copies go on while they read on.

Through the page cache (``staged``) or past it (``direct``). One stream a thread, an event a buffer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from remote_agent.loader.direct import DirectRefused, DirectShards
from remote_agent.loader.ring import Buffer, Lane, PinnedRing

if TYPE_CHECKING:
    from remote_agent.loader.headers import Header
    from remote_agent.loader.plan import Plan
    from remote_agent.loader.progress import Tally
    from remote_agent.loader.schedule import Chunk, SegmentQueue
    from remote_agent.loader.shards import OpenShards


class Readers:
    """What the reader threads of one load share: bytes by way and nanoseconds by step, once they have ended.

    ``direct`` is None where every read goes through the page cache; with ``all_direct`` cached
    segments are read past it too.
    """

    def __init__(
        self,
        headers: tuple[Header, ...],
        plan: Plan,
        target: int,
        ring: PinnedRing,
        shards: OpenShards,
        queue: SegmentQueue,
        tally: Tally,
        direct: DirectShards | None,
        all_direct: bool,
    ) -> None:
        self._headers, self._plan, self._target = headers, plan, target
        self._ring, self._shards, self._queue, self._tally = ring, shards, queue, tally
        self._direct, self._all_direct = direct, all_direct
        self._times: list[dict[str, int]] = []
        self._moved: list[dict[str, int]] = []

    def run(self, lane: Lane, prefers_cached: bool, event: Any) -> None:
        """Move segments until there are none left; a thread's body, so it never raises."""
        times: dict[str, int] = defaultdict(int)
        moved: dict[str, int] = defaultdict(int)
        self._times.append(times)
        self._moved.append(moved)
        try:
            self._ring.enter(lane, event)
            turn = 0
            while not self._tally.stop.is_set() and (chunk := self._queue.take(prefers_cached)) is not None:
                way = self._move(lane, lane.buffers[turn % len(lane.buffers)], chunk, times)
                moved[way] += chunk.segment.length
                self._tally.add(chunk.segment.length)
                turn += 1
        except BaseException as error:
            self._tally.fail(error)
            self._queue.stop()

    def steps(self) -> dict[str, int]:
        """Return the nanoseconds of each step, summed over the threads."""
        return {step: sum(times[step] for times in self._times) for step in ("wait", "read", "copy")}

    def moved(self, way: str) -> int:
        """Return the bytes that went by ``staged`` or ``direct``."""
        return sum(moved[way] for moved in self._moved)

    def _move(self, lane: Lane, buffer: Buffer, chunk: Chunk, times: dict[str, int]) -> str:
        segment = chunk.segment
        begun = time.monotonic_ns()
        self._ring.acquire(buffer)
        free = time.monotonic_ns()
        way, shift = self._read(chunk, buffer)
        full = time.monotonic_ns()
        for offset, length, target in self._plan.pieces(segment):
            self._ring.copy(lane, buffer.address + shift + offset, self._target + target, length)
        self._ring.record(lane, buffer)
        times["wait"] += free - begun
        times["read"] += full - free
        times["copy"] += time.monotonic_ns() - full
        return way

    def _read(self, chunk: Chunk, buffer: Buffer) -> tuple[str, int]:
        """Fill a buffer; return the way taken and where in the buffer the segment begins."""
        segment = chunk.segment
        if self._direct is not None and (self._all_direct or not chunk.is_cached):
            try:
                return "direct", self._direct.read(segment, buffer.view)
            except DirectRefused:
                pass  # `DirectShards.refusal` tells
        if not chunk.is_cached:  # the kernel's own read-ahead stays some hundred kilobytes ahead
            place = self._headers[segment.shard].data_start + segment.offset
            self._shards.ahead.bring_in(segment.shard, place, segment.length)
        self._shards.read(segment.shard, segment.offset, buffer.view[: segment.length])
        return "staged", 0
