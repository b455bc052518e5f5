"""Measures what event-loop callbacks take of the processor, so that the ones that freeze a screen have a name."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

KEPT = 10


@dataclass
class Watched:
    """``count`` callbacks took ``total_ns`` of their thread's processor time; ``longest``: the worst, by name."""

    count: int = 0
    total_ns: int = 0
    longest: list[tuple[int, str]] = field(default_factory=list)

    @property
    def longest_ns(self) -> int:
        return max((taken_ns for taken_ns, _ in self.longest), default=0)

    def note(self, taken_ns: int, handle: asyncio.Handle) -> None:
        self.count += 1
        self.total_ns += taken_ns
        if len(self.longest) < KEPT:
            heapq.heappush(self.longest, (taken_ns, _name(handle)))
        elif taken_ns > self.longest[0][0]:
            heapq.heapreplace(self.longest, (taken_ns, _name(handle)))


@contextmanager
def watched_loop() -> Iterator[Watched]:
    """Measure every callback of every loop until this ends; a callback's own time, not what it waits for."""
    watched, run = Watched(), asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        began_ns = time.thread_time_ns()
        try:
            run(handle)
        finally:
            watched.note(time.thread_time_ns() - began_ns, handle)

    asyncio.Handle._run = measured  # type: ignore[method-assign]
    try:
        yield watched
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


def _name(handle: asyncio.Handle) -> str:
    """Return what a callback is; of a task's step, its coroutine and where that waits now."""
    callback = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        frames = owner.get_stack(limit=1)
        where = f" at {frames[0].f_code.co_filename.rpartition('/')[2]}:{frames[0].f_lineno}" if frames else ""
        return f"{getattr(owner.get_coro(), '__qualname__', owner)}{where}"
    return str(getattr(callback, "__qualname__", callback))
