"""A park child from its start to its report: the process that has the driver park or unpark a worker."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from remote_agent.agentd.workers import SpawnError, Worker, Workers
from remote_agent.errors import AgentError, RefusedError
from remote_agent.protocol.internal import InternalMessage, ParkGo, ParkJob, ParkReady, ParkReport
from remote_agent.protocol.messages import Failure

READY_S = 60.0
"""How long a child may take to import the bindings and to ask the driver."""

DRIVER_S = 60.0
DRIVER_BYTES_S = 200e6
"""How long the driver may take: this, and a second more for so many bytes; it was seen to move ten times as many."""


class ParkChildError(AgentError):
    """A park child ended without a report, or does not answer: ``is_hung``."""

    def __init__(self, text: str, is_hung: bool) -> None:
        super().__init__(text)
        self.is_hung = is_hung


class ParkChild:
    """One child and its one job; `end` it whatever happens."""

    def __init__(self, workers: Workers, worker: Worker, action: Literal["park", "unpark"]) -> None:
        """Start it on the Python of the worker's run. Raises: RefusedError if it can't be started."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._report: asyncio.Future[ParkReport] = loop.create_future()
        try:
            self._child, self._channel = workers.start_park(worker.order, self._hear)
        except SpawnError as error:
            raise RefusedError("cannot_park", str(error)) from error
        self._channel.send(ParkJob(worker.child.pid, action))

    async def until_ready(self) -> None:
        """Return once the driver says that it can; nothing was touched then.

        Raises: RefusedError with the driver's reason
        """
        try:
            await self._wait(READY_S, self._ready)
        except ParkChildError as error:
            raise RefusedError("cannot_park", str(error)) from error
        if not self._ready.done():
            failure = self._report.result().failure or Failure("cannot_park", "the park child gives no reason")
            raise RefusedError(failure.code, failure.detail)

    def go(self) -> None:
        """Let it have the driver do it."""
        self._channel.send(ParkGo())

    async def report(self, size_bytes: int) -> ParkReport:
        """Return how the process was left, of which the driver moves ``size_bytes``. Raises: ParkChildError"""
        await self._wait(READY_S + DRIVER_S + size_bytes / DRIVER_BYTES_S)
        return self._report.result()

    async def end(self) -> None:
        """End it, if it has not ended."""
        await self._child.end(term_s=0.0)

    def _hear(self, message: InternalMessage) -> None:
        if isinstance(message, ParkReady) and not self._ready.done():
            self._ready.set_result(None)
        elif isinstance(message, ParkReport) and not self._report.done():
            self._report.set_result(message)

    async def _wait(self, limit_s: float, *further: asyncio.Future[None]) -> None:
        awaited: set[asyncio.Future[Any]] = {self._report, self._child.exit, *further}
        await asyncio.wait(awaited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if self._report.done() or any(one.done() for one in further):
            return
        if self._child.is_alive:
            raise ParkChildError(f"the driver did not answer within {limit_s:.0f} s", True)
        raise ParkChildError(f"the park child {self._child.describe_exit()} without a report", False)
