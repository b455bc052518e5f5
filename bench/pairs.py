"""Judges loads that were taken in turn by their pairs, so that a machine's slow minutes count for both sides. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST = 0.75


@dataclass(frozen=True)
class Ratio:
    """The other side's time over ours in each pair: above 1 ours is the quicker one."""

    median: float
    low: float
    high: float
    is_behind: bool

    def __str__(self) -> str:
        """Return median, range and verdict; a median below 1 that most pairs don't bear out tells nothing apart."""
        word = "slower" if self.is_behind else "not slower" if self.median >= 1 else "not told apart"
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f}): {word}"


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the ratio of loads that were taken in turn; both have one for each round."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), is_behind(ratios))


def is_behind(ratios: Sequence[float]) -> bool:
    """Whether ours was the slower one in at least `MOST` of the pairs: more than the spread gives by chance."""
    return sorted(ratios)[math.ceil(len(ratios) * MOST) - 1] < 1
