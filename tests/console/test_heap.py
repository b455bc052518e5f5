"""Collections that take little at a time."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref

from console.heap import CONNECTIONS_A_COLLECTION, Portions, settled_heap


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
    """So many end at once, and yet no more than a portion of them is ever garbage."""
    portions, circles = Portions(), [Circle() for _ in range(3 * CONNECTIONS_A_COLLECTION)]
    left = [weakref.ref(circle) for circle in circles]
    most = 0

    async def end(circle: Circle) -> None:
        nonlocal most
        await portions.let_go()
        del circle
        # Garbage is held by itself alone, and here by the two that count.
        most = max(most, sum(1 for ref in left if (one := ref()) is not None and sys.getrefcount(one) == 3))

    gc.disable()
    try:
        ending = [asyncio.ensure_future(end(circles.pop())) for _ in left]
        await asyncio.gather(*ending)
    finally:
        gc.enable()

    assert CONNECTIONS_A_COLLECTION // 2 < most <= CONNECTIONS_A_COLLECTION + 1
