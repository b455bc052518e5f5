"""Numbers and percentages of a rollout's node list, and the batches that they cut it into.

A percentage is of the whole list, rounds down, and is at least 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

Size = int | str
"""A number of nodes, or ``"10%"``."""

_PERCENT = re.compile(r"([0-9]{1,3})%")


def size_problem(size: Size) -> str | None:
    """Say what is wrong with a size; None for a number from 1 or a percentage from 1 to 100."""
    if isinstance(size, int):
        return None if size >= 1 else f"{size} must be at least 1"
    match = _PERCENT.fullmatch(size)
    if match is None or not 1 <= int(match[1]) <= 100:
        return f"{size[:80]!r} is neither a number of nodes nor a percentage from 1% to 100%"
    return None


def resolve(size: Size, node_count: int) -> int:
    """Return how many of ``node_count`` nodes a valid ``size`` is: rounded down, at least 1."""
    if isinstance(size, int):
        return size
    return max(1, int(size.rstrip("%")) * node_count // 100)


def cut(names: Sequence[str], canary: Size | None, serial: Sequence[Size]) -> tuple[tuple[str, ...], ...]:
    """Return the batches of ``names``, in order: the canary's, one for each entry of ``serial``, the last again.

    ``serial`` has at least one entry. Every name is in exactly one batch, and no batch is empty.
    """
    batches: list[tuple[str, ...]] = []
    at = 0
    for size in _sizes(canary, serial):
        if at >= len(names):
            break
        count = resolve(size, len(names))
        batches.append(tuple(names[at : at + count]))
        at += count
    return tuple(batches)


def _sizes(canary: Size | None, serial: Sequence[Size]) -> Iterator[Size]:
    if canary is not None:
        yield canary
    yield from serial
    while True:
        yield serial[-1]
