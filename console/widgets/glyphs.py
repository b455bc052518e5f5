"""The single-cell signs the console draws with, and their ASCII stand-ins.

Everything that reaches a terminal goes through `Glyphs.text`: it is cleaned there
once more, whatever its source, and reduced to ASCII where that was asked for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from console.clean import clean

TEXT_LIMIT = 1000
REMEMBERED = 200

_ASCII = str.maketrans(
    {
        "×": "x", "°": "", "−": "-", "±": "+-", "·": "-", "…": "~", "→": "->", "Δ": "+/-", "—": "-", "–": "-",
        "✔": "+", "●": "*", "✖": "!", "○": "o", "◌": ".", "◆": "*", "▲": "^", "▸": ">", "◂": "<", "⏎": "|",
        "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "#", "▍": "|", "▎": "|", "▏": "|", "░": ".", "▒": ":",
        "▁": "_", "▂": "_", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "#", "▕": "|",
        "┌": "+", "┐": "+", "└": "+", "┘": "+", "─": "-", "│": "|",
        "┏": "#", "┓": "#", "┗": "#", "┛": "#", "━": "=", "┃": "#", "╴": "-", "╶": "-",
        "↑": "up", "↓": "down", "←": "left",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Glyphs:
    """``ascii_only`` reduces all that is drawn to ASCII."""

    ascii_only: bool = False

    def text(self, text: str, limit: int = TEXT_LIMIT) -> str:
        """Return ``text`` as one line of at most ``limit`` characters that can't do anything to a terminal."""
        if len(text) <= limit and text.isascii() and text.isprintable():
            return text
        if len(text) <= REMEMBERED:
            return _remembered(text, limit, self.ascii_only)
        if len(text) <= TEXT_LIMIT:
            return _remembered_long(text, limit, self.ascii_only)
        return _cleaned(text, limit, self.ascii_only)


def _cleaned(text: str, limit: int, ascii_only: bool) -> str:
    text = clean(text, limit)
    if not ascii_only:
        return text
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")[:limit]


_remembered = functools.lru_cache(8192)(_cleaned)
"""Frames, bars and signs come again in every panel of every frame."""
_remembered_long = functools.lru_cache(256)(_cleaned)
"""A line is cleaned by each part of a panel that it passes through."""

UNICODE = Glyphs()
ASCII = Glyphs(ascii_only=True)
