"""The Rollout screen: what it says of a rollout in one second, and a key for each verb."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from console.app import GlowplugApp
from console.errors import HistoryError
from console.rollout import events as e
from console.rollout.others import Other
from console.rollout.saved import run_uid
from console.rollout.states import GateCount, Phase, Verdict
from console.screens.confirm import LEAST_CELLS, ConfirmScreen
from console.screens.fleet import FleetScreen
from console.screens.leave import LeaveScreen
from console.screens.rollout import RolloutScreen
from console.screens.run import RunScreen
from tests.console.rollout.fakes import NAME
from tests.console.rollout.test_carrying import Console
from tests.console.ui import rollout_scenes as scenes
from tests.console.ui import scenes as fleet_scenes
from tests.console.ui.driving import lines_of, press, running, see, settle, shown, shown_lines, until
from tests.console.ui.fake_rollouts import FakeRollouts
from tests.console.ui.rollout_scenes import ELSEWHERE, NODES, UID, view

OTHER_UID = "5eed0000000040008000000000000002"


@contextlib.asynccontextmanager
async def opened(
    rollouts: FakeRollouts, size: tuple[int, int] = (120, 40), **options: object
) -> AsyncIterator[tuple[GlowplugApp, Pilot[int]]]:
    """The screen over a fleet that has the nodes of `NODES`."""
    async with running(scenes.fleet(), size=size, rollouts=rollouts, **options) as (app, pilot):
        await press(app, pilot, "o")
        yield app, pilot


def screen_of(app: GlowplugApp) -> RolloutScreen:
    screen = app.screen
    assert isinstance(screen, RolloutScreen)
    return screen


def head(app: GlowplugApp) -> str:
    return "\n".join(lines_of(app, "#standing"))


# --- what it shows ------------------------------------------------------------------------------


async def test_the_timeline_follows_its_end_until_it_is_scrolled() -> None:
    """Newest at the bottom; who reads further up is not torn away."""
    first = view(timeline=scenes.long_timeline(20))
    rollouts = FakeRollouts([first])
    async with opened(rollouts) as (app, pilot):
        timeline = screen_of(app)._timeline
        assert timeline.is_vertical_scroll_end
        assert timeline.max_scroll_y > 0

        more = (scenes.told("event", "NodeReached", "n1", state="warming"),) * 40
        rollouts.views = [second := view(timeline=more, before=first)]
        screen_of(app).read()
        await settle(app, pilot)
        assert timeline.is_vertical_scroll_end

        timeline.scroll_to(y=3, animate=False, immediate=True)
        rollouts.views = [view(timeline=more, before=second)]
        screen_of(app).read()
        await settle(app, pilot)
        assert timeline.scroll_offset.y == 3


async def test_the_end_of_a_timeline_is_in_view_when_it_outgrows_it_at_once() -> None:
    """Nothing else has to happen for that: what came last may be how the rollout ended."""
    one = scenes.told("event", "NodeReached", "n1", state="warming")
    rollouts = FakeRollouts([view(timeline=(one,) * 5)])
    async with opened(rollouts) as (app, pilot):
        timeline = screen_of(app)._timeline
        assert timeline.max_scroll_y == 0
        other = view(timeline=(one,) * 60)
        rollouts.views = [replace(other, row=replace(other.row, rollout_uid=OTHER_UID))]
        screen_of(app).show_rollout(OTHER_UID)
        await settle(app, pilot)

        assert timeline.max_scroll_y > 0
        assert timeline.is_vertical_scroll_end


async def test_300_nodes_are_read_at_every_size() -> None:
    """What goes wrong is in sight, the rest is folded; no line is wider than the terminal."""
    async with opened(FakeRollouts([view(scenes.long(), timeline=scenes.long_timeline(20))])) as (app, pilot):
        for width, height in ((120, 40), (200, 60), (80, 24), (40, 12)):
            await pilot.resize_terminal(width, height)
            await settle(app, pilot)
            lines = shown_lines(app)
            assert all(len(line) <= width for line in lines)
            assert "running" in lines[1]
            assert "✖ 1" in lines[1]
            assert "? Help" in lines[-1]
            assert screen_of(app).board.selected in shown(app)
        await press(app, pilot, "end")
        assert screen_of(app).board.selected == "gpu-eu-150"
        assert "gpu-eu-150" in shown(app)


async def test_the_timeline_takes_the_boards_place_where_there_is_little_room() -> None:
    """And goes again."""
    async with opened(FakeRollouts([view()]), (40, 12)) as (app, pilot):
        assert "resume" not in shown(app)
        await press(app, pilot, "l")
        assert "hook" in shown(app) or "gate 1" in shown(app)
        assert "batch 2  3 nodes" not in shown(app)
        await press(app, pilot, "l")
        assert "batch 2" in shown(app)


async def test_a_history_that_can_not_be_read_is_said_and_what_was_read_stays() -> None:
    """With the problem beside it."""
    rollouts = FakeRollouts([view()])
    async with opened(rollouts) as (app, pilot):
        rollouts.refuses = HistoryError("history.db is damaged")
        screen_of(app).read()
        await settle(app, pilot)

        assert "as read before: history.db is damaged" in head(app)
        assert "gpu-eu-02" in shown(app)


async def test_without_any_rollout_it_says_how_one_is_started() -> None:
    """And with none in fleet.toml where to look."""
    async with opened(FakeRollouts()) as (app, pilot):
        assert "no rollout was ever started here; n starts one of fleet.toml" in head(app)
        await press(app, pilot, "n")
        await see("fleet.toml has no [[rollout]]", app, pilot)


# --- keys, on a fake ----------------------------------------------------------------------------


async def test_each_key_asks_for_its_verb() -> None:
    """On the rollout that is shown and the node that is selected; the answer is said."""
    rollouts = FakeRollouts([view()])
    async with opened(rollouts) as (app, pilot):
        await press(app, pilot, "P")
        await see("pause eu-llama: done", app, pilot)
        await press(app, pilot, "x", "y")
        await press(app, pilot, "M", "y")
        await press(app, pilot, "down", "r")
        await press(app, pilot, "s", *"bad disk", "enter")
        await press(app, pilot, "down", "r")
        assert "is verifying; that attempt is called off" in shown(app)
        await press(app, pilot, "y")

    assert rollouts.asked == [
        (UID, "pause", {}),
        (UID, "abort", {}),
        (UID, "promote", {"everything": True}),
        (UID, "retry", {"node": "gpu-eu-03"}),
        (UID, "skip", {"node": "gpu-eu-03", "reason": "bad disk"}),
        (UID, "retry", {"node": "gpu-eu-04"}),
    ]


async def test_what_would_do_nothing_or_is_declined_does_nothing() -> None:
    """A ready node can't be tried again, a running rollout not be resumed; the way back has the focus."""
    rollouts = FakeRollouts([view(holder=ELSEWHERE)])
    async with opened(rollouts) as (app, pilot):
        await press(app, pilot, "left", "r", "s", "c", "m")
        assert screen_of(app).board.selected == "gpu-eu-01"
        await press(app, pilot, "x")
        assert isinstance(app.screen, ConfirmScreen)
        assert "gpu-eu-03  failed, out of traffic" in shown(app)
        await press(app, pilot, "enter")
        await press(app, pilot, "right", "s")
        assert app.screen.query_one(Input).has_focus
        await press(app, pilot, "enter", "escape")

        assert rollouts.asked == []
        assert app.screen is screen_of(app)


