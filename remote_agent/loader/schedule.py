"""One queue of bytes for all threads of a load: whoever is faster takes more.

Bytes that the page cache holds are taken by the thread that registers from one end, many at
once, and by the readers from the other end, a segment at a time; those that it does not hold by readers
alone. Each byte is taken exactly once, unless it is given back. Nothing is cut before it is taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from remote_agent.loader.plan import Segment

WAIT_S = 0.05
"""How often a waiting reader looks whether the load was given up."""


class Chunk(NamedTuple):
    """A segment, and whether the page cache held all of it before the load."""

    segment: Segment
    is_cached: bool


class SegmentQueue:
    """``starts``: where each shard's data section begins in its file; cuts are made at multiples of ``length`` there,
    but for the ends of what was put in. ``registers``: a thread will call `take_run`.
    """

    def __init__(
        self,
        cached: Iterable[Chunk],
        uncached: Iterable[Chunk],
        starts: Sequence[int],
        length: int,
        registers: bool,
    ) -> None:
        self._changed = threading.Condition()
        self._starts, self._length = starts, length
        self._cached: dict[int, deque[Chunk]] = {}
        for chunk in cached:
            self._cached.setdefault(chunk.segment.shard, deque()).append(chunk)
        self._uncached = deque(uncached)
        self._cached_bytes = sum(chunk.segment.length for chunks in self._cached.values() for chunk in chunks)
        self._registers = registers
        self._holds = 0
        self._stopped = False

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is left to be taken."""
        return not self._cached_bytes and not self._uncached

    def take_run(self, limit_bytes: int, without: Iterable[int] = (), is_shared: bool = True) -> Chunk | None:
        """Return adjoining bytes of one shard that is not among ``without``, or None where there are none left.

        At least one segment. With ``is_shared`` at most half of what is left is taken at once, so that readers
        have their part of the last ones. It counts as held until `settle` or `give_back`.
        """
        with self._changed:
            limit = min(limit_bytes, self._cached_bytes // 2) if is_shared else limit_bytes
            for shard, chunks in self._cached.items():
                if chunks and shard not in without and not self._stopped:
                    taken = self._cut_front(chunks, limit)
                    self._cached_bytes -= taken.segment.length
                    self._holds += 1
                    return taken
        return None

    def settle(self) -> None:
        """Say that what was taken by `take_run` will not come back."""
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()

    def give_back(self, chunk: Chunk) -> None:
        """Put what `take_run` gave back where it was."""
        with self._changed:
            self._cached[chunk.segment.shard].appendleft(chunk)
            self._cached_bytes += chunk.segment.length
            self._holds -= 1
            self._changed.notify_all()

    def close_runs(self) -> None:
        """Say that `take_run` will not be called again; what is left is the readers'."""
        with self._changed:
            self._registers = False
            self._holds = 0
            self._changed.notify_all()

    def take(self, prefers_cached: bool, max_bytes: int | None = None) -> Chunk | None:
        """Return one segment, of the kind preferred while there is any, or None once nothing can be left.

        One that is not cached ends at the next multiple of ``max_bytes`` at the latest. Waits while what is held may
        still be given back.
        """
        with self._changed:
            while not self._stopped:
                if self._cached_bytes and (prefers_cached or not self._uncached):
                    return self._cut_back()
                if self._uncached:
                    return self._cut_front(self._uncached, 0, max_bytes)
                if not (self._registers and self._holds):
                    return None
                self._changed.wait(WAIT_S)
        return None

    def stop(self) -> None:
        """Give nothing out any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _cut_front(self, chunks: deque[Chunk], limit_bytes: int, max_bytes: int | None = None) -> Chunk:
        """Take from the first of ``chunks`` what a limit allows, up to a multiple of the length; one segment always,
        which ends at the next multiple of ``max_bytes`` at the latest.
        """
        (shard, offset, length), is_cached = chunks.popleft()
        start = self._starts[shard] + offset
        end = max(start // self._length + 1, (start + limit_bytes) // self._length) * self._length
        if max_bytes is not None:
            end = min(end, (start // max_bytes + 1) * max_bytes)
        cut = end - start
        if cut >= length:
            return Chunk(Segment(shard, offset, length), is_cached)
        chunks.appendleft(Chunk(Segment(shard, offset + cut, length - cut), is_cached))
        return Chunk(Segment(shard, offset, cut), is_cached)

    def _cut_back(self) -> Chunk:
        """Take the last segment of what is cached."""
        chunks = next(chunks for chunks in reversed(self._cached.values()) if chunks)
        (shard, offset, length), is_cached = chunks.pop()
        start = self._starts[shard] + offset
        kept = (start + length - 1) // self._length * self._length - start
        if kept > 0:
            chunks.append(Chunk(Segment(shard, offset, kept), is_cached))
        kept = max(kept, 0)
        self._cached_bytes -= length - kept
        return Chunk(Segment(shard, offset + kept, length - kept), is_cached)
