"""The single-cell signs the console draws with, and their ASCII stand-ins.

Everything that reaches a terminal goes through `Glyphs.text`: it is cleaned there
once more, whatever its source, and reduced to ASCII where that was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from console.clean import clean

TEXT_LIMIT = 1000

_ASCII = str.maketrans(
    {
        "×": "x", "°": "", "−": "-", "±": "+-", "·": "-", "…": "..", "→": "->", "Δ": "+/-", "—": "-", "–": "-",
        "✔": "+", "●": "*", "✖": "!", "○": "o", "◌": ".", "◆": "*", "▲": "^", "▸": ">", "⏎": "|",
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
        """Return ``text`` as one line that can't do anything to a terminal."""
        if not (text.isascii() and text.isprintable()) or len(text) > limit:
            text = clean(text, limit)
            if self.ascii_only:
                text = text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
        return text


UNICODE = Glyphs()
ASCII = Glyphs(ascii_only=True)
