"""What every transport gives: one stream of bytes to a node's agent, whatever carries it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from console.config_nodes import Node
from console.transports.patience import Patience

T = TypeVar("T")

READ_BYTES = 65536
WRITE_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 3.0

STARTING_UP = "a start-up file there may wait, read its input or start another shell (exec fish)"
"""What holds a command up before it begins, where the host says nothing at all."""


class Stream(Protocol):
    """Bytes to and from one host. Errors of the carrier end the stream and show in `exit_reason`."""

    async def read(self) -> bytes:
        """Return the bytes that are there, waiting for the first; ``b""`` once the stream has ended."""

    async def write(self, data: bytes) -> None:
        """Hand ``data`` on. Raises: LinkLost if the other side does not take it in time, or is gone."""

    async def close(self) -> None:
        """End the stream and free all that it held, within a few seconds whatever the other side does."""

    def abort(self) -> None:
        """End the stream at once; what `read` waits for ends too."""

    def exit_reason(self) -> str | None:
        """Return one cleaned line on why the stream ended, None where there is nothing to say."""


OpenStream = Callable[[Node, str], Awaitable[Stream]]
"""``(node, token) -> Stream``; raises LinkError."""


class TimedOut(Exception):
    """`bounded` gave up waiting."""


async def bounded(awaitable: Awaitable[T], timeout_s: float) -> T:
    """Return what ``awaitable`` gives within ``timeout_s``; what does not even end when cancelled is left behind.

    `asyncio.wait_for` waits for a cancelled task, and clean-up on a dead link can wait for ever.

    Raises: TimedOut.
    """
    patience = Patience(timeout_s)
    try:
        return await bounded_by(awaitable, patience)
    finally:
        patience.close()


async def bounded_by(awaitable: Awaitable[T], patience: Patience) -> T:
    """Return what ``awaitable`` gives before ``patience`` is over, as `bounded` does. Raises: TimedOut."""
    task = asyncio.ensure_future(awaitable)
    either: tuple[asyncio.Future[Any], ...] = (task, patience.over)
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _end(task)
        raise
    if task.done():
        return task.result()
    await _end(task)
    raise TimedOut(f"no answer within {patience.timeout_s:g} s")


async def unbroken(awaitable: Awaitable[T]) -> T:
    """Return what ``awaitable`` gives; when cancelled, let it end first. For clean-up that is bounded itself."""
    task = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def _end(task: asyncio.Future[T]) -> None:
    task.cancel()
    task.add_done_callback(_look_at)
    await asyncio.wait({task}, timeout=1.0)


def _look_at(task: asyncio.Future[T]) -> None:
    """Fetch an abandoned task's error, so that nobody complains that it was never fetched."""
    if not task.cancelled():
        task.exception()
