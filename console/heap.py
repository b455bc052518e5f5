"""Keeps the garbage collector from stalling the event loop, by collecting little at a time.

A full collection looks through every object that there is and frees what lies in circles, all at one stretch. After a
reconnect of 300 links that took more of the processor than a screen may stand still for (docs/reliability.md).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

CONNECTIONS_A_COLLECTION = 32
"""A lost SSH connection leaves about a hundred objects that hold each other."""

STEPS = 4
"""Of the event loop, after which what waited for a connection's end holds nothing of it any more."""


@contextmanager
def settled_heap() -> Iterator[None]:
    """Leave all objects of now out of collections until this ends: imports alone leave some hundred thousand."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def forget_frames(error: BaseException | None) -> None:
    """Keep an error without what its tracebacks hold: the connection that was lost, and all that hung on it.

    Links behind one bastion are told of its end by one and the same error.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Portions:
    """Where hundreds of connections end at one moment, lets go of them one after the other, and collects in between."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._count = 0

    async def let_go(self) -> None:
        """Wait for the moment at which a connection that is over may become garbage."""
        async with self._turn:
            for _ in range(STEPS):
                await asyncio.sleep(0)
            self._count += 1
            if self._count % CONNECTIONS_A_COLLECTION == 0:
                gc.collect()
