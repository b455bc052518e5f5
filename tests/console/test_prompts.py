"""The queue of questions: one at a time, shared, withdrawn, declined, asked again."""

from __future__ import annotations

import asyncio

import pytest

from console.errors import PromptDeclined
from console.prompts import Field, Prompt, PromptQueue
from tests.console.links import soon

PASSWORD = Prompt("gpu-1: password", fields=(Field("Password"),))
STOP = Prompt("gpu-1: stopped", ("Its host key has changed.",))


def ask(queue: PromptQueue, about: str, prompt: Prompt = PASSWORD, shared: bool = False) -> asyncio.Task[object]:
    return asyncio.ensure_future(queue.ask(prompt, about, shared=shared))  # type: ignore[return-value, arg-type]


async def test_questions_are_put_one_at_a_time_in_their_order() -> None:
    """Each answer goes to who asked."""
    queue = PromptQueue()
    first, second = ask(queue, "a"), ask(queue, "b")
    await soon(lambda: queue.waiting == 2, "both wait")
    for text in ("one", "two"):
        assert queue.current is not None
        queue.answer(queue.current, [text])

    assert (await first, await second) == (("one",), ("two",))
    assert queue.current is None


async def test_a_shared_question_is_put_once_to_all_who_ask() -> None:
    """One that isn't shared is put to each."""
    queue = PromptQueue()
    tasks = [ask(queue, "key", shared=True) for _ in range(300)]
    alone = [ask(queue, "password") for _ in range(2)]
    await soon(lambda: queue.waiting == 3, "one for all, two for two")
    assert queue.current is not None
    assert queue.current.askers == 300
    queue.answer(queue.current, ["open sesame"])

    assert await asyncio.gather(*tasks) == [("open sesame",)] * 300
    for task in alone:
        task.cancel()
    await asyncio.wait(alone)


async def test_a_question_is_withdrawn_when_nobody_waits_for_it() -> None:
    """The last one's leaving takes it away; an answer that comes too late is nobody's."""
    queue = PromptQueue()
    tasks = [ask(queue, "key", shared=True) for _ in range(2)]
    await soon(lambda: queue.waiting == 1, "asked")
    asked = queue.current
    assert asked is not None
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    assert queue.current is asked
    tasks[1].cancel()
    await asyncio.wait(tasks)

    assert queue.current is None
    queue.answer(asked, ["late"])
    queue.decline(asked)


async def test_what_was_declined_is_not_asked_again_until_somebody_wants_to_reconnect() -> None:
    """Whoever asks about the same fails at once, with the reason; other questions are put."""
    queue = PromptQueue()
    task = ask(queue, "a")
    await soon(lambda: queue.waiting == 1, "asked")
    queue.decline_all()
    with pytest.raises(PromptDeclined, match="gpu-1: password: it was asked for and not given; reconnecting asks"):
        await task
    with pytest.raises(PromptDeclined, match="asked for and not given"):
        await queue.ask(PASSWORD, "a")
    assert queue.current is None

    queue.reconsider()
    again = ask(queue, "a")
    await soon(lambda: queue.waiting == 1, "asked again")
    again.cancel()
    await asyncio.wait({again})


async def test_a_stop_is_shown_once_until_it_was_read() -> None:
    """And again after a person tried again."""
    queue = PromptQueue()
    for _ in range(2):
        queue.tell(STOP, "key")
    assert (queue.waiting, queue.current and queue.current.prompt) == (1, STOP)
    queue.decline_all()
    queue.tell(STOP, "key")
    assert queue.current is None

    queue.reconsider()
    queue.tell(STOP, "key")
    assert queue.waiting == 1
