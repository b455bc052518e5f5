"""What a login has to ask a person, one question at a time; what is typed goes to who asked and nowhere else.

The server's words stand apart, marked as such. A question that is withdrawn while somebody
types stays until it is closed: keys meant for it must not reach the screen below.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label

from console.actions import Scope, bindings_of
from console.format import counted
from console.prompts import Asked, PromptQueue
from console.screens.base import FOCUS_BINDINGS, ConsoleDialog
from console.widgets.key_bar import KeyBar


class AnswerInput(Input):
    """A line to type; nothing of a masked one can be copied or cut out."""

    def action_copy(self) -> None:
        if not self.password:
            super().action_copy()

    def action_cut(self) -> None:
        if not self.password:
            super().action_cut()


class PromptScreen(ConsoleDialog):
    """Shows ``asked`` until it is answered or declined; a stop, until it is read."""

    scope = Scope.PROMPT
    BINDINGS: ClassVar[list[BindingType]] = [*FOCUS_BINDINGS, *bindings_of(Scope.PROMPT)]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-wide")]  # noqa: RUF012 (Textual declares it so)

    def __init__(self, queue: PromptQueue, asked: Asked) -> None:
        super().__init__()
        self._queue, self.asked = queue, asked
        self.is_withdrawn = False

    def compose(self) -> ComposeResult:
        text, prompt = self.glyphs.text, self.asked.prompt
        with Vertical(classes="dialog prompt"):
            yield Label(Content(text(prompt.title)), classes="question")
            with VerticalScroll(id="said", can_focus=False):
                for line in prompt.lines:
                    yield Label(Content(text(line)))
                if prompt.theirs:
                    yield Label("The server says", classes="-marked")
                for line in prompt.theirs:
                    yield Label(Content(text(line)), classes="-theirs")
                if any(field.is_theirs for field in prompt.fields):
                    yield Label("The server asks", classes="-marked")
                for field in prompt.fields:
                    yield Label(Content(text(field.label)), classes="-theirs" if field.is_theirs else "-ours")
                    yield AnswerInput(password=field.is_secret, compact=True, select_on_focus=False)
            yield Label("", id="problem", classes="note")
            with Horizontal(classes="buttons"):
                yield Button(Content("Cancel"), id="cancel", compact=True)
                yield Button(Content("Cancel all"), id="cancel-all", compact=True)
                if prompt.fields:
                    yield Button(Content("Send"), id="send", variant="primary", compact=True)
        yield KeyBar(self.glyphs)

    def on_mount(self) -> None:
        self.refresh_queue()
        first = next(iter(self.query(AnswerInput)), None)
        self.set_focus(first if first is not None else self.query_one("#cancel", Button))

    def refresh_queue(self) -> None:
        """Show how many more wait, for whom this one is, and whether it is still wanted."""
        is_still_wanted = self._queue.current is self.asked
        self.is_withdrawn = self.is_withdrawn or not is_still_wanted
        others = self._queue.waiting - is_still_wanted
        dialog = self.query_one(".dialog")
        dialog.border_subtitle = f"{others} more waiting" if others else ""
        self.query_one("#cancel-all").display = others > 0
        problem = self.asked.prompt.problem
        if self.is_withdrawn:
            problem = "No longer asked: the login is over. Close this."
        elif not problem and self.asked.askers > 1:
            problem = f"Asked once for {counted(self.asked.askers, 'login')}."
        label = self.query_one("#problem", Label)
        label.update(Content(self.glyphs.text(problem)))
        label.display = bool(problem)
        if self.is_withdrawn or not self.asked.prompt.fields:
            self.query_one("#cancel", Button).label = Content("Close")
        for send in self.query("#send"):
            send.disabled = self.is_withdrawn

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        inputs = list(self.query(AnswerInput))
        after = inputs.index(event.input) + 1 if isinstance(event.input, AnswerInput) else len(inputs)
        if after < len(inputs):
            self.set_focus(inputs[after])
        else:
            self._send()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "send":
            self._send()
        elif event.button.id == "cancel":
            self.action_decline()
        else:
            self.action_decline_all()

    def _send(self) -> None:
        if self.is_withdrawn:
            return
        inputs = list(self.query(AnswerInput))
        answers = [each.value for each in inputs]
        for each in inputs:
            each.value = ""
        self._queue.answer(self.asked, answers)
        self.dismiss(True)

    def action_decline(self) -> None:
        if self._queue.current is self.asked:
            self._queue.decline(self.asked)
        self.dismiss(False)

    def action_decline_all(self) -> None:
        self._queue.decline_all()
        self.dismiss(False)
