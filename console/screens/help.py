"""All keys, as the registry and the operator's own keymap have them."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Label

from console.actions import ACTIONS, Action, Scope
from console.screens.base import FOCUS_BINDINGS, ConsoleDialog
from console.widgets.line_view import LineView
from console.widgets.paint import Line
from console.widgets.wrap import wrap

KEY_CELLS = 16
TEXT_CELLS = 53
"""The dialog has 70 cells, one of them for the scrollbar."""
_GLYPHS_MEAN: tuple[Line, ...] = (
    (("  ✔ ready", "ready"), ("  ● warming", "running"), ("  ○ cold", "waiting"), ("  ✖ failed", "failed")),
    (("  ? silent, disconnected", "unknown"), (": the link's state, which says nothing of a run", "muted")),
)


def help_lines(here: Scope, keys: dict[str, str], *, read_only: bool) -> list[Line]:
    """Return every action under its screen, that of ``here`` first; those that read-only mode forbids say so."""
    lines: list[Line] = []
    scopes = sorted(Scope, key=lambda scope: (scope is not here, scope is Scope.DIALOG))
    for scope in scopes:
        lines += [((scope.value.capitalize(), "title"),)]
        for action in ACTIONS:
            if action.scope is scope:
                lines += _action_lines(action, keys[action.id], read_only)
        lines.append(())
    return [*lines, (("Signs", "title"),), *_GLYPHS_MEAN]


def _action_lines(action: Action, key: str, read_only: bool) -> list[Line]:
    notes = []
    if action.dangerous:
        notes.append("asks first")
    if action.changes and read_only:
        notes.append("not in read-only mode")
    text = f"{action.tooltip} ({', '.join(notes)})" if notes else action.tooltip
    first, *rest = wrap(text, TEXT_CELLS, 3)
    lines: list[Line] = [((f"  {key}".ljust(KEY_CELLS), "key"), (first, "text"))]
    return lines + [((" " * KEY_CELLS, "text"), (more, "text")) for more in rest]


class HelpScreen(ConsoleDialog):
    """Closed by esc or by the key that opened it."""

    scope = Scope.DIALOG
    BINDINGS: ClassVar[list[BindingType]] = [*FOCUS_BINDINGS, ("escape,question_mark,f1,q", "close", "Close")]
    AUTO_FOCUS = "LineView"

    def __init__(self, here: Scope) -> None:
        super().__init__()
        self._here = here

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog help"):
            yield Label(Content("Keys"), classes="question")
            yield LineView("help", glyphs=self.glyphs, focusable=True)

    def on_mount(self) -> None:
        app = self.console_app
        self.query_one(LineView).show(help_lines(self._here, app.key_texts, read_only=app.read_only))

    def action_close(self) -> None:
        self.dismiss(False)
