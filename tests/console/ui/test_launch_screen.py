"""Launching: exact nodes are named before anything starts, and what became of each start is seen."""

from __future__ import annotations

from console.errors import RequestRefused
from console.screens.confirm import ConfirmScreen
from console.screens.launch import LaunchScreen
from console.widgets.line_view import LineView
from console.widgets.node_choice import NodeChoice
from console.widgets.paint import plain
from tests.console.ui import scenes
from tests.console.ui.driving import fake, fleet_screen, lines_of, press, running, see, shown


def chosen_lines(app: object) -> list[str]:
    screen = app.screen  # type: ignore[attr-defined]
    assert isinstance(screen, ConfirmScreen)
    return [plain(line) for line in screen.query_one("#items", LineView).lines]


async def test_the_exact_nodes_and_their_number_are_named_before_anything_starts() -> None:
    """Enter on a recipe asks; only yes starts, on those nodes and no others."""
    async with running() as (app, pilot):
        await press(app, pilot, "space", "right", "right", "space", "w", "enter")
        assert "Warm llama-7b on 2 nodes, 2 at once?" in shown(app)
        assert chosen_lines(app) == ["gpu-eu-01", "gpu-eu-03"]
        assert fake(app).asked == []

        await press(app, pilot, "y")

        started = [(asked.what, asked.node, asked.recipe) for asked in fake(app).asked]
        assert started == [("warm", "gpu-eu-01", "llama-7b"), ("warm", "gpu-eu-03", "llama-7b")]
        await see("llama-7b starts on 2 nodes", app, pilot)
        assert app.screen is fleet_screen(app)


async def test_the_way_back_has_the_focus() -> None:
    """Two enters out of habit start nothing."""
    async with running() as (app, pilot):
        await press(app, pilot, "w", "enter", "enter")

        assert fake(app).asked == []
        assert isinstance(app.screen, LaunchScreen)


async def test_a_filter_hides_no_node_from_a_launch() -> None:
    """Every node of the fleet can be chosen, marked ones come first."""
    async with running() as (app, pilot):
        await press(app, pilot, "end", "space", "slash", *"eu-02", "enter", "w")
        nodes = app.screen.query_one(NodeChoice)

        assert nodes.option_count == 12
        assert nodes.chosen == {"lab-01"}
        assert "[x] lab-01" in shown(app)


async def test_nodes_are_taken_in_and_out_and_shown_so_without_colour() -> None:
    """A box with a cross in it, or without."""
    async with running() as (app, pilot):
        await press(app, pilot, "w", "tab", "down", "space")
        assert app.screen.query_one(NodeChoice).chosen == {"gpu-eu-01", "gpu-eu-02"}
        assert "[x] gpu-eu-02" in shown(app)
        await see("Warm 2 nodes…", app, pilot)

        await press(app, pilot, "ctrl+a")
        assert len(app.screen.query_one(NodeChoice).chosen) == 12
        await press(app, pilot, "ctrl+a", "ctrl+s")

        await see("choose a recipe and at least one node", app, pilot)


async def test_a_refused_start_is_told_beside_its_node_and_the_screen_stays() -> None:
    """The others have started all the same."""
    async with running() as (app, pilot):
        fake(app).refuse["gpu-eu-03"] = RequestRefused("busy", "device GPU-5a6f is held by paul")
        await press(app, pilot, "space", "right", "right", "space", "w", "enter", "y")

        assert isinstance(app.screen, LaunchScreen)
        outcomes = lines_of(app, "#outcomes")
        assert outcomes[0].startswith("● gpu-eu-01  run ")
        assert outcomes[1] == "✖ gpu-eu-03  device GPU-5a6f is held by paul"


async def test_how_many_load_at_once_is_the_operators() -> None:
    """The fleet is told; what is no number is refused."""
    async with running() as (app, pilot):
        await press(app, pilot, "w", "tab", "tab", "backspace", "2", "ctrl+s")
        assert "1 at once?" in shown(app)
        await press(app, pilot, "y")
        assert fake(app).parallel == 2

        await press(app, pilot, "w", "tab", "tab", "backspace", "ctrl+s")
        await see("at once: a number from 1 to 256", app, pilot)


async def test_a_recipe_is_told_in_full_before_it_is_chosen() -> None:
    """Model, devices, weights, request, hash."""
    async with running() as (app, pilot):
        await press(app, pilot, "w")
        assert "/models/llama-2-7b" in shown(app)

        await press(app, pilot, "down")

        assert "/models/all-minilm-l6-v2" in "\n".join(lines_of(app, "#recipe"))
        assert "not among this node's recipes" in shown(app)


async def test_a_node_that_changes_is_drawn_anew_in_the_list() -> None:
    """And stays chosen."""
    async with running([scenes.cold("eu-05")]) as (app, pilot):
        await press(app, pilot, "w")
        fake(app).put(scenes.silent("eu-05"))
        app.frame()
        await pilot.pause()

        assert "[x] eu-05  ? silent  no heartbeat for 34 s" in shown(app)


async def test_without_recipes_it_says_how_one_is_written() -> None:
    """And nothing can be started."""
    async with running() as (app, pilot):
        fake(app).config.recipes = {}
        await press(app, pilot, "w", "ctrl+s")

        assert "glowplug config example" in shown(app)
        assert fake(app).asked == []


async def test_escape_goes_back_to_the_fleet() -> None:
    """Nothing was started."""
    async with running() as (app, pilot):
        await press(app, pilot, "w", "escape")

        assert app.screen is fleet_screen(app)
