"""A number of places, first come first served; the number may change while they are used."""

from __future__ import annotations

import asyncio
from collections import deque

PARALLEL_MOST = 1000
"""Loads at one time that a configuration or a verb may ask for."""


class Places:
    """``async with places:`` holds one; lives on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._taken = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        """More places are given at once; with fewer, nobody is sent away."""
        self._limit = max(1, limit)
        self._give()

    @property
    def is_full(self) -> bool:
        """Whether who comes now has to wait."""
        return self._taken >= self._limit or any(not waiting.done() for waiting in self._queue)

    async def __aenter__(self) -> None:
        if not self.is_full:
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was given in the same moment
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._taken -= 1
        self._give()

    def _give(self) -> None:
        while self._queue and self._taken < self._limit:
            turn = self._queue.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
