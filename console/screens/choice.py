"""Two small questions over a screen: which of several, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, OptionList
from textual.widgets.option_list import Option

from console.actions import Scope
from console.screens.base import FOCUS_BINDINGS, Common
from console.screens.prompt import AnswerInput
from console.widgets.lists import ChoiceList

REASON_LENGTH = 200
_BINDINGS: list[BindingType] = [*FOCUS_BINDINGS, ("escape", "close", "Close")]


class TextDialog(Common, ModalScreen[str | None], inherit_bindings=False):
    """A question whose answer is a text; None when it is closed."""

    scope = Scope.DIALOG
    BINDINGS: ClassVar[list[BindingType]] = _BINDINGS
    ESCAPE_TO_MINIMIZE = False

    def action_close(self) -> None:
        self.dismiss(None)


class ChoiceScreen(TextDialog):
    """Returns the key of what was chosen among ``choices``, each a key and a line."""

    AUTO_FOCUS = "OptionList"

    def __init__(self, question: str, choices: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._question = question
        self._choices = tuple(choices)

    def compose(self) -> ComposeResult:
        text = self.glyphs.text
        with Vertical(classes="dialog choice"):
            yield Label(Content(text(self._question)), classes="question")
            yield ChoiceList(*(Option(Content(text(line))) for _, line in self._choices))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._choices[event.option_index][0])


class ReasonScreen(TextDialog):
    """Returns a reason; there is no going on without one."""

    AUTO_FOCUS = "Input"

    def __init__(self, question: str, yes_label: str) -> None:
        super().__init__()
        self._question = question
        self._yes_label = yes_label

    def compose(self) -> ComposeResult:
        text = self.glyphs.text
        with Vertical(classes="dialog reason"):
            yield Label(Content(text(self._question)), classes="question")
            yield AnswerInput(placeholder="why; it is kept", max_length=REASON_LENGTH, compact=True)
            with Horizontal(classes="buttons"):
                yield Button(Content("Go back"), id="no", compact=True)
                yield Button(Content(text(self._yes_label)), id="yes", variant="primary", compact=True)

    def on_mount(self) -> None:
        self._show_button("")

    def on_input_changed(self, event: Input.Changed) -> None:
        self._show_button(event.value)

    def _show_button(self, value: str) -> None:
        self.query_one("#yes", Button).disabled = not value.strip()

    def on_input_submitted(self) -> None:
        self._answer()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "yes":
            self._answer()
        else:
            self.dismiss(None)

    def _answer(self) -> None:
        reason = self.query_one(Input).value.strip()
        if reason:
            self.dismiss(reason)
