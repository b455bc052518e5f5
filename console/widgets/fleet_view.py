"""All nodes in one view, drawn line by line: panels in a grid, or a line each.

One widget draws everything, whatever the number of nodes; a frame repaints the
visible nodes that changed and nothing else. What is selected lives in `NodeSelection`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import ClassVar

from rich.cells import cell_len
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from console.state import NodeState
from console.widgets.grid import Grid, panel_grid, row_list
from console.widgets.paint import Moment
from console.widgets.panel import PANEL_HEIGHT, Highlight, panel_lines
from console.widgets.roles import ROLE_CLASSES, RoleStyles
from console.widgets.row import row_line
from console.widgets.selection import NodeSelection

NAME_CELLS = 24


class Layout(enum.Enum):
    GRID = "grid"
    LIST = "list"


class FleetView(ScrollView, can_focus=True, inherit_bindings=False):
    """The fleet. Moving, marking and acting are the screen's; clicks select here."""

    COMPONENT_CLASSES: ClassVar[set[str]] = ROLE_CLASSES
    ALLOW_MAXIMIZE = False

    class Opened(Message):
        """A node was double-clicked."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    class Selected(Message):
        """Another node was selected by mouse."""

    def __init__(self, selection: NodeSelection, state_of: Callable[[str], NodeState], moment: Moment) -> None:
        super().__init__()
        self.selection = selection
        self.moment = moment
        self.layout_kind = Layout.GRID
        self._state_of = state_of
        self._roles = RoleStyles(self)
        self._strips: dict[str, list[Strip]] = {}
        self._strips_width = 0
        self._name_cells = 0
        self._drawn: tuple[str | None, frozenset[str]] = (None, frozenset())

    @property
    def allow_select(self) -> bool:
        return False

    @property
    def grid(self) -> Grid:
        count, width = len(self.selection.shown), max(1, self.scrollable_size.width)
        return panel_grid(count, width, PANEL_HEIGHT) if self.layout_kind is Layout.GRID else row_list(count, width)

    # --- what the screen tells it ------------------------------------------------

    def set_layout(self, kind: Layout) -> None:
        self.layout_kind = kind
        self.redraw()
        self.reveal()

    def redraw(self) -> None:
        """Draw everything anew: other nodes are shown, or they look different."""
        self._strips.clear()
        self._drawn = (self.selection.selected, frozenset(self.selection.marked))
        self._name_cells = min(NAME_CELLS, max((cell_len(name) for name in self.selection.shown), default=0))
        self.virtual_size = Size(self.scrollable_size.width, self.grid.height)
        self.refresh()

    def repaint(self, names: Iterable[str]) -> None:
        """Draw anew those of ``names`` that are in sight; the others when they come into sight."""
        visible = self._visible()
        for name in names:
            if self._strips.pop(name, None) is not None and name in visible:
                self.refresh(visible[name].translate(-self.scroll_offset))

    def visible_names(self) -> tuple[str, ...]:
        return tuple(self._visible())

    def _visible(self) -> dict[str, Region]:
        grid, shown = self.grid, self.selection.shown
        return {shown[index]: grid.region(index) for index in grid.span(self.scroll_offset.y, self.size.height)}

    def selection_changed(self) -> None:
        """Repaint what the selection and the marks changed, and bring the selected node into sight."""
        before_selected, before_marked = self._drawn
        selected, marked = self.selection.selected, frozenset(self.selection.marked)
        self._drawn = (selected, marked)
        changed = set(before_marked ^ marked)
        if before_selected != selected:
            changed |= {name for name in (before_selected, selected) if name is not None}
        self.repaint(changed)
        self.reveal()

    def reveal(self) -> None:
        index = self.selection.index
        if index is not None and self.size.height:
            self.scroll_to_region(self.grid.region(index), animate=False, force=True, immediate=True)

    # --- drawing ---------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        grid, shown = self.grid, self.selection.shown
        at = y + self.scroll_offset.y
        row, line = divmod(at, grid.cell_height)
        first = row * grid.columns
        names = shown[first : first + grid.columns]
        width = self.scrollable_size.width  # without the scrollbar, which `size` counts in
        if width != self._strips_width:  # it comes and goes without an event
            self._strips.clear()
            self._strips_width = width
        if not names:
            return Strip.blank(width, self.rich_style)
        strips = [self._cell(name, grid.column_width(column))[line] for column, name in enumerate(names)]
        return Strip.join(strips).adjust_cell_length(width, self.rich_style)

    def _cell(self, name: str, width: int) -> list[Strip]:
        strips = self._strips.get(name)
        if strips is None:
            state = self._state_of(name)
            highlight = Highlight(name == self.selection.selected, name in self.selection.marked)
            if self.layout_kind is Layout.GRID:
                lines = panel_lines(state, width, self.moment, highlight)
            else:
                lines = [row_line(state, width, self._name_cells, self.moment, highlight)]
            strips = self._strips[name] = [self._roles.strip(line) for line in lines]
        return strips

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._roles.clear()
        self._strips.clear()

    def on_resize(self) -> None:
        self.redraw()
        self.reveal()

    # --- the mouse -----------------------------------------------------------------------

    def name_at(self, x: int, y: int) -> str | None:
        """Return the node drawn at that place of the widget."""
        index = self.grid.at(x + self.scroll_offset.x, y + self.scroll_offset.y)
        return None if index is None else self.selection.shown[index]

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        name = self.name_at(offset.x, offset.y) if offset is not None else None
        if name is None:
            return
        if self.selection.select(name):
            self.post_message(self.Selected())
        if event.ctrl or event.button == 3:
            self.selection.toggle_mark()
        self.selection_changed()
        if event.chain == 2 and event.button == 1:
            self.post_message(self.Opened(name))
