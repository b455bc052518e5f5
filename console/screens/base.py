"""What all our screens share: keys from the registry, frames from the app, text that can't harm."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, ClassVar, cast

from textual.binding import Binding, BindingType
from textual.screen import ModalScreen, Screen

from console.actions import Scope, permitted
from console.widgets.glyphs import Glyphs
from console.widgets.paint import Moment

if TYPE_CHECKING:
    from console.app import GlowplugApp

FOCUS_BINDINGS: list[BindingType] = [
    Binding("tab", "app.focus_next", "Next", show=False),
    Binding("shift+tab", "app.focus_previous", "Previous", show=False),
]


class Common:
    """Mixed into screens and dialogs."""

    scope: ClassVar[Scope]

    @property
    def console_app(self) -> GlowplugApp:
        return cast("GlowplugApp", cast("Screen[object]", self).app)

    @property
    def glyphs(self) -> Glyphs:
        return self.console_app.glyphs

    # What a screen does not say, it has not got; see `actions.Situation`.
    has_target = False
    has_unfinished = False
    has_warm = False
    has_standby = False
    has_parked = False
    has_lost_link = False
    has_log = False
    rollout_verbs: frozenset[str] = frozenset()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return permitted(action, self.scope, self, read_only=self.console_app.read_only)


class ConsoleScreen(Common, Screen[None], inherit_bindings=False):
    """A whole screen."""

    BINDINGS: ClassVar[list[BindingType]] = FOCUS_BINDINGS
    ESCAPE_TO_MINIMIZE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-wide")]  # noqa: RUF012 (Textual declares it so)
    is_drawn = False
    """Set once there is something to show frames on."""

    def frame(self, dirty: Set[str], moment: Moment) -> None:
        """Show what changed; called ten times a second while something is under way, also when covered."""

    def on_line_view_resized(self) -> None:
        if self.is_drawn:
            self.frame(frozenset(), self.console_app.moment())

    def on_unmount(self) -> None:
        self.is_drawn = False

    def go_back(self) -> None:
        """Close what is open here; in the end the screen itself."""
        self.app.pop_screen()

    def copied_text(self) -> str | None:
        """Return what copying means here when no text is selected."""
        return None


class ConsoleDialog(Common, ModalScreen[bool], inherit_bindings=False):
    """A question over a screen; answers False when it is closed."""

    BINDINGS: ClassVar[list[BindingType]] = FOCUS_BINDINGS
    ESCAPE_TO_MINIMIZE = False
