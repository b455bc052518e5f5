"""Keeps the garbage collector from stalling the event loop, by collecting little at a time.

A full collection looks through every object that there is and frees what lies in circles, all at one stretch. After a
reconnect of 300 links that took more of the processor than a screen may stand still for (docs/reliability.md).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

CONNECTIONS_A_COLLECTION = 32
"""A lost SSH connection leaves about a hundred objects that hold each other."""

_over = itertools.count(1)


@contextmanager
def settled_heap() -> Iterator[None]:
    """Leave all objects of now out of collections until this ends: imports alone leave some hundred thousand."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def connection_over() -> None:
    """Note on the event loop that a connection was let go of; once there are some, what they leave is collected."""
    if next(_over) % CONNECTIONS_A_COLLECTION == 0:
        asyncio.get_running_loop().call_soon(gc.collect)
