"""The app around the screens: keys, help, palette, themes, read-only mode, leaving."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from textual.widgets import OptionList

from console.actions import ACTIONS, BY_ID, Scope, unknown_ids
from console.errors import HistoryError, UsageError
from console.screens.base import ConsoleScreen
from console.screens.fleet import FleetScreen
from console.screens.help import HelpScreen, help_lines
from console.screens.history import HistoryScreen
from console.screens.launch import LaunchScreen
from console.screens.ports import ReadOnlyFleet
from console.screens.rollout import RolloutScreen
from console.screens.run import RunScreen
from console.widgets.paint import plain
from tests.console.ui import scenes
from tests.console.ui.driving import (
    fake,
    fleet_screen,
    make_app,
    press,
    running,
    see,
    settle,
    shown,
    shown_lines,
    until,
)
from tests.console.ui.fake_fleet import FakeFleet

SCREENS: dict[Scope, type[ConsoleScreen]] = {
    Scope.FLEET: FleetScreen,
    Scope.LAUNCH: LaunchScreen,
    Scope.RUN: RunScreen,
    Scope.HISTORY: HistoryScreen,
    Scope.ROLLOUT: RolloutScreen,
}
CHANGES = tuple(action for action in ACTIONS if action.changes)


# --- the registry -----------------------------------------------------------------------


def test_every_action_is_carried_out_by_its_screen_or_by_the_app() -> None:
    """No key leads nowhere."""
    app = make_app()
    for action in ACTIONS:
        owner = SCREENS.get(action.scope) or (type(app) if action.scope is Scope.APP else None)
        if owner is not None:
            assert hasattr(owner, f"action_{action.method}"), action.id


def test_ids_are_unique_and_no_key_means_two_things_on_one_screen() -> None:
    """Keys of the app hold everywhere, so they count on every screen."""
    assert len(BY_ID) == len(ACTIONS)
    for scope in SCREENS:
        keys = [key for action in ACTIONS if action.scope in (scope, Scope.APP) for key in action.keys.split(",")]
        assert len(keys) == len(set(keys)), scope


def test_every_action_says_what_it_does_and_dangerous_ones_change_something() -> None:
    """Help and tooltips come from here."""
    assert all(action.tooltip and action.label and action.group for action in ACTIONS)
    assert all(action.changes for action in ACTIONS if action.dangerous)


def test_whatever_calls_a_host_to_act_is_marked_as_changing() -> None:
    """Read-only mode hangs on this mark: starting, cancelling and releasing have it."""
    assert {action.id for action in CHANGES} == {
        "fleet.warm", "fleet.cancel", "fleet.release", "fleet.park", "fleet.unpark", "launch.start", "run.cancel",
        "run.release", "rollout.start", "rollout.pause", "rollout.resume", "rollout.promote", "rollout.promote_all",
        "rollout.retry", "rollout.skip", "rollout.abort",
    }  # fmt: skip


# --- read-only -------------------------------------------------------------------------------


@pytest.mark.parametrize("action", CHANGES, ids=lambda action: action.id)
async def test_read_only_mode_takes_every_changing_action_away(action: object) -> None:
    """From the keys, the footer and the palette alike."""
    assert action in CHANGES
    async with running(read_only=True) as (app, pilot):
        screen = {
            Scope.FLEET: lambda: fleet_screen(app),
            Scope.LAUNCH: lambda: LaunchScreen(("gpu-eu-01",)),
            Scope.RUN: lambda: RunScreen("gpu-eu-02", "7f3a12cd0002"),
            Scope.ROLLOUT: RolloutScreen,
        }[action.scope]()  # type: ignore[attr-defined]
        if screen is not app.screen:
            app.push_screen(screen)
            await settle(app, pilot)

        await press(app, pilot, "a", "enter" if action.scope is Scope.LAUNCH else "u")  # type: ignore[attr-defined]
        await press(app, pilot, action.keys)  # type: ignore[attr-defined]
        await press(app, pilot, "y")

        assert fake(app).asked == []
        assert screen.check_action(action.method, ()) is False  # type: ignore[attr-defined]
        titles = [command.title for command in app.get_system_commands(screen)]
        assert action.label.rstrip("…") not in titles  # type: ignore[attr-defined]


async def test_read_only_mode_is_seen_and_offers_no_key_that_it_took() -> None:
    """Panels do not advise what can't be done."""
    async with running(read_only=True) as (app, _):
        text = shown(app)

    assert "read only" in text
    assert "warms a model here" not in text
    assert "tries again" not in text
    assert "w Warm" not in text


