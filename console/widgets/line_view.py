"""A scrolling view of lines; the base of everything here that is drawn line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from console.widgets.glyphs import UNICODE, Glyphs
from console.widgets.paint import Line, cleaned, fit, plain, width_of
from console.widgets.roles import ROLE_CLASSES, RoleStyles


class LineView(ScrollView):
    """Shows `Line`s; text can be selected and copied. Lines longer than the view are cropped, or scroll where asked."""

    COMPONENT_CLASSES: ClassVar[set[str]] = ROLE_CLASSES
    ALLOW_MAXIMIZE = False

    class Resized(Message):
        """Lines composed for this view's width no longer fit it."""

    def __init__(self, id: str, *, glyphs: Glyphs = UNICODE, wide: bool = False, focusable: bool = False) -> None:
        super().__init__(id=id)
        self.can_focus = focusable
        self.glyphs = glyphs
        self._wide = wide
        self._lines: tuple[Line, ...] = ()
        self._roles = RoleStyles(self)
        self._strips: dict[int, Strip] = {}
        self._strips_width = 0
        self._follows = False
        self._is_at_end = True

    @property
    def lines(self) -> tuple[Line, ...]:
        return self._lines

    @property
    def allow_select(self) -> bool:
        return True

    def show(self, lines: Sequence[Line], *, follow: bool = False) -> None:
        """Show ``lines``, repainting those that differ; ``follow`` keeps the end in view if it was."""
        fresh = tuple(cleaned(line, self.glyphs) for line in lines)
        if fresh == self._lines:
            return
        before, self._lines = self._lines, fresh
        for y in range(max(len(before), len(fresh))):
            old = before[y] if y < len(before) else None
            new = fresh[y] if y < len(fresh) else None
            if old != new:
                self._strips.pop(y, None)
                self.refresh_line(y)
        width = max((width_of(line) for line in fresh), default=0) if self._wide else 0
        self.virtual_size = Size(width, len(fresh))
        self._follows = follow
        self._follow()

    def _follow(self) -> None:
        if self._follows and self._is_at_end:
            self.scroll_end(animate=False, immediate=True, x_axis=False, force=True)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._is_at_end = new_value >= self.max_scroll_y

    def on_resize(self) -> None:
        self._follow()
        self.post_message(self.Resized())

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._forget()

    def _forget(self) -> None:
        self._roles.clear()
        self._strips.clear()

    def render_line(self, y: int) -> Strip:
        scroll_x, scroll_y = self.scroll_offset
        at = y + scroll_y
        width = self.scrollable_size.width  # without the scrollbar, which `size` counts in
        if width != self._strips_width:  # a scrollbar that comes and goes changes it before any event says so
            self._strips.clear()
            self._strips_width = width
        if at >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        selection = self.text_selection
        span = selection.get_span(at) if selection is not None else None
        strip = self._strips.get(at) if span is None else None
        if strip is None:
            strip = self._draw(at, width)
            if span is None:
                self._strips[at] = strip
            else:
                strip = self._highlight(strip, *span)
        return strip.crop_extend(scroll_x, scroll_x + width, self.rich_style).apply_offsets(scroll_x, at)

    def _draw(self, at: int, width: int) -> Strip:
        line = self._lines[at]
        return self._roles.strip(fit(line, max(width, width_of(line)) if self._wide else width, self.glyphs))

    def _highlight(self, strip: Strip, start: int, end: int) -> Strip:
        end = strip.cell_length if end == -1 else min(end, strip.cell_length)
        style = self.screen.get_component_rich_style("screen--selection")
        marked = [Segment(text, own + style if own else style) for text, own, _ in strip.crop(start, end)]
        return Strip([*strip.crop(0, start), *marked, *strip.crop(end)])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract("\n".join(plain(line) for line in self._lines)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()
