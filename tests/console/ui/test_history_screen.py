"""The history: newest first, a page at a time, the cursor on its run."""

from __future__ import annotations

from console.screens.history import PAGE, HistoryScreen
from console.screens.run import RunScreen
from console.widgets.history_row import read_page
from console.widgets.run_table import RunTable
from db.errors import DamagedError
from db.records import RunFilter, RunRow
from tests.console.ui import scenes
from tests.console.ui.driving import fake, fleet_screen, make_app, press, running, see, settle, shown, until
from tests.console.ui.fake_fleet import FakeFleet, FakeHistory, run_row, stage_rows
from tests.console.ui.scenes import MS


def history_screen(app: object) -> HistoryScreen:
    screen = app.screen  # type: ignore[attr-defined]
    assert isinstance(screen, HistoryScreen)
    return screen


async def test_runs_are_newest_first_with_what_lies_outside_marked() -> None:
    """The one that took four times as long, and the failure in words."""
    async with running(size=(160, 40)) as (app, pilot):
        await press(app, pilot, "h")
        text = shown(app)
        starts = [entry.run.started_ns for entry in history_screen(app).entries]

    assert starts == sorted(starts, reverse=True)
    assert "▲ +289 %" in text
    assert "compile: no kernel image for sm_90" in text
    assert "28 of 28 runs" in text


def test_an_armed_start_lies_far_from_no_full_one() -> None:
    """Its difference is to earlier armed starts; the first of them has none."""
    history = FakeHistory(
        (run_row(f"cc{index:010}", "gpu-eu-01", 100 - index, wall_ms, tier_to=tier_to), ())
        for index, (wall_ms, tier_to) in enumerate(
            [(3_560, "standby"), (250, "armed"), (240, "armed"), (3_000, "standby")]
        )
    )

    walls = [entry.baseline.wall_ns // MS if entry.baseline else None for entry in read_page(history, RunFilter())]

    assert walls == [3_560, 250, None, None]


async def test_a_run_that_was_unfinished_when_last_heard_of_is_unknown() -> None:
    """The history does not claim that it still runs."""
    async with running() as (app, pilot):
        await press(app, pilot, "h")

        assert "? unknown" in shown(app)
        assert "running" not in shown(app)


async def test_the_cursor_stays_on_its_run_when_newer_ones_arrive() -> None:
    """By uid; enter opens what was seen."""
    async with running() as (app, pilot):
        await press(app, pilot, "h", "down", "down", "down")
        wanted = history_screen(app).selected
        history = fake(app).history
        history.rows = [(run_row("new000000001", "gpu-eu-09", 0), stage_rows()), *history.rows]
        await press(app, pilot, "r")
        await settle(app, pilot)

        assert history_screen(app).entries[0].run.run_uid == "new000000001"
        assert history_screen(app).selected == wanted
        await press(app, pilot, "enter")
        assert isinstance(app.screen, RunScreen)
        assert app.screen.run_uid == wanted


async def test_a_run_that_ends_appears_by_itself() -> None:
    """Nobody has to reload."""
    async with running([scenes.loading("gpu-eu-02")]) as (app, pilot):
        await press(app, pilot, "h")
        history = fake(app).history
        history.rows = [(run_row("new000000001", "gpu-eu-02", 0), stage_rows()), *history.rows]
        fake(app).put(scenes.ready("gpu-eu-02", "7f3a12cd0002"))
        await settle(app, pilot)
        await settle(app, pilot)

        assert history_screen(app).entries[0].run.run_uid == "new000000001"


async def test_older_runs_are_read_when_the_cursor_nears_the_end() -> None:
    """Each of them once, also those that started at the same moment."""
    rows = [(run_row(f"run{index:09d}", "gpu-eu-01", index // 2), ()) for index in range(2 * PAGE + 17)]
    app = make_app()
    app.fleet = FakeFleet(scenes.fleet(), FakeHistory(rows))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(app, pilot)
        await press(app, pilot, "h")
        assert len(history_screen(app).entries) == PAGE

        while len(history_screen(app).entries) < len(rows):
            count = len(history_screen(app).entries)
            await press(app, pilot, "end")
            await until(lambda count=count: len(history_screen(app).entries) > count, pilot)

        uids = [entry.run.run_uid for entry in history_screen(app).entries]
        assert sorted(uids) == sorted(run.run_uid for run, _ in rows)


async def test_runs_are_filtered_by_node_recipe_and_state() -> None:
    """Escape leaves the field, then clears it, then the screen."""
    async with running() as (app, pilot):
        await press(app, pilot, "h", "slash", *"node:gpu-eu-03 state:failed", "enter")
        assert [entry.run.run_uid for entry in history_screen(app).entries] == ["bb0000000002"]

        await press(app, pilot, "escape")
        await settle(app, pilot)
        assert len(history_screen(app).entries) == 28
        await press(app, pilot, "escape")
        assert app.screen is fleet_screen(app)


async def test_a_wrong_filter_is_explained_and_changes_nothing() -> None:
    """The states that there are, by name."""
    async with running() as (app, pilot):
        await press(app, pilot, "h", "slash", *"state:odd", "enter")

        await see("states are queued, running, ready", app, pilot)
        assert len(history_screen(app).entries) == 28


async def test_a_filter_that_nothing_fits_says_so() -> None:
    """An empty table explains itself."""
    async with running() as (app, pilot):
        await press(app, pilot, "h", "slash", *"node:nowhere", "enter")

        assert "no run fits" in shown(app)
        await press(app, pilot, "enter")
        assert isinstance(app.screen, HistoryScreen)


async def test_a_history_that_can_not_be_read_is_said() -> None:
    """The app goes on."""

    class Broken(FakeHistory):
        def runs(self, wanted: RunFilter | None = None) -> tuple[RunRow, ...]:
            raise DamagedError("history.db is damaged")

    app = make_app()
    app.fleet = FakeFleet(scenes.fleet(), Broken())
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await settle(app, pilot)
        await press(app, pilot, "h")

        await see("history.db is damaged", app, pilot)


async def test_colours_of_the_table_follow_the_theme() -> None:
    """Rows are not stuck with the colours they were born with."""
    async with running() as (app, pilot):
        await press(app, pilot, "h")
        table = history_screen(app)._table
        before = table.get_row_at(0)[3].style
        app.theme = "glowplug-light"
        await settle(app, pilot)

        assert table.get_row_at(0)[3].style != before


async def test_what_is_read_while_the_screen_is_left_is_nobody_s() -> None:
    """Its table goes first, and with that the styles of rows; the console goes on."""
    async with running() as (app, pilot):
        await press(app, pilot, "h")
        screen = history_screen(app)
        await screen.query_one(RunTable).remove()
        screen._load()
        await settle(app, pilot)
        await press(app, pilot, "escape")

        assert app.screen is fleet_screen(app)
