"""Keys of lists that nothing of is to be seen: a terminal may be any size, and keys may come before a frame."""

from __future__ import annotations

import pytest
from textual.widgets import OptionList

from console.screens.choice import ChoiceScreen
from console.widgets.lists import ChoiceList, Palette
from tests.console.ui.driving import running, until

PAGES = ("pageup", "pagedown")


@pytest.mark.parametrize("key", PAGES)
async def test_a_page_of_the_palette_that_has_no_room_is_no_end_of_the_app(key: str) -> None:
    """It is still there, and goes away when asked to."""
    async with running(size=(20, 2)) as (app, pilot):
        await pilot.press("ctrl+p")
        await until(lambda: app.screen.query_one(OptionList).option_count > 1, pilot)
        await pilot.press("down", key)
        assert isinstance(app.screen, Palette)
        await pilot.press("escape")
        assert not isinstance(app.screen, Palette)


@pytest.mark.parametrize("action", ["page_up", "page_down"])
async def test_a_page_of_choices_that_were_not_drawn_yet_is_no_end_of_the_app(action: str) -> None:
    """Keys may come before a dialog's first frame."""
    async with running() as (app, _):
        choices = ChoiceList("first", "second")
        choices.highlighted = 1

        assert not await app.run_action(action, choices)
        assert choices.highlighted == 1


async def test_a_page_of_choices_goes_to_the_last_where_there_is_room() -> None:
    """As in any list."""
    async with running() as (app, pilot):
        chosen: list[str | None] = []
        app.push_screen(ChoiceScreen("Which?", [("a", "first"), ("b", "second")]), chosen.append)
        await pilot.pause()
        await pilot.press("pagedown", "enter")

    assert chosen == ["b"]
