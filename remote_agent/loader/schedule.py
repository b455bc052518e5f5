"""One queue of segments for all threads of a load: whoever is faster pulls more.

Segments that the page cache holds are taken by the thread that registers from one end, many at
once, and by the readers from the other end, one at a time; those that it does not hold by readers
alone. Each segment is taken exactly once, unless it is given back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remote_agent.loader.plan import Segment

WAIT_S = 0.05
"""How often a waiting reader looks whether the load was given up."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A segment, and whether the page cache held all of it before the load."""

    segment: Segment
    is_cached: bool


class SegmentQueue:
    """``registers``: a thread will take segments by `take_run`. With ``waits_for_it`` readers leave it everything
    until it has ended, by `close_runs`, and read what it could not.
    """

    def __init__(
        self, cached: Iterable[Chunk], uncached: Iterable[Chunk], registers: bool, waits_for_it: bool = False
    ) -> None:
        self._changed = threading.Condition()
        self._cached: dict[int, deque[Chunk]] = {}
        for chunk in cached:
            self._cached.setdefault(chunk.segment.shard, deque()).append(chunk)
        self._uncached = deque(uncached)
        self._left = sum(len(chunks) for chunks in self._cached.values())
        self._registers, self._waits_for_it = registers, waits_for_it
        self._holds = 0
        self._stopped = False

    def take_run(self, limit_bytes: int, without: Iterable[int] = ()) -> tuple[Chunk, ...]:
        """Return adjoining segments of one shard that is not among ``without``, or nothing where there are none left.

        The last ones are shared with the readers: at most half of what is left is taken at once.
        They count as held until `settle` or `give_back`.
        """
        with self._changed:
            for shard, chunks in self._cached.items():
                if chunks and shard not in without and not self._stopped:
                    taken = _take_adjoining(chunks, limit_bytes, self._left if self._waits_for_it else self._left // 2)
                    self._left -= len(taken)
                    self._holds += 1
                    return taken
        return ()

    def settle(self) -> None:
        """Say that what was taken by `take_run` will not come back."""
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()

    def give_back(self, chunks: Sequence[Chunk]) -> None:
        """Put what `take_run` gave back where it was."""
        with self._changed:
            self._cached[chunks[0].segment.shard].extendleft(reversed(chunks))
            self._left += len(chunks)
            self._holds -= 1
            self._changed.notify_all()

    def close_runs(self) -> None:
        """Say that `take_run` will not be called again; what is left is the readers'."""
        with self._changed:
            self._registers = False
            self._holds = 0
            self._changed.notify_all()

    def take(self, prefers_cached: bool) -> Chunk | None:
        """Return one segment, of the kind preferred while there is any, or None once nothing can be left.

        Waits while what is held may still be given back.
        """
        with self._changed:
            while not self._stopped:
                chunk = self._pop_cached() if prefers_cached else None
                chunk = chunk or (self._uncached.popleft() if self._uncached else None) or self._pop_cached()
                if chunk is not None:
                    return chunk
                if not (self._registers and (self._holds or self._left)):
                    return None
                self._changed.wait(WAIT_S)
        return None

    def stop(self) -> None:
        """Give nothing out any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _pop_cached(self) -> Chunk | None:
        if self._registers and self._waits_for_it:
            return None
        for chunks in reversed(self._cached.values()):
            if chunks:
                self._left -= 1
                return chunks.pop()
        return None


def _take_adjoining(chunks: deque[Chunk], limit_bytes: int, limit_count: int) -> tuple[Chunk, ...]:
    taken = [chunks.popleft()]
    length = taken[0].segment.length
    while chunks and len(taken) < limit_count:
        last, following = taken[-1].segment, chunks[0].segment
        if following.offset != last.offset + last.length or length + following.length > limit_bytes:
            break
        length += following.length
        taken.append(chunks.popleft())
    return tuple(taken)
