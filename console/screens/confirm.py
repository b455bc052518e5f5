"""Asks before something is done, naming each thing it will be done to; the way back has the focus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Button, Label

from console.actions import Scope, bindings_of
from console.screens.base import FOCUS_BINDINGS, ConsoleDialog
from console.widgets.key_bar import KeyBar
from console.widgets.line_view import LineView
from console.widgets.paint import Line, cleaned, width_of
from console.widgets.wrap import wrap_line

DIALOG_SHARE, DIALOG_WIDTH_SHARE = 0.92, 0.96
"""Of the height over the keys and of the width, as themes/screens.tcss has them."""

LEAST_CELLS = 72
SCROLLBAR_CELLS = 1


class ConfirmScreen(ConsoleDialog):
    """Returns True only for an explicit yes."""

    scope = Scope.DIALOG
    BINDINGS: ClassVar[list[BindingType]] = [*FOCUS_BINDINGS, *bindings_of(Scope.DIALOG)]
    AUTO_FOCUS = "#no"

    def __init__(
        self, question: str, items: Sequence[Line], yes_label: str, *, note: str = "", grave: bool = True
    ) -> None:
        super().__init__()
        self._question = question
        self._items = tuple(items)
        self._yes_label = yes_label
        self._note = note
        self._grave = grave

    def compose(self) -> ComposeResult:
        text = self.glyphs.text
        with Vertical(classes="dialog"):
            yield Label(Content(text(self._question)), classes="question")
            yield LineView("items", glyphs=self.glyphs)
            if self._note:
                yield Label(Content(text(self._note)), classes="note")
            with Horizontal(classes="buttons"):
                yield Button(Content("Go back"), id="no", compact=True)
                yield Button(
                    Content(text(self._yes_label)),
                    id="yes",
                    variant="error" if self._grave else "primary",
                    compact=True,
                )
        yield KeyBar(self.glyphs)

    def on_mount(self) -> None:
        self._fit_width()
        items = self.query_one("#items", LineView)
        items.styles.height = max(1, len(items.lines))  # so that a short list is not drawn as a tall one first
        self.call_after_refresh(self._fit_items)

    def on_resize(self) -> None:
        self._fit_width()
        self.call_after_refresh(self._fit_items)

    def _fit_width(self) -> None:
        """Be as wide as the longest item, as far as there is room; wrap what is longer still."""
        dialog, items = self.query_one(".dialog"), self.query_one("#items", LineView)
        around = dialog.gutter.width + SCROLLBAR_CELLS
        lines = [cleaned(line, self.glyphs) for line in self._items]
        longest = max(map(width_of, lines), default=0)
        most = int(self.size.width * DIALOG_WIDTH_SHARE)
        cells = min(most, max(LEAST_CELLS, longest + around))
        dialog.styles.width = cells
        items.show([part for line in lines for part in wrap_line(line, cells - around)])

    def _fit_items(self) -> None:
        """Give the items what the question, the note and the buttons leave; those stay in view at any number."""
        items, dialog = self.query_one("#items", LineView), self.query_one(".dialog")
        others = (one for one in dialog.children if one is not items)
        taken = sum(one.outer_size.height + one.styles.margin.height for one in others)
        around = self.size.height - self.query_one(KeyBar).outer_size.height
        room = int(around * DIALOG_SHARE) - dialog.gutter.height - taken
        items.styles.height = max(1, min(len(items.lines), room))
        items.can_focus = len(items.lines) > room

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_yes(self) -> None:
        self.dismiss(True)

    def action_no(self) -> None:
        self.dismiss(False)