async def test_the_question_is_about_the_node_that_was_selected_when_it_was_put() -> None:
    """Whatever the rollout does meanwhile."""
    rollouts = FakeRollouts([view()])
    async with opened(rollouts) as (app, pilot):
        await press(app, pilot, "down", "s", *"bad")
        rollouts.views = [view(scenes.state(NODES[:2]))]
        app.screen_stack[1].read()  # type: ignore[attr-defined]
        await settle(app, pilot)
        await press(app, pilot, "enter")

    assert rollouts.asked == [(UID, "skip", {"node": "gpu-eu-03", "reason": "bad"})]


async def test_an_inconclusive_gate_is_promoted_by_name() -> None:
    """The dialog says what is taken for granted."""
    analysis = replace(scenes.ANALYSIS, gates=(GateCount(0, 2, inconclusive=3, verdict=Verdict.INCONCLUSIVE),))
    paused = scenes.state(phase=Phase.PAUSED, reason="gate 1 is inconclusive", analysis=analysis)
    async with opened(FakeRollouts([view(paused)])) as (app, pilot):
        await press(app, pilot, "m")
        assert "gpu-eu-04  is taken as passed: too little was measured" in shown(app)


async def test_enter_opens_the_run_and_copying_gives_the_reason_of_the_selected_node() -> None:
    """Where no attempt was made it says so."""
    async with opened(FakeRollouts([view()])) as (app, pilot):
        await press(app, pilot, "enter")
        assert isinstance(app.screen, RunScreen)
        assert app.screen.run_uid == run_uid(UID, "gpu-eu-02", 1)
        await press(app, pilot, "escape", "down", "ctrl+c")
        assert app.clipboard == "gpu-eu-03: failed: compile: no kernel image for sm_90: torch 2.1 is built for sm_80"
        await press(app, pilot, "right", "up", "enter")
        await see("gpu-eu-05: no attempt was made yet", app, pilot)


