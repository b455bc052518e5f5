"""What a login has to ask a person, one question at a time; what is typed goes to who asked and nowhere else.

The server's words stand apart, marked as such. A question that is withdrawn while somebody
types stays until it is closed: keys meant for it must not reach the screen below.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label

from console.actions import Scope, bindings_of
from console.prompts import Asked, PromptQueue
from console.screens.base import FOCUS_BINDINGS, ConsoleDialog
from console.widgets.key_bar import KeyBar

SMALL_CELLS, SMALL_LINES = 60, 22
CHROME_LINES = 11
"""Of a dialog around what is said: frame, padding, title, problem, buttons, and the keys below."""


class AnswerInput(Input):
    """A line to type, its cursor still; nothing of a masked one can be copied or cut out."""

    def on_mount(self) -> None:
        self.cursor_blink = False

    def action_copy(self) -> None:
        if not self.password:
            super().action_copy()

    def action_cut(self) -> None:
        if not self.password:
            super().action_cut()


class PromptScreen(ConsoleDialog):
    """Shows ``asked`` until it is answered or declined; a stop, until it is read."""

    scope = Scope.PROMPT
    BINDINGS: ClassVar[list[BindingType]] = [
        *FOCUS_BINDINGS,
        *bindings_of(Scope.PROMPT),
        Binding("up,pageup", "scroll_said(-1)", "Up", show=False),
        Binding("down,pagedown", "scroll_said(1)", "Down", show=False),
    ]

    def __init__(self, queue: PromptQueue, asked: Asked) -> None:
        super().__init__()
        self._queue, self.asked = queue, asked
        self.is_withdrawn = self._is_drawn = False

    def compose(self) -> ComposeResult:
        text, prompt = self.glyphs.text, self.asked.prompt
        self._problem = Label("", id="problem", classes="note")
        self._cancel = Button(Content("Cancel" if prompt.fields else "Close"), id="cancel", compact=True)
        self._cancel_all = Button(Content("Cancel all"), id="cancel-all", compact=True)
        self._send = Button(Content("Send"), id="send", variant="primary", compact=True)
        self._inputs = [AnswerInput(password=field.is_secret, compact=True) for field in prompt.fields]
        self._dialog = Vertical(classes="dialog prompt")
        with self._dialog:
            yield Label(Content(text(prompt.title)), classes="question")
            with VerticalScroll(id="said", can_focus=False):
                yield from self._said()
            yield self._problem
            with Horizontal(classes="buttons"):
                yield self._cancel
                yield self._cancel_all
                if prompt.fields:
                    yield self._send
        yield KeyBar(self.glyphs)

    def _said(self) -> ComposeResult:
        text, prompt = self.glyphs.text, self.asked.prompt
        for line in prompt.lines:
            yield Label(Content(text(line)))
        if prompt.theirs:
            yield Label("The server says", classes="-marked")
        for line in prompt.theirs:
            yield Label(Content(text(line)), classes="-theirs")
        if any(field.is_theirs for field in prompt.fields):
            yield Label("The server asks", classes="-marked")
        for field, answer in zip(prompt.fields, self._inputs, strict=True):
            yield Label(Content(text(field.label)), classes="-theirs" if field.is_theirs else "-ours")
            yield answer

    def on_mount(self) -> None:
        self._is_drawn = True
        self.refresh_queue()
        self.set_focus(self._inputs[0] if self._inputs else self._cancel)

    def on_unmount(self) -> None:
        self._is_drawn = False

    def on_resize(self) -> None:
        """In a small terminal what is said scrolls, so that what is typed and how to send it stay in view."""
        width, height = self.app.size
        is_small = width < SMALL_CELLS or height < SMALL_LINES
        self.set_class(is_small, "-small")
        self.query_one("#said").styles.max_height = None if is_small else height - CHROME_LINES
        if self.focused is not None:
            self.call_after_refresh(self.focused.scroll_visible, animate=False)

    def action_scroll_said(self, way: int) -> None:
        self.query_one("#said").scroll_relative(y=2 * way, animate=False)

    def refresh_queue(self) -> None:
        """Show how many more wait, and whether this one is still wanted."""
        if not self._is_drawn:
            return
        is_still_wanted = self._queue.current is self.asked
        self.is_withdrawn = self.is_withdrawn or not is_still_wanted
        others = self._queue.waiting - is_still_wanted
        self._dialog.border_subtitle = f"{others} more waiting" if others else ""
        self._cancel_all.display = others > 0
        problem = self.asked.prompt.problem
        if self.is_withdrawn:
            problem = "No longer asked: the login is over. Close this."
            self._cancel.label = Content("Close")
        self._problem.update(Content(self.glyphs.text(problem)))
        self._problem.display = bool(problem)
        self._send.disabled = self.is_withdrawn

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        after = next((at for at, line in enumerate(self._inputs, 1) if line is event.input), len(self._inputs))
        if after < len(self._inputs):
            self.set_focus(self._inputs[after])
        else:
            self._hand_on()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "send":
            self._hand_on()
        elif event.button.id == "cancel":
            self.action_decline()
        else:
            self.action_decline_all()

    def _hand_on(self) -> None:
        if self.is_withdrawn:
            return
        answers = [line.value for line in self._inputs]
        for line in self._inputs:
            line.value = ""
        self._queue.answer(self.asked, answers)
        self.dismiss(True)

    def action_decline(self) -> None:
        if self._queue.current is self.asked:
            self._queue.decline(self.asked)
        self.dismiss(False)

    def action_decline_all(self) -> None:
        self._queue.decline_all()
        self.dismiss(False)