async def test_a_read_only_fleet_refuses_whatever_reaches_it() -> None:
    """Also what no key, button or palette of ours asks for."""
    fleet = FakeFleet([scenes.ready("eu-01")])
    guarded = ReadOnlyFleet(fleet)

    moves = (guarded.park("eu-01", "run"), guarded.unpark("eu-01", "run"))
    for call in (guarded.warm("eu-01", "llama-7b"), guarded.cancel("eu-01", "run"), guarded.release("eu-01"), *moves):
        with pytest.raises(UsageError, match="read-only"):
            await call
    with pytest.raises(UsageError, match="read-only"):
        guarded.parallel = 3
    await guarded.probe("eu-01")

    assert [asked.what for asked in fleet.asked] == ["probe"]


# --- keys ----------------------------------------------------------------------------------------


async def test_keys_can_be_remapped_and_are_shown_as_remapped() -> None:
    """Footer, panels, help and the key itself."""
    async with running([scenes.cold("eu-05")], keymap={"fleet.warm": "f5"}) as (app, pilot):
        assert "f5 Warm" in shown(app)
        assert "f5 warms a model here" in shown(app)

        await press(app, pilot, "w")
        assert app.screen is fleet_screen(app)
        await press(app, pilot, "f5")
        assert isinstance(app.screen, LaunchScreen)


async def test_an_unknown_name_in_the_keymap_is_said_and_the_rest_holds() -> None:
    """A typing error takes no key away."""
    assert unknown_ids({"fleet.wram": "f5", "fleet.warm": "f6"}) == ("fleet.wram",)
    async with running(keymap={"fleet.wram": "f5", "fleet.warm": "f6"}) as (app, pilot):
        await see("fleet.wram is no action", app, pilot)
        await press(app, pilot, "f6")
        assert isinstance(app.screen, LaunchScreen)


async def test_keys_can_be_set_in_the_preferences_file(tmp_path: Path) -> None:
    """Beside the theme."""
    path = tmp_path / "preferences.json"
    path.write_text(json.dumps({"theme": "glowplug-light", "keys": {"fleet.history": "f9", "odd": 3}}))
    async with running(preferences=path) as (app, pilot):
        assert app.theme == "glowplug-light"
        await press(app, pilot, "f9")
        assert isinstance(app.screen, HistoryScreen)


async def test_help_names_every_action_with_its_key_those_of_the_screen_first() -> None:
    """Generated from the registry."""
    async with running() as (app, pilot):
        await press(app, pilot, "question_mark")
        assert isinstance(app.screen, HelpScreen)
        assert "Keys" in shown(app)
        await press(app, pilot, "escape")
        assert app.screen is fleet_screen(app)

        text = "\n".join(plain(line) for line in help_lines(Scope.RUN, app.key_texts, read_only=True))

    assert text.startswith("Run\n")
    for action in ACTIONS:
        assert action.tooltip.split()[0] in text
        assert app.key_texts[action.id] in text
    assert "asks first, not in read-only mode" in " ".join(text.split())


@pytest.mark.parametrize("width", [40, 60, 80, 120])
async def test_the_footer_always_names_help(width: int) -> None:
    """Whatever does not fit is found there."""
    async with running(size=(width, 24)) as (app, _):
        footer = shown_lines(app)[-1]

        assert "? Help" in footer
        assert len(footer) <= width


