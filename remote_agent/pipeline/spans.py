"""Divides a run's wall time among its stages so that the parts always sum to the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """When a stage ran, in nanoseconds since the run was accepted."""

    stage: str
    start_ns: int
    end_ns: int


def attribute(spans: Iterable[Span], order: Sequence[str], wall_ns: int) -> tuple[dict[str, int], int]:
    """Return the nanoseconds of each stage and what no stage covers; together exactly ``wall_ns``.

    Each instant of ``0..wall_ns`` goes to the earliest stage of ``order`` that runs then;
    parts of a span outside that range count for nothing.
    """
    shares = dict.fromkeys(order, 0)
    covered: list[tuple[int, int]] = []
    by_stage: dict[str, list[Span]] = {stage: [] for stage in order}
    for span in spans:
        by_stage[span.stage].append(span)
    for stage in order:
        for span in by_stage[stage]:
            start, end = max(span.start_ns, 0), min(span.end_ns, wall_ns)
            if end > start:
                shares[stage] += (end - start) - _overlap(covered, start, end)
                covered = _insert(covered, start, end)
    return shares, wall_ns - sum(shares.values())


def _overlap(covered: list[tuple[int, int]], start: int, end: int) -> int:
    return sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in covered)


def _insert(covered: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    touching = [(begin, stop) for begin, stop in covered if begin <= end and stop >= start]
    rest = [(begin, stop) for begin, stop in covered if not (begin <= end and stop >= start)]
    merged = (min([start, *(b for b, _ in touching)]), max([end, *(s for _, s in touching)]))
    return sorted([*rest, merged])
