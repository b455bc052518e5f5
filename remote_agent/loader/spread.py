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
"""Where all but the first are expected to wait less, starting threads takes longer."""


def spread(call: Callable[[Item], Result], items: Sequence[Item], name: str) -> list[Result]:
    """Return what ``call`` gives for each item, in order; the first decides whether the others get threads.

    What counts is how long it waited: threads that compute would take turns.
    """
    begun, computed = time.monotonic_ns(), time.thread_time_ns()
    results = [call(item) for item in items[:1]]
    rest = items[1:]
    waited_ns = time.monotonic_ns() - begun - (time.thread_time_ns() - computed)
    if waited_ns * len(rest) < QUICK_NS:
        return [*results, *map(call, rest)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix=name) as pool:
        return [*results, *pool.map(call, rest)]
