"""What a login asks, on screen: one question at a time, masked, never in the way of other typing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot
from textual.widgets import Button, Input

from console.app import GlowplugApp
from console.errors import PromptDeclined
from console.prompts import Prompt, PromptQueue
from console.screens.prompt import AnswerInput, PromptScreen
from tests.console.ui import scenes
from tests.console.ui.asking import FACTORS, HOST_KEY, PASSWORD, STOP
from tests.console.ui.driving import fake, fleet_screen, press, running, see, settle, shown


@asynccontextmanager
async def asking(
    *prompts: Prompt, size: tuple[int, int] = (100, 30)
) -> AsyncIterator[tuple[GlowplugApp, Pilot[int], PromptQueue, list[asyncio.Task[tuple[str, ...]]]]]:
    """A running app in which logins ask; the tasks are theirs."""
    queue = PromptQueue()
    async with running([scenes.cold("gpu-1")], size=size, prompts=queue) as (app, pilot):
        tasks = [asyncio.ensure_future(queue.ask(prompt, index)) for index, prompt in enumerate(prompts)]
        await pilot.pause()
        await settle(app, pilot)
        try:
            yield app, pilot, queue, tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_questions_come_one_after_the_other_with_their_number() -> None:
    """Each answer goes to who asked; then the fleet is back."""
    async with asking(HOST_KEY, PASSWORD, FACTORS) as (app, pilot, queue, tasks):
        assert "gpu-1: unknown host key" in shown(app)
        assert "2 more waiting" in shown(app)
        await press(app, pilot, *"yes", "enter")
        assert await tasks[0] == ("yes",)

        await see("gpu-1: password", app, pilot)
        await press(app, pilot, *"s3c")
        assert "s3c" not in shown(app)
        await press(app, pilot, "enter")
        assert await tasks[1] == ("s3c",)

        await see("on the way to gpu-1: the server asks", app, pilot)
        await press(app, pilot, *"12", "enter", *"x", "enter")
        assert await tasks[2] == ("12", "x")
        assert app.screen is fleet_screen(app)
        assert queue.current is None


async def test_the_server_s_words_are_marked_and_never_interpreted() -> None:
    """Ours come first; brackets are brackets."""
    async with asking(PASSWORD) as (app, _, _, _):
        text = shown(app)

        assert text.index("of ops at 10.0.0.1") < text.index("The server says") < text.index("Welcome [b]ops[/b]")


async def test_a_masked_answer_can_not_be_copied_and_is_gone_with_its_question() -> None:
    """Neither by keys nor from the screen, a picture of it, or what the widget keeps."""
    async with asking(PASSWORD) as (app, pilot, _, tasks):
        field = app.screen.query_one(AnswerInput)
        await press(app, pilot, *"s3c", "home", "shift+end", "ctrl+c", "ctrl+x", "super+c")
        assert (app.clipboard, field.value) == ("", "s3c")
        assert "s3c" not in app.export_screenshot()
        await press(app, pilot, "enter")

        assert await tasks[0] == ("s3c",)
        assert field.value == ""


async def test_escape_declines_and_one_key_declines_all() -> None:
    """The logins fail; nothing else is done."""
    async with asking(PASSWORD, HOST_KEY, FACTORS) as (app, pilot, _, tasks):
        await press(app, pilot, "escape")
        with pytest.raises(PromptDeclined):
            await tasks[0]
        await see("unknown host key", app, pilot)
        await press(app, pilot, "ctrl+g")
        for task in tasks[1:]:
            with pytest.raises(PromptDeclined):
                await task

        assert app.screen is fleet_screen(app)


async def test_a_stop_has_nothing_to_accept() -> None:
    """It can be read and closed; enter closes it."""
    async with asking() as (app, pilot, queue, _):
        queue.tell(STOP, "stop")
        await settle(app, pilot)
        assert "the host key of 10.0.0.1 port 22 has changed." in shown(app)
        assert not app.screen.query(Input)
        assert [str(each.label) for each in app.screen.query(Button) if each.display] == ["Close"]
        await press(app, pilot, "enter")

        assert (app.screen, queue.current) == (fleet_screen(app), None)


async def test_a_question_that_is_withdrawn_stays_until_it_is_closed() -> None:
    """Keys that were meant for it do nothing to the fleet below."""
    async with asking(PASSWORD) as (app, pilot, queue, tasks):
        tasks[0].cancel()
        await asyncio.wait(tasks)
        await settle(app, pilot)
        assert "No longer asked" in shown(app)
        await press(app, pilot, *"xyRy", "enter")
        assert isinstance(app.screen, PromptScreen)
        assert fake(app).asked == []
        await press(app, pilot, "escape")

        assert (app.screen, queue.current) == (fleet_screen(app), None)


async def test_no_question_comes_into_a_dialog_or_into_typing() -> None:
    """It is said that one waits, and it comes once the way is free."""
    async with asking() as (app, pilot, queue, tasks):
        await press(app, pilot, "slash")
        tasks.append(asyncio.ensure_future(queue.ask(PASSWORD, "a")))
        await press(app, pilot, *"eu")
        assert "a login waits for an answer" in shown(app)
        assert not isinstance(app.screen, PromptScreen)
        await press(app, pilot, "enter")

        await see("gpu-1: password", app, pilot)


@pytest.mark.parametrize("prompt", [HOST_KEY, PASSWORD, FACTORS], ids=["host key", "password", "factors"])
async def test_every_question_can_be_answered_in_a_small_terminal(prompt: Prompt) -> None:
    """In 40 by 12 the field that has the focus is seen, a key's fingerprint above it, and what else can be done."""
    async with asking(prompt, PASSWORD, size=(40, 12)) as (app, pilot, _, tasks):
        text = shown(app)
        assert "esc Cancel" in text
        assert prompt is not HOST_KEY or "k" * 20 in text
        assert "1 more waiting" in text
        for _ in prompt.fields:
            field = app.focused
            assert isinstance(field, AnswerInput)
            assert app.screen.find_widget(field).visible_region.height == 1
            await press(app, pilot, *"yes", "enter")

        assert await tasks[0] == ("yes",) * len(prompt.fields)