async def test_a_click_on_the_footer_presses_its_key() -> None:
    """For those who prefer the mouse."""
    async with running() as (app, pilot):
        column = shown_lines(app)[-1].index("h History")
        await pilot.click("KeyBar", offset=(column + 2, 0))
        await until(lambda: isinstance(app.screen, HistoryScreen), pilot)


# --- palette -----------------------------------------------------------------------------------------


async def test_the_palette_offers_what_the_screen_can_do_now() -> None:
    """The same actions as the keys; nothing that is dimmed."""
    async with running() as (app, pilot):
        titles = [command.title for command in app.get_system_commands(app.screen)]
        assert {"Warm", "Release", "History", "Theme", "Quit"} <= set(titles)
        assert "Cancel" not in titles

        await press(app, pilot, "ctrl+p", *"history", "enter")
        await until(lambda: isinstance(app.screen, HistoryScreen), pilot)


async def test_the_palette_goes_to_a_node_also_when_a_filter_hides_it() -> None:
    """By name."""
    async with running() as (app, pilot):
        await press(app, pilot, "slash", *"eu-01", "enter", "ctrl+p", *"go to lab")
        await until(lambda: app.screen.query(OptionList).first().option_count > 0, pilot)
        await press(app, pilot, "enter")
        await until(lambda: app.screen is fleet_screen(app), pilot)

        assert fleet_screen(app).selection.selected == "lab-01"


# --- start and end ---------------------------------------------------------------------------------------------


async def test_the_fleet_is_opened_and_closed_with_the_app() -> None:
    """Whatever way it ends."""
    async with running() as (app, _):
        assert fake(app).is_open

    assert not fake(app).is_open


async def test_leaving_says_which_runs_go_on() -> None:
    """They are the hosts' own; in the embedded fleet they end."""
    for outlive, words in ((True, "runs on 1 node go on: eu-02"), (False, "runs on 1 node end with it: eu-02")):
        async with running([scenes.loading("eu-02"), scenes.ready("eu-01")], runs_outlive=outlive) as (app, pilot):
            await pilot.press("ctrl+q")

            assert words in str(app._exit_renderables[0])
        assert app.return_value == 0


async def test_control_c_does_not_leave() -> None:
    """It copies."""
    async with running() as (app, pilot):
        await press(app, pilot, "ctrl+c")

        assert app.is_running
        assert app.clipboard == "gpu-eu-01"


async def test_a_history_that_can_not_be_opened_ends_the_app_with_its_exit_code() -> None:
    """One line instead of a traceback."""
    app = make_app()

    async def start() -> None:
        raise HistoryError("history.db belongs to another program")

    app.fleet.start = start  # type: ignore[method-assign]
    async with app.run_test() as pilot:
        await pilot.pause()
        assert "history.db belongs to another program" in str(app._exit_renderables[0])

    assert app.return_code == HistoryError.exit_code


async def test_what_is_watched_is_said_when_it_is_lost() -> None:
    """The console stays open; the reason is on screen."""

    async def watch() -> None:
        raise UsageError("the embedded SSH server was killed")

    async with running(watch=watch) as (app, pilot):
        await see("the embedded SSH server was killed", app, pilot)
        assert app.is_running


def test_the_verbs_do_without_the_app() -> None:
    """Textual costs a third of a second; nothing that a verb needs pulls it in."""
    program = (
        "import sys, console.cli, console.cli.main; sys.exit(any(m.split('.')[0] == 'textual' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_a_frame_that_falls_due_while_the_app_closes_its_screens_draws_nothing() -> None:
    """Textual stops an app's clock after its last screen is gone."""
    async with running([scenes.loading("gpu-eu-02")]) as (app, pilot):
        app.exit()
        await until(lambda: not app.is_running, pilot)
    assert not app.screen_stack
    app.frame()