async def test_another_rollout_of_the_history_is_chosen_from_a_list() -> None:
    """The newest that is not over is shown first."""
    done = view(scenes.state(phase=Phase.DONE, reason="8 ready"), rollout_uid="d" * 32, name="lab-llama")
    async with opened(FakeRollouts([done, view()])) as (app, pilot):
        assert "eu-llama" in head(app)
        await press(app, pilot, "o", "enter")
        assert "✔ done  lab-llama" in head(app)


async def test_over_a_rollout_that_has_ended_another_that_goes_on_is_said_with_its_key() -> None:
    """The screen stays where it is; while what is shown goes on it says nothing of others."""
    newer = view(holder=ELSEWHERE, rollout_uid=OTHER_UID, name="lab-llama")
    rollouts = FakeRollouts([newer, view()])
    rollouts.unfinished = (Other(OTHER_UID, "lab-llama", "running", ELSEWHERE, 1),)
    async with opened(rollouts) as (app, pilot):
        screen_of(app).show_rollout(UID)
        await settle(app, pilot)
        assert "lab-llama" not in head(app)

        rollouts.views = [newer, view(scenes.state(phase=Phase.DONE, reason="8 ready"))]
        screen_of(app).read()
        await settle(app, pilot)
        assert "✔ done  eu-llama" in head(app)
        assert "● rollout lab-llama: running, carried out by build-7, process 4711, 1 node out of traffic" in head(app)
        assert "o lists it" in head(app)
        await press(app, pilot, "o", "enter")
        assert "● running  lab-llama" in head(app)
        assert "lists it" not in head(app)


# --- for real: a history, a controller, a world as a test tells it ---------------------------------


@contextlib.asynccontextmanager
async def real(tmp_path: Path) -> AsyncIterator[tuple[GlowplugApp, Pilot[int], Console]]:
    console = Console(tmp_path)
    states = [fleet_scenes.cold(name) for name in "abc"]
    async with running(states, rollouts=console.carrier) as (app, pilot):
        yield app, pilot, console


async def test_a_rollout_is_started_after_its_plan_and_goes_on_when_the_screen_is_left(tmp_path: Path) -> None:
    """The fleet screen says that it is under way; its end is a notice."""
    async with real(tmp_path) as (app, pilot, console):
        console.effects.held = {e.StartNode}
        await press(app, pilot, "o", "n", "enter")
        await until(lambda: isinstance(app.screen, ConfirmScreen), pilot)
        assert "Start rollout pre-warm on 3 nodes?" in shown(app)
        assert "batch 1, canary: 1 node" in shown(app)
        assert console.effects.begun == []
        await press(app, pilot, "y")
        await see("● carried out here", app, pilot)
        await see("● a", app, pilot)

        await press(app, pilot, "escape")
        assert isinstance(app.screen, FleetScreen)
        await see(f"rollout {NAME} running", app, pilot)
        await console.effects.let_go(e.StartNode)
        await until(lambda: not console.carrier.carried, pilot)
        app.frame()
        await see(f"rollout {NAME} done: 3 ready", app, pilot)


