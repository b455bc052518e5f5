"""One run: live, over, out of the history, or unknown because its node is out of reach."""

from __future__ import annotations

from dataclasses import replace

from console.screens.run import RunScreen
from console.widgets.line_view import LineView
from tests.console.ui import scenes
from tests.console.ui.driving import fake, fleet_screen, lines_of, make_app, press, running, settle, shown
from tests.console.ui.fake_fleet import Asked, FakeFleet, FakeHistory


async def test_a_run_under_way_is_drawn_against_the_previous_one() -> None:
    """Stages done, the one that runs with its bytes, those to come, and the events."""
    async with running() as (app, pilot):
        await press(app, pilot, "right", "enter")
        head, stages, log = (lines_of(app, f"#{name}") for name in ("head", "stages", "log"))

    assert "● running" in head[0]
    assert "1.11 s before" in head[0]
    assert any(line.startswith("weights") and "9.1/13.5 GB at 51.2 of 55.3 GB/s" in line for line in stages)
    assert any(line.startswith("first_request") and "▒" in line for line in stages)
    assert any("context done 0.27 s" in line for line in log)


async def test_the_screen_follows_the_run_to_its_end() -> None:
    """The same screen, without a key pressed."""
    async with running([scenes.loading("gpu-eu-02")]) as (app, pilot):
        await press(app, pilot, "enter")
        fake(app).put(scenes.ready("gpu-eu-02", "7f3a12cd0002"))
        await settle(app, pilot)

        assert "✔ ready  1.08 s" in shown(app)
        assert "unattributed" in shown(app)
        assert "answered The" in shown(app)


async def test_a_failed_run_shows_its_last_lines_and_what_to_do() -> None:
    """Detail first, then the host's own words."""
    async with running([scenes.failed("gpu-eu-03")]) as (app, pilot):
        await press(app, pilot, "enter")
        head = "\n".join(lines_of(app, "#head"))

    assert "compile: no kernel image for sm_90" in head
    assert "w on the fleet screen tries again  (kernel_image)" in head
    assert "RuntimeError: CUDA error" in head


async def test_a_run_whose_node_is_out_of_reach_is_unknown_with_the_reason() -> None:
    """Not failed, not still running."""
    async with running([scenes.silent("gpu-eu-06")]) as (app, pilot):
        await press(app, pilot, "enter")
        head = "\n".join(lines_of(app, "#head"))

    assert "? unknown" in head
    assert "the node is silent: no heartbeat for 34 s" in head
    assert "running" not in head


async def test_cancelling_a_run_asks_first_and_cancels_that_run_alone() -> None:
    """Other runs of the node go on."""
    other = scenes.run("7f3a12cdaaaa", scenes.RunState.RUNNING)
    state = scenes.loading("gpu-eu-02")
    async with running([replace(state, runs={**state.runs, other.run_uid: other})]) as (app, pilot):
        await press(app, pilot, "enter", "x")
        assert "Cancel 1 run on 1 node?" in shown(app)
        assert fake(app).asked == []

        await press(app, pilot, "y")

        assert fake(app).asked == [Asked("cancel", "gpu-eu-02", "7f3a12cd0002")]


async def test_releasing_a_run_asks_first() -> None:
    """What that run holds, nothing else."""
    async with running() as (app, pilot):
        await press(app, pilot, "enter", "R", "y")

        assert fake(app).asked == [Asked("release", "gpu-eu-01", "7f3a12cd0001")]


async def test_a_run_of_a_node_that_left_the_fleet_comes_out_of_the_history() -> None:
    """Waterfall, comparison and events as ever."""
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(app, pilot)
        app.push_screen(RunScreen("gpu-eu-05", "bb0000000001"))
        await settle(app, pilot)
        await settle(app, pilot)

        assert "✔ ready  4.39 s" in shown(app)
        assert "▲ +200 %" in shown(app)
        assert len(lines_of(app, "#log")) == 10
        assert app.screen.check_action("cancel", ()) is None


async def test_a_run_that_is_nowhere_says_so() -> None:
    """No empty screen, no crash."""
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(app, pilot)
        app.push_screen(RunScreen("gone", "nosuchrun000"))
        await settle(app, pilot)
        await settle(app, pilot)

        assert lines_of(app, "#head") == ["the history has no such run"]


async def test_details_show_every_figure_that_a_stage_reported() -> None:
    """In the units that their names give."""
    async with running() as (app, pilot):
        await press(app, pilot, "enter", "d")
        stages = "\n".join(lines_of(app, "#stages"))

    assert "read_ns 0.26 s" in stages
    assert "tensors 291" in stages


async def test_the_log_hides_where_there_is_no_room_and_shows_when_asked() -> None:
    """At twelve lines the stages come first."""
    async with running(size=(40, 12)) as (app, pilot):
        await press(app, pilot, "enter")
        assert not app.screen.query_one("#log").display

        await press(app, pilot, "l")
        assert app.screen.query_one("#log").display


async def test_a_history_that_can_not_be_read_is_said_and_the_live_run_stays() -> None:
    """The run is known from its node."""
    from db.errors import DamagedError

    class Broken(FakeHistory):
        def run(self, run_uid: str) -> None:
            raise DamagedError("history.db is damaged")

    app = make_app()
    fleet = FakeFleet([scenes.loading("gpu-eu-02")], Broken())
    app.fleet = fleet
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(app, pilot)
        await press(app, pilot, "enter")

        assert "● running" in shown(app)
        await press(app, pilot, "escape")
        assert app.screen is fleet_screen(app)


async def test_text_of_a_run_can_be_selected_with_the_mouse_and_copied() -> None:
    """Over SSH too: the terminal's clipboard gets it."""
    async with running() as (app, pilot):
        await press(app, pilot, "enter")
        await pilot.mouse_down("#log", offset=(11, 1))
        await pilot.hover("#log", offset=(21, 1))
        await pilot.mouse_up("#log", offset=(21, 1))
        await press(app, pilot, "ctrl+c")

        assert app.clipboard.strip() in " ".join(lines_of(app, "#log"))
        assert app.clipboard.strip()


async def test_a_view_whose_width_changes_is_composed_anew() -> None:
    """No event of the screen says so when only a part of it is laid out differently."""
    async with running([scenes.ready("gpu-eu-02")]) as (app, pilot):
        await press(app, pilot, "enter")
        screen = app.screen
        assert isinstance(screen, RunScreen)
        view = screen.query_one("#stages", LineView)
        wide = lines_of(app, "#stages")
        view.styles.width = 60
        await settle(app, pilot)
        assert max(map(len, wide)) > 57
        assert max(map(len, lines_of(app, "#stages"))) == 57  # 60, less padding and the scrollbar's place
