"""The line at the top: how many nodes are how, in glyphs and words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from console.state import NodeState
from console.widgets.node_view import Status, node_status
from console.widgets.paint import Line, Moment, Piece, cleaned, spread, width_of

ALWAYS = (Status.READY, Status.WARMING, Status.COLD, Status.FAILED)
WHERE_THERE = (Status.SILENT, Status.DISCONNECTED, Status.CONNECTING)


def count_nodes(states: Iterable[NodeState]) -> Counter[Status]:
    return Counter(node_status(state) for state in states)


def header_line(
    title: str, counts: Counter[Status], aside: Iterable[Piece], width: int, moment: Moment, *, paused: bool
) -> Line:
    """Return exactly ``width`` cells; the counts survive the longest, words fall away before figures."""
    total = counts.total()
    name: list[Piece] = [(" Glowplug ", "title"), (f" {title} ", "muted")]
    nodes: list[Piece] = [(f" {total} {'node' if total == 1 else 'nodes'} ", "text")]
    words, figures = _counts(counts, with_words=True), _counts(counts, with_words=False)
    merged = Counter(counts)
    merged[Status.SILENT] += merged.pop(Status.DISCONNECTED, 0)
    fewer = _counts(merged, with_words=True)
    end = [*([(" PAUSED ", "paused")] if paused else []), *aside]
    for left in ([*name, *nodes, *words], [*nodes, *words], [(" ", "text"), *words], fewer, figures):
        if width_of(cleaned([*left, *end], moment.glyphs)) < width:
            return spread(left, end, width, moment.glyphs)
    keep = [(" PAUSED ", "paused")] if paused else []
    return spread(figures, keep, width, moment.glyphs)


def _counts(counts: Counter[Status], *, with_words: bool) -> list[Piece]:
    pieces: list[Piece] = []
    for status in (*ALWAYS, *(status for status in WHERE_THERE if counts[status])):
        count = counts[status]
        text = f"{status.glyph} {count} {status.word}" if with_words else f"{status.glyph} {count}"
        pieces.append((f" {text} ", status.role if count else "faint"))
    return pieces


def title_line(
    screen: str, title: str, width: int, moment: Moment, *, paused: bool, aside: Iterable[Piece] = ()
) -> Line:
    """Return the top line of the other screens."""
    left: list[Piece] = [(" Glowplug ", "title"), (f" {title} ", "muted"), (f" {screen} ", "accent")]
    end = [*([(" PAUSED ", "paused")] if paused else []), *aside]
    return spread(left, end, max(1, width), moment.glyphs)
