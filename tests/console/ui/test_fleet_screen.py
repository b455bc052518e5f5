"""The fleet screen: what is chosen stays chosen, what is done is exactly what was named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.app import GlowplugApp
from console.errors import HistoryError, NodeUnreachable
from console.rollout.others import Other
from console.screens.confirm import ConfirmScreen
from console.screens.rollout import RolloutScreen
from console.screens.run import RunScreen
from console.widgets.fleet_view import FleetView, Layout
from console.widgets.line_view import LineView
from console.widgets.paint import plain
from remote_agent.protocol.messages import RunState, Tier
from tests.console.ui import rollout_scenes, scenes
from tests.console.ui.driving import fake, fleet_screen, lines_of, press, running, see, settle, shown, shown_lines
from tests.console.ui.fake_fleet import Asked
from tests.console.ui.fake_rollouts import FakeRollouts

NAMES = tuple(state.name for state in scenes.fleet())


def dialog_lines(app: GlowplugApp) -> list[str]:
    assert isinstance(app.screen, ConfirmScreen)
    return [plain(line) for line in app.screen.query_one("#items", LineView).lines]


async def test_every_kind_of_node_is_seen_with_its_word() -> None:
    """Glyph and word, for each of them, on the first frame."""
    async with running() as (app, _):
        text = shown(app)

    for word in ("✔ ready", "● warming", "✖ failed", "○ cold", "? silent", "? disconnected", "◌ connecting"):
        assert word in text


async def test_the_selected_node_stays_selected_when_nodes_are_reordered() -> None:
    """And the key pressed next acts on it, not on what took its place."""
    async with running() as (app, pilot):
        await press(app, pilot, "right")
        assert fleet_screen(app).selection.selected == "gpu-eu-02"

        fake(app).reorder(reversed(NAMES))
        await settle(app, pilot)
        await press(app, pilot, "x", "y")

        assert fleet_screen(app).selection.selected == "gpu-eu-02"
        assert fake(app).asked == [Asked("cancel", "gpu-eu-02", "7f3a12cd0002")]


async def test_a_selected_node_that_leaves_the_filter_by_itself_stays_until_the_cursor_moves() -> None:
    """A run that ends just before the key is pressed does not make the key mean another node."""
    async with running() as (app, pilot):
        await press(app, pilot, "slash", *"state:warm", "enter")
        assert fleet_screen(app).selection.shown == ("gpu-eu-02", "gpu-eu-04", "gpu-eu-11")

        fake(app).put(scenes.ready("gpu-eu-02", "7f3a12cd0002"))
        await settle(app, pilot)
        selection = fleet_screen(app).selection
        assert (selection.selected, selection.shown) == ("gpu-eu-02", ("gpu-eu-02", "gpu-eu-04", "gpu-eu-11"))

        await press(app, pilot, "right")  # and a frame, in which what the cursor has left goes
        await press(app, pilot, "left")
        assert fleet_screen(app).selection.shown == ("gpu-eu-04", "gpu-eu-11")


async def test_the_dialog_names_every_target_also_those_a_filter_hides() -> None:
    """Marked nodes are the target; nothing is refused because of what is displayed."""
    async with running() as (app, pilot):
        await press(app, pilot, "right", "space", "right", "right", "space")
        await press(app, pilot, "slash", *"eu-02", "enter", "x")

        lines = dialog_lines(app)
        assert [line.split()[0] for line in lines] == ["gpu-eu-02", "gpu-eu-04"]
        assert "hidden by the filter" in lines[1]
        assert "Cancel 2 runs on 2 nodes?" in shown(app)
        await press(app, pilot, "y")

    assert [(asked.what, asked.node) for asked in fake(app).asked] == [("cancel", "gpu-eu-02"), ("cancel", "gpu-eu-04")]


async def test_what_is_cancelled_is_what_the_dialog_named_whatever_happens_meanwhile() -> None:
    """A run that starts behind the dialog is left alone."""
    async with running() as (app, pilot):
        await press(app, pilot, "right", "x")
        fake(app).put(scenes.loading("gpu-eu-02", "7f3a12cdffff"))
        await settle(app, pilot)
        await press(app, pilot, "y")

    assert fake(app).asked == [Asked("cancel", "gpu-eu-02", "7f3a12cd0002")]


@pytest.mark.parametrize("answer", ["enter", "escape", "n"])
async def test_cancelling_asks_first_and_the_way_back_has_the_focus(answer: str) -> None:
    """Enter alone, pressed out of habit, does nothing to a host."""
    async with running() as (app, pilot):
        await press(app, pilot, "right", "x", answer)

        assert fake(app).asked == []
        assert app.screen is fleet_screen(app)


async def test_releasing_asks_first_and_releases_run_by_run() -> None:
    """Exactly the models that were named."""
    async with running() as (app, pilot):
        await press(app, pilot, "R")
        assert dialog_lines(app) == ["gpu-eu-01  llama-7b  standby  13.5 GB"]
        await press(app, pilot, "y")

        assert fake(app).asked == [Asked("release", "gpu-eu-01", "7f3a12cd0001")]
        await see("1 warm model released", app, pilot)


async def test_parking_asks_first_and_the_way_back_is_there_once_it_is_parked() -> None:
    """Exactly the standbys that were named; what is warm on a node is named by its tier."""
    state = scenes.ready("gpu-eu-01")
    parked = tuple(replace(one, tier=Tier.PARKED) for one in state.residents or ())
    async with running([state]) as (app, pilot):
        screen = fleet_screen(app)
        assert (screen.check_action("park", ()), screen.check_action("unpark", ())) == (True, None)
        await press(app, pilot, "P")
        assert dialog_lines(app) == ["gpu-eu-01  llama-7b  standby  13.5 GB"]
        await press(app, pilot, "y")
        await see("1 standby parked", app, pilot)
        fake(app).put(replace(state, residents=parked))
        await see("parked", app, pilot)
        assert (screen.check_action("park", ()), screen.check_action("unpark", ())) == (None, True)
        await press(app, pilot, "U", "y")

        run_uid = parked[0].run_uid
        assert fake(app).asked == [Asked("park", "gpu-eu-01", run_uid), Asked("unpark", "gpu-eu-01", run_uid)]


async def test_an_error_of_a_host_is_told_with_its_node() -> None:
    """One line, and the app goes on."""
    async with running() as (app, pilot):
        fake(app).refuse["gpu-eu-02"] = NodeUnreachable("the link went away")
        await press(app, pilot, "right", "x", "y")

        await see("gpu-eu-02: the link went away", app, pilot)


async def test_actions_without_anything_to_act_on_are_dimmed() -> None:
    """Nothing runs on a ready node, nothing is warm on a loading one."""
    async with running() as (app, pilot):
        screen = fleet_screen(app)
        assert (screen.check_action("cancel", ()), screen.check_action("release", ())) == (None, True)

        await press(app, pilot, "right")

        assert (screen.check_action("cancel", ()), screen.check_action("release", ())) == (True, None)


async def test_the_mouse_selects_marks_and_opens_what_it_points_at() -> None:
    """Also after scrolling."""
    async with running(size=(120, 20)) as (app, pilot):
        await pilot.click(FleetView, offset=(50, 3))
        assert fleet_screen(app).selection.selected == "gpu-eu-02"

        await pilot.click(FleetView, offset=(90, 3), control=True)
        assert fleet_screen(app).selection.marked == {"gpu-eu-03"}

        fleet_screen(app).view.scroll_to(y=8, animate=False, immediate=True)
        await pilot.pause()
        await pilot.click(FleetView, offset=(5, 3))
        assert fleet_screen(app).selection.selected == "gpu-eu-04"

        await pilot.click(FleetView, offset=(5, 3), times=2)
        await settle(app, pilot)
        assert isinstance(app.screen, RunScreen)
        assert app.screen.run_uid == "7f3a12cd0003"


async def test_only_the_selected_panel_looks_selected_wherever_the_cursor_went() -> None:
    """The heavy frame is drawn once."""
    async with running() as (app, pilot):
        await press(app, pilot, "right", "down", "left", "up")

        assert shown(app).count("┏") == 1


async def test_the_cursor_follows_keys_in_grid_and_list() -> None:
    """Arrows keep the column in the grid; j and k go line by line in the list."""
    async with running() as (app, pilot):
        selection = fleet_screen(app).selection
        await press(app, pilot, "down")
        assert selection.selected == "gpu-eu-04"

        await press(app, pilot, "g", "j")
        assert fleet_screen(app).view.layout_kind is Layout.LIST
        assert selection.selected == "gpu-eu-05"

        await press(app, pilot, "end")
        assert selection.selected == "lab-01"
        await press(app, pilot, "home")
        assert selection.selected == "gpu-eu-01"


async def test_panels_keep_their_right_border_beside_the_scrollbar() -> None:
    """What was drawn before the fleet outgrew the screen is drawn anew for the width that is left."""
    few = [scenes.loading(f"node-{index}", f"run-{index:04d}-0000") for index in range(2)]
    more = [scenes.loading(f"more-{index}", f"run-{index:04d}-0001") for index in range(16)]
    async with running([*few, *more], size=(80, 24)) as (app, pilot):
        await press(app, pilot, "/", *"node", "enter")
        alone = shown_lines(app)[1]
        await press(app, pilot, "escape", "escape")
        beside = shown_lines(app)[1]

    assert (alone[-1], beside[-2]) == ("┐", "┐")
    assert "more" not in alone
    assert beside[-1] not in "┐─"


async def test_the_selected_node_is_brought_into_sight() -> None:
    """However far away it is."""
    async with running(size=(80, 24)) as (app, pilot):
        assert "lab-01" not in shown(app)
        await press(app, pilot, "end")

        assert "lab-01" in shown(app)


async def test_sorting_brings_what_needs_an_operator_to_the_top() -> None:
    """Failed first, ready last; the selection stays where it was, by name."""
    async with running() as (app, pilot):
        await press(app, pilot, "s")
        selection = fleet_screen(app).selection

        assert selection.shown[0] == "gpu-eu-03"
        assert selection.selected == "gpu-eu-01"


async def test_a_wrong_filter_is_said_and_the_last_good_one_stays() -> None:
    """Nothing disappears because of a typing error."""
    async with running() as (app, pilot):
        await press(app, pilot, "slash", *"colour:x")

        await see("colour: is not a key", app, pilot)
        assert app.screen is fleet_screen(app)


async def test_escape_leaves_the_filter_then_clears_it_then_unmarks() -> None:
    """One step at a time."""
    async with running() as (app, pilot):
        selection = fleet_screen(app).selection
        await press(app, pilot, "space", "slash", *"eu-02", "escape")
        assert selection.shown == ("gpu-eu-02",)

        await press(app, pilot, "escape")
        assert (len(selection.shown), selection.marked) == (12, {"gpu-eu-01"})

        await press(app, pilot, "escape")
        assert selection.marked == set()


async def test_a_paused_display_stands_still_and_says_so() -> None:
    """What happened meanwhile is shown on the way out of the pause; actions still see it as it is."""
    async with running() as (app, pilot):
        await press(app, pilot, "p")
        fake(app).put(scenes.failed("gpu-eu-01"))
        await settle(app, pilot)
        assert "PAUSED" in lines_of(app, "#header")[0]
        assert "✖ 1 failed" in shown(app)

        await press(app, pilot, "p")

        assert "PAUSED" not in shown(app)
        assert "✖ 2 failed" in shown(app)


async def test_frames_go_on_behind_a_dialog() -> None:
    """A question on screen stops no news."""
    async with running() as (app, pilot):
        await press(app, pilot, "right", "x")
        fake(app).put(scenes.failed("gpu-eu-01"))
        await settle(app, pilot)

        header = fleet_screen(app).query_one("#header", LineView)
        assert "✖ 2 failed" in plain(header.lines[0])


async def test_a_frame_draws_only_what_is_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand nodes that all change cost what a screenful costs."""
    states = [scenes.loading(f"node-{index:04d}", f"run-{index:04d}-0000") for index in range(1000)]
    async with running(states, size=(120, 40)) as (app, pilot):
        drawn: list[str] = []
        view = fleet_screen(app).view
        state_of = view._state_of
        monkeypatch.setattr(view, "_state_of", lambda name: (drawn.append(name), state_of(name))[1])

        for state in states:
            fake(app).put(state)
        await settle(app, pilot)

        assert drawn
        assert set(drawn) <= set(view.visible_names())


