"""Waits that end in time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` gives within that time; it has ended when this returns or raises.

    A cancel that comes together with the answer is not lost, as `asyncio.wait_for` loses it before Python 3.12.
    Raises: asyncio.TimeoutError, and whatever ``work`` does.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if task.done():
            return task.result()
        raise asyncio.TimeoutError
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