async def test_quitting_while_it_carries_one_out_asks_and_pauses_it(tmp_path: Path) -> None:
    """No leaves everything as it is; yes pauses, gives the lease back, and says how to go on."""
    async with real(tmp_path) as (app, pilot, console):
        console.effects.held = {e.StartNode}
        uid = await console.start()
        await press(app, pilot, "ctrl+q", "ctrl+q")
        assert isinstance(app.screen, LeaveScreen)
        assert "This console carries out 1 rollout" in shown(app)
        await press(app, pilot, "n")
        assert console.carrier.carried

        await press(app, pilot, "ctrl+q", "y")
        await until(lambda: not app.is_running or bool(app._exit_renderables), pilot)
        message = str(app._exit_renderables[0])
    view = await Console(tmp_path).carrier.read(uid)

    assert message == f"rollout {NAME} is paused; to go on: glowplug rollout resume {NAME}"
    assert view is not None
    assert (view.state.phase, view.state.reason, view.holder) == (Phase.PAUSED, "interrupted", None)


async def test_a_console_that_ends_otherwise_pauses_it_too(tmp_path: Path) -> None:
    """By a signal, or with its terminal gone."""
    async with real(tmp_path) as (app, _, console):
        console.effects.held = {e.StartNode}
        uid = await console.start()
        app.exit(130)
    view = await Console(tmp_path).carrier.read(uid)

    assert view is not None
    assert (view.state.phase, view.holder) == (Phase.PAUSED, None)


async def test_in_read_only_mode_it_is_shown_and_no_key_acts(tmp_path: Path) -> None:
    """Another console's rollout; the keys are not even offered."""
    async with running(scenes.fleet(), rollouts=FakeRollouts([view()]), read_only=True) as (app, pilot):
        await press(app, pilot, "o", "P", "x", "n", "down", "r", "s")

        assert screen_of(app).board.selected == "gpu-eu-03"
        assert "read only" in shown(app)
        assert "P pauses" not in shown(app)
        for work in (app.rollouts.ask(UID, "pause", {}), app.rollouts.start(None)):  # type: ignore[arg-type]
            with pytest.raises(Exception, match="read-only"):
                await work


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
async def test_a_long_plan_leaves_the_note_and_the_buttons_in_view(size: tuple[int, int]) -> None:
    """What is asked of many lines scrolls; whether to do it, and what that means, does not."""
    async with opened(FakeRollouts([view()]), size) as (app, pilot):
        lines = [((f"line {number}", "text"),) for number in range(60)]
        app.push_screen(
            ConfirmScreen("Start?", lines, "Start it", note=f"{'It is said here. ' * 6}Quitting pauses it.")
        )
        await settle(app, pilot)

        for text in ("Start?", "line 0", "Quitting pauses it.", "Go back", "Start it"):
            assert text in shown(app), text
        items = app.screen.query_one("#items")
        assert items.can_focus
        assert items.max_scroll_y > 0
        await pilot.resize_terminal(120, 90)
        await see("line 59", app, pilot)
        assert not items.can_focus


async def test_what_is_longer_than_a_dialog_widens_it_and_is_wrapped_where_there_is_no_more_room() -> None:
    """Nothing of a plan is cut, at any width; a short one leaves the dialog as it is."""
    long = "  hook shift: glowplug hook haproxy shift --server llama/gpu-1 --step-s 2 (1 min 00 s at most)"
    async with opened(FakeRollouts([view()])) as (app, pilot):
        app.push_screen(ConfirmScreen("Start?", [((long, "text"),)], "Start it"))
        await settle(app, pilot)
        assert long in shown(app)
        for width, height in ((80, 24), (60, 20)):
            await pilot.resize_terminal(width, height)
            await settle(app, pilot)
            words = " ".join(" ".join(lines_of(app, "#items")).split())
            assert words == long.strip()
            assert "at most)" in shown(app)
            assert "Start it" in shown(app)
        app.pop_screen()
        await pilot.resize_terminal(120, 40)
        app.push_screen(ConfirmScreen("Start?", [(("short", "text"),)], "Start it"))
        await settle(app, pilot)
        assert app.screen.query_one(".dialog").outer_size.width == LEAST_CELLS
