"""The footer: the keys that work now, as many as fit; a click presses one."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from console.widgets.glyphs import UNICODE, Glyphs
from console.widgets.paint import Piece, fit, spread, width_of
from console.widgets.roles import ROLE_CLASSES, RoleStyles

HELP_ACTION = "help"


class KeyBar(Widget):
    """One line; what can't be done now is dimmed, what must not be done is absent."""

    COMPONENT_CLASSES: ClassVar[set[str]] = ROLE_CLASSES
    ALLOW_SELECT = False

    def __init__(self, glyphs: Glyphs = UNICODE) -> None:
        super().__init__()
        self._glyphs = glyphs
        self._roles = RoleStyles(self)
        self._spans: list[tuple[int, int, str]] = []

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._bindings_changed)

    def _bindings_changed(self, _screen: Screen[object]) -> None:
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._roles.clear()

    def render_line(self, y: int) -> Strip:
        if y:
            return Strip.blank(self.size.width, self.rich_style)
        return self._roles.strip(self._line(self.size.width))

    def _line(self, width: int) -> tuple[Piece, ...]:
        palette = (("^p", "key"), (" palette ", "muted"))
        end = palette if width >= 60 else ()
        room = width - width_of(end)
        pieces: list[Piece] = []
        self._spans = []
        for key, part in self._fitting(room):
            start = width_of(pieces)
            pieces += part
            self._spans.append((start, width_of(pieces), key))
        if end:
            self._spans.append((room, width, "ctrl+p"))
        return spread(pieces, end, width, self._glyphs) if end else fit(pieces, width, self._glyphs)

    def _fitting(self, room: int) -> list[tuple[str, tuple[Piece, Piece]]]:
        """Return the keys that fit, in order; the way to all the others is never what is left out."""
        parts = [
            (key, binding.action, _pair(self.app.get_key_display(binding), binding.description, enabled))
            for key, binding, enabled in self._shown()
        ]
        kept = [(key, part) for key, action, part in parts if action.endswith(HELP_ACTION)]
        room -= sum(width_of(part) for _, part in kept)
        fitting = []
        for key, action, part in parts:
            if action.endswith(HELP_ACTION):
                continue
            if width_of(part) > room:
                break
            fitting.append((key, part))
            room -= width_of(part)
        return fitting + kept

    def _shown(self) -> list[tuple[str, Binding, bool]]:
        seen: set[str] = set()
        shown = []
        for key, active in self.screen.active_bindings.items():
            binding = active.binding
            if binding.show and binding.action not in seen and binding.key != "ctrl+p":
                seen.add(binding.action)
                shown.append((key, binding, active.enabled))
        return shown

    def on_click(self, event: events.Click) -> None:
        for start, end, key in self._spans:
            if start <= event.x < end:
                self.app.simulate_key(key)
                return


def _pair(key: str, label: str, enabled: bool) -> tuple[Piece, Piece]:
    """Return a key and what it does as pieces."""
    return (f" {key}", "key" if enabled else "faint"), (f" {label} ", "text" if enabled else "faint")
