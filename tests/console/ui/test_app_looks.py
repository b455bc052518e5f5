"""How the app looks: themes, without colour, in ASCII, at any size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.widgets import OptionList

from tests.console.ui.driving import (
    make_app,
    press,
    running,
    see,
    settle,
    shown,
    shown_lines,
    until,
)


async def test_our_themes_come_first_in_the_picker() -> None:
    """Dark, then light, then the others."""
    async with running() as (app, pilot):
        await press(app, pilot, "t")
        assert isinstance(app.screen, CommandPalette)
        await until(lambda: app.screen.query(OptionList).first().option_count > 5, pilot)
        options = app.screen.query(OptionList).first()

        names = [str(options.get_option_at_index(index).prompt).strip() for index in range(2)]
        assert names == ["glowplug-dark", "glowplug-light"]


async def test_a_chosen_theme_is_there_again_at_the_next_start(tmp_path: Path) -> None:
    """What else is in the file stays."""
    path = tmp_path / "state" / "preferences.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"keys": {"fleet.warm": "f5"}}))
    async with running(preferences=path) as (app, pilot):
        assert app.theme == "glowplug-dark"
        app.theme = "nord"
        await settle(app, pilot)

    assert json.loads(path.read_text()) == {"keys": {"fleet.warm": "f5"}, "theme": "nord"}
    assert make_app(preferences=path).theme == "nord"
    assert make_app(preferences=path, theme="glowplug-light").theme == "glowplug-light"


@pytest.mark.parametrize("content", ["", "[]", '{"theme": 3}', '{"theme": "no-such-theme"}', "\x00"])
def test_preferences_that_make_no_sense_are_as_none(tmp_path: Path, content: str) -> None:
    """A damaged file does not keep the console from starting."""
    path = tmp_path / "preferences.json"
    path.write_text(content)

    assert make_app(preferences=path).theme == "glowplug-dark"


async def test_a_theme_that_can_not_be_kept_is_said(tmp_path: Path) -> None:
    """It holds for now."""
    (tmp_path / "file").write_text("")
    async with running(preferences=tmp_path / "file" / "preferences.json") as (app, pilot):
        app.theme = "nord"

        await see("could not be kept", app, pilot)
        assert app.theme == "nord"


async def test_every_theme_draws_every_screen() -> None:
    """Also those that are not ours, with and without colour."""
    async with running() as (app, pilot):
        await press(app, pilot, "h")
        for name in app.available_themes:
            app.theme = name
            await pilot.pause()
            assert "✔ ready" in shown(app)


async def test_without_colour_failures_are_not_dimmer_than_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR leaves bold to carry them, and the selection its heavy frame."""
    monkeypatch.setenv("NO_COLOR", "1")
    app = make_app(ansi_color=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(app, pilot)
        lines = [list(strip) for strip in app.screen._compositor.render_strips()]
        for line_filter in app.get_line_filters():
            lines = [line_filter.apply(line, app.screen.styles.background) for line in lines]
        segments = [segment for line in lines for segment in line]
        failed = [segment for segment in segments if "✖ failed" in segment.text]
        ready = [segment for segment in segments if "✔ ready" in segment.text]

        assert failed
        assert all(segment.style and segment.style.bold and not segment.style.dim for segment in failed)
        assert ready
        colours = [segment.style.color for segment in [*failed, *ready] if segment.style]
        assert all(colour is None or colour.is_default for colour in colours)


@pytest.mark.parametrize(
    "keys",
    [(), ("g",), ("right", "enter"), ("w",), ("h",), ("question_mark",), ("right", "x"), ("slash", "e"), ("ctrl+p",)],
    ids=["grid", "list", "run", "launch", "history", "help", "confirm", "filter", "palette"],
)
async def test_ascii_mode_puts_nothing_but_ascii_on_screen(keys: tuple[str, ...]) -> None:
    """Every screen and dialog, its borders and scrollbars too."""
    async with running(ascii=True) as (app, pilot):
        await press(app, pilot, *keys)
        odd = {character for character in shown(app) if not character.isascii()}

    assert odd == set()


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_every_screen_can_be_used_at_any_size(size: tuple[int, int]) -> None:
    """The counts, the selected node and the way to start are in sight."""
    async with running(size=size) as (app, pilot):
        assert "✖" in shown_lines(app)[0]
        assert "gpu-eu-01" in shown(app)
        await press(app, pilot, "w")
        assert "Warm 1 node" in shown(app)
        assert "llama-7b" in shown(app)
        await press(app, pilot, "ctrl+s")
        assert "gpu-eu-01" in shown(app)
        assert "Go back" in shown(app)
        await press(app, pilot, "escape", "escape", "h")
        assert "Nov 29" in shown(app)
        await press(app, pilot, "enter")
        assert "weights" in shown(app)
