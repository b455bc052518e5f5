"""Time and places that a login holds, and lets go of while a person is asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Patience:
    """A time limit that does not run while a person is asked; `over` is done once it is used up."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._left_s, self._pauses = timeout_s, 0
        self._timer: asyncio.TimerHandle | None = None
        self._run()

    def _run(self) -> None:
        self._since_s = self._loop.time()
        self._timer = self._loop.call_later(max(0.0, self._left_s), self._end)

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the time inside."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._left_s = None, self._left_s - (self._loop.time() - self._since_s)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses and not self.over.done():
                self._run()

    def close(self) -> None:
        """Stop it for good."""
        if self._timer is not None:
            self._timer.cancel()
        self.over.cancel()


class Place:
    """One of a semaphore's places: given back once, at the end or before."""

    def __init__(self, semaphore: asyncio.Semaphore | None) -> None:
        self._semaphore, self._is_held = semaphore, False

    async def __aenter__(self) -> Place:
        if self._semaphore is not None:
            await self._semaphore.acquire()
            self._is_held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        if self._is_held and self._semaphore is not None:
            self._is_held = False
            self._semaphore.release()
