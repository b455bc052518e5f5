"""The board of a rollout, drawn line by line: a column a batch under a head that stays, a cell a node.

Whatever the number of nodes, a frame draws those in sight that changed. What is selected is a name, here too.
"""

from __future__ import annotations

from collections.abc import Set
from typing import ClassVar

from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from console.widgets.paint import Moment, cleaned, fit
from console.widgets.roles import ROLE_CLASSES, RoleStyles
from console.widgets.rollout_cell import Scene, head_lines, is_live, item_line
from console.widgets.rollout_layout import BoardLayout, Item, lay_out

HEAD_LINES = 2
GAP = "│"


class RolloutBoard(ScrollView, can_focus=True, inherit_bindings=False):
    """Shows a `Scene`. Moving and acting are the screen's; clicks select here."""

    COMPONENT_CLASSES: ClassVar[set[str]] = ROLE_CLASSES
    ALLOW_MAXIMIZE = False

    class Selected(Message):
        """Another node was selected by mouse."""

    class Opened(Message):
        """A node was double-clicked."""

    def __init__(self, moment: Moment) -> None:
        super().__init__(id="board")
        self.moment = moment
        self.selected: str | None = None
        self.folds = True
        self.most_lines = HEAD_LINES + 1
        self.plan = BoardLayout()
        self._scene: Scene | None = None
        self._roles = RoleStyles(self)
        self._strips: dict[tuple[int, int], Strip] = {}
        self._batch = -1

    @property
    def allow_select(self) -> bool:
        return False

    # --- what the screen tells it ----------------------------------------------------

    def show(self, scene: Scene) -> None:
        """Show a rollout as it was just read; the selected node stays selected."""
        self._scene = scene
        self._arrange()
        if scene.view.state.batch != self._batch:
            self._batch = scene.view.state.batch
            self._bring_into_sight(self._batch)

    def select(self, name: str | None) -> None:
        if name != self.selected:
            self.selected = name
            self._arrange()
            self.reveal()

    def set_most_lines(self, lines: int) -> None:
        """Take so many lines and no more, fewer where every batch is shorter; longer ones are folded or scroll."""
        if lines != self.most_lines:
            self.most_lines = lines
            self._arrange()

    def fold(self, folds: bool) -> None:
        self.folds = folds
        self._arrange()
        self.reveal()

    def move(self, way: str) -> None:
        self.select(self.plan.step(way, self.selected))

    def repaint(self, dirty: Set[str]) -> None:
        """Draw anew what the clock or the fleet changed, of what is in sight."""
        for (at, line), item in self._visible().items():
            row = item.nodes[0]
            if not item.is_fold and (is_live(row) or row.name in dirty):
                self._strips.pop((at, line), None)
                cells = self.plan.column_cells
                place = Region(at * cells, line + HEAD_LINES, cells, 1)
                self.refresh(place.translate(-self.scroll_offset))

    def reveal(self) -> None:
        """Bring the selected node into sight."""
        if self.selected not in self.plan.places or not self.size.height:
            return
        at, line = self.plan.places[self.selected]
        room, y = max(1, self.size.height - HEAD_LINES), self.scroll_offset.y
        self._bring_into_sight(at, min(line, max(y, line + 1 - room)))

    def _bring_into_sight(self, at: int, y: int | None = None) -> None:
        cells, x = self.plan.column_cells, self.scroll_offset.x
        x = min(at * cells, max(x, (at + 1) * cells - self.scrollable_size.width))
        self.scroll_to(x, y, animate=False, force=True, immediate=True)

    # --- drawing ---------------------------------------------------------------------

    def _arrange(self) -> None:
        if self._scene is None:
            return
        view = self._scene.view
        names = {node.name for node in view.state.nodes}
        if self.selected not in names:
            working = [node.name for node in view.state.nodes if node.batch == view.state.batch]
            self.selected = working[0] if working else None
        height = max(1, self.most_lines - HEAD_LINES)
        self.plan = lay_out(
            view.state.nodes, self.scrollable_size.width, height, self.selected,
            folds=self.folds, now_s=view.now_s(self.moment.wall_ns),
        )  # fmt: skip
        self._strips.clear()
        width = self.plan.column_cells * len(self.plan.columns)
        self.virtual_size = Size(max(width, 1), HEAD_LINES + self.plan.lines)
        longest = max((len(column.nodes) for column in self.plan.columns), default=0)
        self.styles.height = min(self.most_lines, HEAD_LINES + longest)
        self.refresh()

    def _visible(self) -> dict[tuple[int, int], Item]:
        x, y = self.scroll_offset
        cells, height = self.plan.column_cells, self.size.height
        columns = range(x // cells, min(len(self.plan.columns), -(-(x + self.scrollable_size.width) // cells)))
        return {
            (at, line): item
            for at in columns
            for line, item in enumerate(self.plan.columns[at].items[y : y + height], y)
        }

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_size.width
        scroll_x, scroll_y = self.scroll_offset
        line = y - HEAD_LINES + scroll_y if y >= HEAD_LINES else y - HEAD_LINES
        if self._scene is None:
            return Strip.blank(width, self.rich_style)
        cells = self.plan.column_cells
        first = scroll_x // cells
        columns = range(first, min(len(self.plan.columns), -(-(scroll_x + width) // cells)))
        strips = [self._cell(at, line, cells) for at in columns]
        start = scroll_x - first * cells
        strip = Strip.join(strips).crop_extend(start, start + width, self.rich_style)
        return self._with_rest(strip, scroll_x, scroll_x + width) if y == 0 else strip

    def _with_rest(self, strip: Strip, left: int, right: int) -> Strip:
        """Say at the end of the first line how many batches are not wholly in sight on either side."""
        cells = self.plan.column_cells
        before, after = -(-left // cells), max(0, len(self.plan.columns) - right // cells)
        words = [f"◂ {before} before"] * bool(before) + [f"{after} more ▸"] * bool(after)
        end = self._roles.strip(cleaned([(f" {'  '.join(words)} ", "accent")] if words else [], self.moment.glyphs))
        return Strip.join([strip.crop(0, max(0, strip.cell_length - end.cell_length)), end])

    def _cell(self, at: int, line: int, cells: int) -> Strip:
        strip = self._strips.get((at, line))
        if strip is None:
            strip = self._strips[at, line] = self._draw(at, line, cells)
        return strip

    def _draw(self, at: int, line: int, cells: int) -> Strip:
        scene, column, glyphs = self._scene, self.plan.columns[at], self.moment.glyphs
        assert scene is not None
        room = cells - 1
        if line < 0:
            drawn = head_lines(column, scene.view, room, self.moment)[line + HEAD_LINES]
        elif line < len(column.items):
            item = column.items[line]
            is_selected = not item.is_fold and item.nodes[0].name == self.selected
            drawn = item_line(item, scene, room, self.moment, is_selected=is_selected)
        else:
            drawn = fit((), room, glyphs)
        is_last = at == len(self.plan.columns) - 1
        return self._roles.strip((*drawn, (" " if is_last else glyphs.text(GAP), "frame")))

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._roles.clear()
        self._strips.clear()

    def on_resize(self) -> None:
        self._arrange()
        self.reveal()

    def on_show(self) -> None:
        self.call_after_refresh(self.reveal)

    # --- the mouse -----------------------------------------------------------------------

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None or offset.y < HEAD_LINES:
            return
        at = (offset.x + self.scroll_offset.x) // self.plan.column_cells
        line = offset.y - HEAD_LINES + self.scroll_offset.y
        item = self._visible().get((at, line))
        if item is None:
            return
        self.select(item.nodes[0].name)
        self.post_message(self.Selected())
        if event.chain == 2 and not item.is_fold:
            self.post_message(self.Opened())
