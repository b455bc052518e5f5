"""Lines as pieces of text with a role each; what a role looks like is the theme's affair.

All drawing is pure: functions make `Line`s, `fit` cleans them and gives them their exact
width, and only then a widget turns roles into styles. Nothing else reaches a strip.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import tzinfo

from rich.cells import cell_len, set_cell_size

from console.lines import Line as Line
from console.lines import Piece as Piece
from console.widgets.glyphs import TEXT_LIMIT, UNICODE, Glyphs

ROLES = (
    "text", "muted", "faint", "strong", "title", "accent",
    "ready", "running", "failed", "waiting", "unknown", "warning",
    "frame", "frame-selected", "mark",
    "bar", "bar-back", "bar-running", "bar-failed", "bar-reused", "bar-before",
    "seg-odd", "seg-even", "seg-running", "seg-failed", "seg-ahead",
    "paused", "key",
)  # fmt: skip
"""Every role a line may use; each has a component class ``role--NAME`` in ``themes/roles.tcss``."""


@dataclass(frozen=True)
class Moment:
    """What drawing needs besides the state: the console's clocks, its glyphs and its time zone."""

    mono_ns: int
    wall_ns: int
    glyphs: Glyphs = field(default=UNICODE)
    zone: tzinfo | None = None
    keys: Mapping[str, str] = field(default_factory=dict)

    def key(self, action_id: str) -> str:
        """Return how the key of an action is written, as mapped; empty where it is not to be had."""
        return self.keys.get(action_id, "")

    @property
    def mono_s(self) -> float:
        return self.mono_ns / 1e9


def width_of(line: Iterable[Piece]) -> int:
    return sum(cell_len(text) for text, _ in line)


def cleaned(line: Iterable[Piece], glyphs: Glyphs, limit: int = TEXT_LIMIT) -> Line:
    return tuple((glyphs.text(text, limit), role) for text, role in line if text)


def _cleaned_for(line: Iterable[Piece], width: int, glyphs: Glyphs) -> Line:
    """Return ``line`` cleaned, no text longer than what could fit: a character has at most two marks."""
    return cleaned(line, glyphs, min(TEXT_LIMIT, 3 * (max(0, width) + 1)))


def fit(line: Iterable[Piece], width: int, glyphs: Glyphs, *, pad_role: str = "text") -> Line:
    """Return ``line`` cleaned and exactly ``width`` cells wide, cropped with an ellipsis where it was longer."""
    pieces = _cleaned_for(line, width, glyphs)
    total = width_of(pieces)
    if total <= width:
        return (*pieces, (" " * (width - total), pad_role)) if total < width else pieces
    return _crop(pieces, width, glyphs)


def _crop(pieces: Line, width: int, glyphs: Glyphs) -> Line:
    sign = "~" if glyphs.ascii_only else "…"
    kept: list[Piece] = []
    room = max(0, width - 1)
    role = "text"
    for text, role in pieces:
        cells = cell_len(text)
        if cells > room:
            kept.append((set_cell_size(text, room), role))
            break
        kept.append((text, role))
        room -= cells
    if width > 0:
        kept.append((sign, role))
    return tuple(kept)


def spread(
    left: Iterable[Piece], right: Iterable[Piece], width: int, glyphs: Glyphs, *, fill: Piece = (" ", "text")
) -> Line:
    """Return ``left`` and ``right`` at the two ends of ``width`` cells; the right end is kept where both can't be."""
    end = _cleaned_for(right, width, glyphs)
    room = width - width_of(end)
    if room <= 0:
        return fit(end, width, glyphs)
    start = _cleaned_for(left, width, glyphs)
    gap = room - width_of(start)
    if gap < 0:
        return (
            (*fit(start, max(0, room - 1), glyphs), (" ", "text"), *end)
            if room > 1
            else (*fit(start, room, glyphs), *end)
        )
    sign = glyphs.text(fill[0])
    return (*start, (sign * gap, fill[1]), *end)


def choose(options: Iterable[Iterable[Piece]], width: int, glyphs: Glyphs) -> Line:
    """Return the first of ``options`` that fits, else the last one cropped."""
    line: Line = ()
    for option in options:
        line = _cleaned_for(option, width, glyphs)
        if width_of(line) <= width:
            break
    return fit(line, width, glyphs)


def plain(line: Iterable[Piece]) -> str:
    return "".join(text for text, _ in line)