async def test_notices_of_the_fleet_stay_in_sight() -> None:
    """For as long as they hold."""
    async with running() as (app, pilot):
        fake(app).notices = ("the history was damaged and moved aside",)
        await settle(app, pilot)
        assert "the history was damaged and moved aside" in shown(app)

        fake(app).notices = ()
        await settle(app, pilot)
        assert "moved aside" not in shown(app)


async def test_a_fleet_without_nodes_says_how_to_get_some() -> None:
    """Every key is harmless then."""
    async with running([]) as (app, pilot):
        assert "glowplug config example" in shown(app)

        await press(app, pilot, "down", "space", "enter", "x", "R", "b", "r", "g", "s")
        assert fake(app).asked == []


async def test_a_node_without_a_run_says_so_when_opened() -> None:
    """No empty screen."""
    async with running([scenes.cold("eu-05")]) as (app, pilot):
        await press(app, pilot, "enter")

        await see("eu-05: no run yet", app, pilot)
        assert app.screen is fleet_screen(app)


async def test_reconnecting_reaches_only_nodes_whose_link_is_down() -> None:
    """The connected ones are left alone."""
    async with running() as (app, pilot):
        await press(app, pilot, "a", "r")

    retried = [asked.node for asked in fake(app).asked if asked.what == "retry"]
    assert retried == ["gpu-eu-06", "gpu-eu-07", "gpu-eu-08", "gpu-eu-09"]


