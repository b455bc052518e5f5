"""What a login holds: time that stands still while a person is asked, places that are given back once."""

from __future__ import annotations

import asyncio

import pytest

from console.transports.base import TimedOut, bounded_by
from console.transports.patience import Patience, Place


async def test_time_does_not_run_out_while_somebody_is_asked() -> None:
    """However often at once; it goes on with what was left."""
    patience = Patience(0.0)
    with patience.paused():
        with patience.paused():
            for _ in range(10):
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not patience.over.done()

    with pytest.raises(TimedOut, match="no answer within 0 s"):
        await bounded_by(asyncio.Event().wait(), patience)


async def test_time_that_was_stopped_for_good_does_not_run_again() -> None:
    """Also where that happens while somebody is asked."""
    patience = Patience(0.0)
    with patience.paused():
        patience.close()
    for _ in range(10):
        await asyncio.sleep(0)

    assert patience.over.cancelled()


async def test_a_place_is_given_back_once() -> None:
    """By whoever comes first; where there are none, nothing is held."""
    places = asyncio.Semaphore(1)
    async with Place(places) as place:
        assert places.locked()
        place.give_back()
        place.give_back()
        assert not places.locked()
        await places.acquire()
    assert places.locked()

    async with Place(None) as nothing:
        nothing.give_back()
