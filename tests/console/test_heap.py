"""Collections that take little at a time."""

from __future__ import annotations

import asyncio
import gc
import weakref

from console.heap import CONNECTIONS_A_COLLECTION, connection_over, settled_heap


class Circle:
    """Holds itself, as a lost connection and its channels do."""

    def __init__(self) -> None:
        self.own = self


def test_what_was_there_before_is_left_out_of_collections_for_a_while() -> None:
    """And given back at the end."""
    before = gc.get_freeze_count()
    with settled_heap():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0


async def test_what_lost_connections_leave_is_collected_after_some() -> None:
    """Also what has grown old, which the interpreter itself would collect late and all at once."""
    circle = weakref.ref(Circle())
    gc.disable()
    try:
        for _ in range(CONNECTIONS_A_COLLECTION):
            connection_over()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    finally:
        gc.enable()

    assert circle() is None
