"""Waits end in time, and a cancel is never lost in one."""

from __future__ import annotations

import asyncio

import pytest

from remote_agent.agentd.waiting import within


async def test_an_answer_in_time_is_given() -> None:
    """And an error is raised as it is."""

    async def fail() -> None:
        raise OSError("gone")

    assert await within(30, asyncio.sleep(0, "answer")) == "answer"
    with pytest.raises(OSError, match="gone"):
        await within(30, fail())


async def test_what_is_late_has_ended_when_that_is_told() -> None:
    """Its own clean-up included."""
    ended: list[bool] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(asyncio.TimeoutError):
        await within(0.01, wait())
    assert ended == [True]


async def test_a_cancel_that_comes_with_the_answer_is_not_lost() -> None:
    """In whichever turn of the loop around it."""
    for turns in range(6):
        answer = asyncio.Event()
        waiting = asyncio.ensure_future(within(30, answer.wait()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answer.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        if waiting.done():
            break
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        pytest.fail("the answer never came")
