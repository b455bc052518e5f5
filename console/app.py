"""The Textual app: screens over one fleet, one frame timer, one place where text goes out.

Nothing here talks to a link or to SQLite; screens draw from `FleetPort.state`. Whatever
is said to the operator goes through `say`, as plain text, cleaned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from datetime import tzinfo
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from rich.text import Text
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.drivers.linux_driver import LinuxDriver
from textual.screen import Screen
from textual.widgets import Input

import themes
from console import preferences as preferences_file
from console.actions import ACTIONS, Scope, bindings_of, permitted, unknown_ids
from console.errors import GlowplugError, Interrupted
from console.format import counted
from console.prompts import Asked, PromptQueue
from console.screens.base import ConsoleScreen
from console.screens.confirm import ConfirmScreen
from console.screens.fleet import FleetScreen
from console.screens.help import HelpScreen
from console.screens.leave import LeaveScreen
from console.screens.palette import NodeCommands, ThemeCommands
from console.screens.ports import FleetPort, ReadOnlyFleet
from console.screens.prompt import PromptScreen
from console.screens.rollout_port import ReadOnlyRollouts, RolloutsPort
from console.screens.workers import begin
from console.state import unfinished_runs
from console.terminal import Leaving, driver_for
from console.widgets.glyphs import ASCII, UNICODE
from console.widgets.lists import Palette
from console.widgets.paint import Moment

logger = logging.getLogger(__name__)

FRAME_S = 0.1
QUIET_FRAMES = 10
"""While nothing happens every tenth frame is drawn, for ages and clocks."""


class GlowplugApp(App[int]):
    """The console over ``fleet`` and ``rollouts``; ``clock_ns`` and ``wall_clock_ns`` are replaced by tests."""

    TITLE = "Glowplug"
    COMMAND_PALETTE_BINDING = "ctrl+p"
    COMMANDS = App.COMMANDS | {NodeCommands}
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(Scope.APP)
    ESCAPE_TO_MINIMIZE = False

    def __init__(
        self,
        fleet: FleetPort,
        rollouts: RolloutsPort,
        *,
        title: str,
        ascii: bool = False,
        read_only: bool = False,
        theme: str | None = None,
        preferences: Path | None = None,
        keymap: Mapping[str, str] | None = None,
        runs_outlive: bool = True,
        watch: Callable[[], Awaitable[None]] | None = None,
        prompts: PromptQueue | None = None,
        ansi_color: bool | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        zone: tzinfo | None = None,
    ) -> None:
        super().__init__(css_path=[str(path) for path in themes.stylesheets()], ansi_color=ansi_color)
        self.leaving = Leaving(partial(self.exit, Interrupted.exit_code))
        if self.driver_class is LinuxDriver:
            self.driver_class = driver_for(self.leaving)
        self.fleet: FleetPort = ReadOnlyFleet(fleet) if read_only else fleet
        self.rollouts: RolloutsPort = ReadOnlyRollouts(rollouts) if read_only else rollouts
        self.fleet_title = title
        self.glyphs = ASCII if ascii else UNICODE
        self.read_only = read_only
        self.paused = False
        kept = preferences_file.load(preferences)
        self._keymap_wanted = {**kept.keys, **(keymap or {})}
        self._preferences = preferences
        self._runs_outlive = runs_outlive
        self._watch = watch
        self._prompts = prompts
        self._put_off: Asked | None = None
        self._paused_on_leaving: tuple[str, ...] = ()
        self._clock_ns, self._wall_clock_ns, self._zone = clock_ns, wall_clock_ns, zone
        self._quiet_frames = -1
        self._unseen: set[str] = set()
        self.key_texts = self._key_texts()
        self._hints = {
            action.id: self.key_texts[action.id].split()[0] for action in ACTIONS if not (read_only and action.changes)
        }
        for name in themes.NAMES:
            self.register_theme(themes.load(name))
        wanted = theme or kept.theme
        self.theme = wanted if wanted in self.available_themes else themes.NAMES[0]
        self.set_class(ascii, "-ascii")

    # --- start and end ---------------------------------------------------------------

    def get_default_screen(self) -> Screen[None]:
        return FleetScreen()

    async def on_mount(self) -> None:
        self.set_keymap(
            {id: keys for id, keys in self._keymap_wanted.items() if id not in unknown_ids(self._keymap_wanted)}
        )
        for id in unknown_ids(self._keymap_wanted):
            self.say(f"keys: {id} is no action; ? lists them all", "warning")
        self.theme_changed_signal.subscribe(self, lambda theme: self._theme_changed(theme.name))
        try:
            await self.fleet.start()
        except GlowplugError as error:
            self.exit(error.exit_code, return_code=error.exit_code, message=Text(self.glyphs.text(str(error))))
            return
        if self._watch is not None:
            begin(self, partial(self._say_what_is_lost, self._watch), "watch")
        self.set_interval(FRAME_S, self.frame)
        self.frame()

    async def _say_what_is_lost(self, watch: Callable[[], Awaitable[None]]) -> None:
        try:
            await watch()
        except GlowplugError as error:
            self.say(str(error), "error")

    async def on_unmount(self) -> None:
        await self.rollouts.close()
        await self.fleet.close()

    async def action_quit(self) -> None:
        """Leave; where this console carries rollouts out ask first, then pause them. Once more waits for no hook."""
        if self._paused_on_leaving:
            self.rollouts.hurry()
        elif not self.rollouts.carried:
            self._leave()
        elif not isinstance(self.screen, LeaveScreen):
            self.ask(LeaveScreen(self.rollouts.carried), self._pause_and_leave)

    async def _pause_and_leave(self) -> None:
        self._paused_on_leaving = tuple(self.rollouts.carried)
        if self._paused_on_leaving:
            self.say(
                f"pausing; hooks that move traffic are waited for, {self.key_texts['app.quit']} kills them", "warning"
            )
            await self.rollouts.close()
        self._leave()

    def _leave(self) -> None:
        """Leave; what goes on without this console is said on the way out."""
        left = [name for name in self.fleet.nodes if unfinished_runs(self.fleet.state(name))]
        said = []
        if left:
            verb = "go on" if self._runs_outlive else "end with it"
            said.append(f"Glowplug left; runs on {counted(len(left), 'node')} {verb}: {', '.join(left[:20])}")
        for name in self._paused_on_leaving:
            go_on = f"; to go on: glowplug rollout resume {name}" if self._runs_outlive else ""
            said.append(f"rollout {name} is paused{go_on}")
        self.exit(0, message=Text("\n".join(map(self.glyphs.text, said))) if said else None)

    # --- frames ------------------------------------------------------------------------

    def moment(self) -> Moment:
        return Moment(self._clock_ns(), self._wall_clock_ns(), self.glyphs, self._zone, self._hints)

    def frame(self) -> None:
        """Let every screen show what changed; a dialog on top stops nothing."""
        if not self.is_running:  # screens are closed before the clock is
            return
        self._show_prompt()
        for notice in self.rollouts.take_notices():
            self.say(notice.text, "warning" if notice.is_bad else "information")
        self._unseen |= self.fleet.take_dirty()
        if self.paused:
            return
        live = {name for name in self.fleet.nodes if self.is_live(name)}
        self._quiet_frames = 0 if self._unseen or live else self._quiet_frames + 1
        if self._quiet_frames % QUIET_FRAMES:
            return
        dirty, self._unseen = self._unseen | live, set()
        self._show(dirty)

    def _show(self, dirty: Set[str]) -> None:
        moment = self.moment()
        for screen in self.screen_stack:
            if isinstance(screen, ConsoleScreen) and screen.is_drawn:
                screen.frame(dirty, moment)

    def _show_prompt(self) -> None:
        """Show what a login asks, but over no dialog and into nobody's typing: keys must go where they are meant."""
        screen, asked = self.screen, self._prompts.current if self._prompts is not None else None
        if isinstance(screen, PromptScreen):
            screen.refresh_queue()
        elif asked is None or self._prompts is None:
            return
        elif screen.is_modal or isinstance(self.focused, Input):
            if self._put_off is not asked:
                self._put_off = asked
                self.say("a login waits for an answer; it is asked for once this is closed", "warning")
        else:
            self.push_screen(PromptScreen(self._prompts, asked), lambda _: self._after_prompt())

    def _after_prompt(self) -> None:
        self.call_later(self.frame)

    def is_live(self, name: str) -> bool:
        """Whether that node's panel changes by the clock alone: a run is under way there."""
        state = self.fleet.state(name)
        run = state.run
        return state.is_known and run is not None and not run.state.is_terminal

    # --- what screens use -----------------------------------------------------------------

    def say(self, text: str, severity: Literal["information", "warning", "error"] = "information") -> None:
        """Show a passing notice; never markup, never raw."""
        timeout = 4 if severity == "information" else 12
        self.notify(self.glyphs.text(text), severity=severity, markup=False, timeout=timeout)

    def ask(self, dialog: ConfirmScreen, then: Callable[[], Awaitable[None]]) -> None:
        """Put a question; on yes ``then`` runs, whatever screen is open by then."""

        def answered(yes: bool | None) -> None:
            if yes:
                begin(self, then, "carry out")

        self.push_screen(dialog, answered)

    # --- actions of the registry ----------------------------------------------------------

    has_target = has_unfinished = has_warm = has_standby = has_parked = has_lost_link = has_log = False
    rollout_verbs: frozenset[str] = frozenset()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return permitted(action, Scope.APP, self, read_only=self.read_only)

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._show(set())

    async def action_back(self) -> None:
        screen = self.screen
        if isinstance(screen, ConsoleScreen):
            screen.go_back()
        elif len(self.screen_stack) > 1:
            self.pop_screen()

    def go_to(self, name: str) -> None:
        """Close what lies over the fleet screen and select that node there."""
        while len(self.screen_stack) > 1:
            self.pop_screen()
        if isinstance(self.screen, FleetScreen):
            self.screen.select(name)

    def action_help(self) -> None:
        screen = self.screen
        self.push_screen(HelpScreen(screen.scope if isinstance(screen, ConsoleScreen) else Scope.APP))

    def action_copy(self) -> None:
        """Copy the selected text; without any, what the screen has to offer."""
        screen = self.screen
        text = screen.get_selected_text()
        if text is None and isinstance(screen, ConsoleScreen):
            text = screen.copied_text()
        if text:
            self.copy_to_clipboard(text)
            self.say("copied")

    def action_command_palette(self) -> None:
        self.push_screen(Palette(placeholder="Search for commands and nodes"))

    def search_themes(self) -> None:
        self.push_screen(Palette(providers=[ThemeCommands], placeholder="Search for themes"))

    def _theme_changed(self, name: str) -> None:
        if not preferences_file.save_theme(self._preferences, name):
            self.say("the theme could not be kept for the next start", "warning")

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Offer every action that this screen and the app would carry out now."""
        for action in ACTIONS:
            owner: App[int] | ConsoleScreen | None = self if action.scope is Scope.APP else None
            if isinstance(screen, ConsoleScreen) and action.scope is screen.scope:
                owner = screen
            if owner is None or not action.palette or owner.check_action(action.method, ()) is not True:
                continue
            run = partial(self.run_action, action.name, owner)
            yield SystemCommand(action.label.rstrip("…"), f"{action.tooltip} ({self.key_texts[action.id]})", run)

    def _key_texts(self) -> dict[str, str]:
        texts = {}
        for action in ACTIONS:
            keys = self._keymap_wanted.get(action.id, action.keys).split(",")
            texts[action.id] = " ".join(self.get_key_display(Binding(key.strip(), "")) for key in keys)
        return texts

    def get_key_display(self, binding: Binding) -> str:
        return super().get_key_display(binding).replace("⏎", "enter")


def run_app(
    fleet: FleetPort,
    rollouts: RolloutsPort,
    *,
    title: str,
    ascii: bool = False,
    read_only: bool = False,
    theme: str | None = None,
    preferences: Path | None = None,
    keymap: Mapping[str, str] | None = None,
    runs_outlive: bool = True,
    watch: Callable[[], Awaitable[None]] | None = None,
    prompts: PromptQueue | None = None,
    no_color: bool = False,
) -> int:
    """Show the console until the operator leaves and return the exit code.

    ``preferences`` is the file that keeps the theme; ``runs_outlive`` is False where
    hosts end with the console; what ``watch`` raises in the meantime is said; what
    ``prompts`` ask is shown, one at a time;
    ``no_color`` when NO_COLOR is set.
    Raises: Interrupted when a signal ended it, or the terminal is gone.
    """
    app = GlowplugApp(
        fleet,
        rollouts,
        title=title,
        ascii=ascii,
        read_only=read_only,
        theme=theme,
        preferences=preferences,
        keymap=keymap,
        runs_outlive=runs_outlive,
        watch=watch,
        prompts=prompts,
        ansi_color=True if no_color else None,
    )
    result: int | None = None
    with app.leaving.obeying_signals():
        result = app.run()
    return result if result is not None else app.return_code or 0
