"""Turns the roles of lines into styles of the theme, through component classes."""

from __future__ import annotations

from collections.abc import Iterable

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from console.widgets.paint import ROLES, Piece

ROLE_CLASSES = {f"role--{role}" for role in ROLES}


class RoleStyles:
    """The styles of one widget's roles; computed once, dropped when the theme or the focus changes."""

    def __init__(self, widget: Widget) -> None:
        self._widget = widget
        self._styles: dict[str, Style] = {}

    def clear(self) -> None:
        self._styles.clear()

    def style(self, role: str) -> Style:
        style = self._styles.get(role)
        if style is None:
            style = self._styles[role] = self._widget.get_component_rich_style(f"role--{role}")
        return style

    def strip(self, line: Iterable[Piece]) -> Strip:
        """Return ``line``, which `paint.fit` has given its width, as a strip."""
        return Strip([Segment(text, self.style(role)) for text, role in line])
