"""One call for each of several files, at once where that is quicker than one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = 8
"""On network storage each call costs a round trip."""

QUICK_NS = 2_000_000
"""Where all but the first are expected to take less, starting threads takes longer."""


def spread(call: Callable[[Item], Result], items: Sequence[Item], name: str) -> list[Result]:
    """Return what ``call`` gives for each item, in order; the first decides whether the others get threads."""
    begun = time.monotonic_ns()
    results = [call(item) for item in items[:1]]
    rest = items[1:]
    if (time.monotonic_ns() - begun) * len(rest) < QUICK_NS:
        return [*results, *map(call, rest)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix=name) as pool:
        return [*results, *pool.map(call, rest)]
