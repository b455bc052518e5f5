"""The history's table: moves with the usual keys, leaves enter to the screen, colours by role."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from console.widgets.glyphs import Glyphs
from console.widgets.paint import Piece
from console.widgets.roles import ROLE_CLASSES, RoleStyles


class RunTable(DataTable[Text], inherit_bindings=False):
    """Rows are known by their key, a run's uid; the row number is only where it is drawn."""

    COMPONENT_CLASSES: ClassVar[set[str]] = DataTable.COMPONENT_CLASSES | ROLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "cursor_up", "Up", show=False),
        Binding("down,j", "cursor_down", "Down", show=False),
        Binding("left", "scroll_left", "Left", show=False),
        Binding("right", "scroll_right", "Right", show=False),
        Binding("pageup", "page_up", "Page up", show=False),
        Binding("pagedown", "page_down", "Page down", show=False),
        Binding("home,ctrl+home", "scroll_top", "First", show=False),
        Binding("end,ctrl+end,G", "scroll_bottom", "Last", show=False),
    ]

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(cursor_type="row", id=id)
        self._glyphs = glyphs
        self._roles = RoleStyles(self)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._roles.clear()

    def cell(self, piece: Piece) -> Text:
        """Return a cell: plain text, cleaned, in the colour that its role has now."""
        text, role = piece
        style = self._roles.style(role)
        return Text(self._glyphs.text(text), style=Style(color=style.color, bold=style.bold), no_wrap=True)
