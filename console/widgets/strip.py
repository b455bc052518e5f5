"""A run's stages as one bar: who had how much of the time. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from console.widgets.paint import Line, Piece
from remote_agent.protocol.messages import StageRecord, StageStatus

SHORT_NAMES = {
    "preflight": "pre",
    "context": "ctx",
    "first_request": "1st",
}

_GAP, _AHEAD = -1, -2
"""Cells of no stage: time that none accounts for, and time to come."""


def stage_strip(stages: Sequence[StageRecord], elapsed_ns: int, total_ns: int, width: int) -> Line:
    """Return ``width`` cells for ``total_ns``: a labelled segment a stage, the time still ahead dotted.

    Where stages overlap the earlier one has the cells, as attribution has it.
    """
    if width <= 0 or total_ns <= 0:
        return ((" " * max(0, width), "text"),)
    reached = min(width, round(elapsed_ns / total_ns * width))
    owners = [_GAP] * reached + [_AHEAD] * (width - reached)
    for index in reversed(range(len(stages))):
        first, last = _cells(stages[index], elapsed_ns, total_ns, width)
        owners[first:last] = [index] * (last - first)
    pieces: list[Piece] = []
    start = 0
    segment = 0
    while start < width:
        end = start
        while end < width and owners[end] == owners[start]:
            end += 1
        owner = owners[start]
        if owner == _GAP:
            pieces.append((" " * (end - start), "text"))
        elif owner == _AHEAD:
            pieces.append(("·" * (end - start), "seg-ahead"))
        else:
            pieces.append(_segment(stages[owner], end - start, segment))
            segment += 1
        start = end
    return tuple(pieces)


def _cells(stage: StageRecord, elapsed_ns: int, total_ns: int, width: int) -> tuple[int, int]:
    if stage.start_ns is None:
        return 0, 0
    length_ns = stage.duration_ns
    if length_ns is None:
        length_ns = max(0, elapsed_ns - stage.start_ns) if stage.status is StageStatus.RUNNING else 0
    first = round(stage.start_ns / total_ns * width)
    last = round((stage.start_ns + length_ns) / total_ns * width)
    if stage.status is StageStatus.RUNNING:
        last = max(last, first + 1)
    return min(width, max(0, first)), min(width, max(0, last))


def _segment(stage: StageRecord, cells: int, ordinal: int) -> Piece:
    role = "seg-odd" if ordinal % 2 else "seg-even"
    if stage.status is StageStatus.RUNNING:
        role = "seg-running"
    elif stage.status is StageStatus.FAILED:
        role = "seg-failed"
    label = SHORT_NAMES.get(stage.name, stage.name)
    text = f"▏{label}" if len(label) < cells else "▏"
    return text.ljust(cells), role