async def test_copying_without_a_selection_copies_the_node_and_its_trouble() -> None:
    """Ready to be pasted into a message."""
    async with running() as (app, pilot):
        await press(app, pilot, "right", "right", "ctrl+c")

        assert app.clipboard == "gpu-eu-03: no kernel image for sm_90: torch 2.1 is built for sm_80"


async def test_a_run_that_goes_on_is_drawn_anew_each_frame() -> None:
    """Elapsed time moves by the clock alone."""
    now = scenes.NOW_MONO_NS
    async with running([scenes.loading("eu-02")]) as (app, pilot):
        app._clock_ns = lambda: now + 300 * scenes.MS
        await settle(app, pilot)

        assert "0.8 s of 1.1 s expected" in shown(app)


async def test_a_finished_run_of_a_cancelled_node_rests() -> None:
    """Cancelled is not failed."""
    state = scenes.node("eu", scenes.run("7f3a12cd0042", RunState.CANCELLED, wall_ns=scenes.S))
    async with running([replace(state, residents=())]) as (app, _):
        assert "○ cold" in shown(app)
        assert "cancelled after 1.00 s" in shown(app)


async def test_a_rollout_that_this_console_does_not_carry_out_is_said_with_its_key() -> None:
    """Which, its phase, that nobody is at it, how many nodes are out of traffic; the key shows that very one."""
    rollouts = FakeRollouts([rollout_scenes.view(holder=None)])
    rollouts.unfinished = (Other(rollout_scenes.UID, "eu-llama", "running", None, 2),)
    async with running(rollouts=rollouts) as (app, pilot):
        line = " ✖ rollout eu-llama: running, nobody carries it out, 2 nodes out of traffic  o shows it"
        assert lines_of(app, "#notices") == [line.ljust(120)]

        rollouts.unfinished = ()
        fleet_screen(app).read_rollouts()
        await settle(app, pilot)
        assert "eu-llama" not in shown(app)

        rollouts.unfinished = (Other(rollout_scenes.UID, "eu-llama", "running", rollout_scenes.ELSEWHERE, 0),)
        fleet_screen(app).read_rollouts()
        await see("● rollout eu-llama: running, carried out by build-7, process 4711  o shows it", app, pilot)
        await press(app, pilot, "o")
        assert isinstance(app.screen, RolloutScreen)
        assert app.screen.rollout_uid == rollout_scenes.UID


async def test_a_history_that_can_not_be_read_says_nothing_of_rollouts() -> None:
    """And the screen goes on."""
    rollouts = FakeRollouts()
    rollouts.unfinished = (Other(rollout_scenes.UID, "eu-llama", "paused", None, 0),)
    async with running(rollouts=rollouts) as (app, pilot):
        assert "rollout eu-llama: paused" in shown(app)
        rollouts.refuses = HistoryError("history.db is damaged")
        fleet_screen(app).read_rollouts()
        await settle(app, pilot)

        assert "eu-llama" not in shown(app)
        assert "✔ ready" in shown(app)
