"""The steps that take one standby off its GPU, and those that put it back.

A process that has others' memory mapped can't be restored, so the worker lets its weights go before the checkpoint
and has them from the keeper again after it; its addresses stay. What fails before the checkpoint leaves the standby
as it was. What can't be put back is *lost: reload*: its process is ended and the entry goes with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Literal, NoReturn, TypeVar

from remote_agent.agentd import hostfacts
from remote_agent.agentd.capacity import check_memory, device_memory
from remote_agent.agentd.holders import Held
from remote_agent.agentd.park_children import ParkChild, ParkChildError
from remote_agent.agentd.residents import Residents
from remote_agent.agentd.sampling import Sampler
from remote_agent.agentd.workers import NoAnswerError, Worker, Workers
from remote_agent.errors import RefusedError, StageError
from remote_agent.protocol.internal import (
    InternalMessage,
    ParkReport,
    WorkerMap,
    WorkerMapped,
    WorkerUnmap,
    WorkerUnmapped,
)
from remote_agent.protocol.messages import Failure, Tier

ANSWER_S = 30.0
"""How long a worker may take to unmap its weights, or to map them again and compare their checksum."""

Answer = TypeVar("Answer", WorkerUnmapped, WorkerMapped)


class StandbyLostError(RefusedError):
    """A standby can't be put back: it is gone, and the next run loads again."""

    def __init__(self, text: str) -> None:
        super().__init__("lost", text)


class Mover:
    """Moves one standby at a time, as it is told; who may be moved and when is `Parking`'s."""

    def __init__(self, residents: Residents, workers: Workers, sampler: Sampler) -> None:
        self._residents, self._workers, self._sampler = residents, workers, sampler
        self._children: set[ParkChild] = set()
        self._host_memory = asyncio.Lock()
        """Held while one process goes to the host's memory: what is left for the next is known only then."""

    async def park(self, held: Held, worker: Worker) -> Mapping[str, int]:
        """Take a standby off its device and return nanoseconds by step.

        Raises: RefusedError, and it is as it was; StandbyLostError
        """
        begun_ns, had_name = time.monotonic_ns(), held.resident.name is not None
        child = self._start(worker, "park")
        try:
            await child.until_ready()
            async with self._host_memory:
                unmapped = await self._ask(held, worker, WorkerUnmap(hostfacts.memory_room_bytes()), WorkerUnmapped)
                if unmapped.problem is not None:
                    raise RefusedError("cannot_park", unmapped.problem)
                child.go()
                report = await self._parked(worker, child, unmapped.device_bytes)
        finally:
            await self._end(child)
        if report.state == "running":
            await self._ask(held, worker, WorkerMap(), WorkerMapped)
            raise RefusedError("park_failed", _why(report))
        if report.state == "lost" or not worker.is_alive:
            await self.lose(held, worker, _why(report))
        if had_name and held.resident.name is None:
            await self.lose(held, worker, "the keeper let go of its weights meanwhile")
        steps = {**unmapped.steps, **report.steps, "park_ns": time.monotonic_ns() - begun_ns}
        self._residents.moved(held, Tier.PARKED, unmapped.device_bytes, steps)
        return steps

    async def unpark(self, held: Held, worker: Worker) -> Mapping[str, int]:
        """Put a standby back and return nanoseconds by step.

        Raises: RefusedError, and it is still parked; StandbyLostError
        """
        begun_ns = time.monotonic_ns()
        self._check_room(held)
        report = await self._put_back(worker, held.resident.host_bytes)
        if report.state == "parked":
            raise RefusedError("unpark_failed", _why(report))
        if report.state == "lost":
            await self.lose(held, worker, _why(report))
        mapped = await self._ask(held, worker, WorkerMap(), WorkerMapped)
        steps = {**report.steps, **mapped.steps, "unpark_ns": time.monotonic_ns() - begun_ns}
        self._residents.moved(held, Tier.STANDBY, 0, steps)
        return steps

    async def lose(self, held: Held, worker: Worker, reason: str) -> NoReturn:
        """End a standby that can't be used any more; what the keeper has of it stays there. Raises: StandbyLostError"""
        text = f"lost: reload: {reason}"
        await self._residents.end_lost(held, worker, text)
        raise StandbyLostError(text)

    async def stop(self) -> None:
        """End every park child; the processes that they moved are ended by whoever calls."""
        await asyncio.gather(*(child.end() for child in self._children))

    def _check_room(self, held: Held) -> None:
        """See that the device has room: a restore that fails for want of it can't be tried again.

        Raises: RefusedError ``no_memory``, naming who holds the memory
        """
        one = held.resident
        memory = device_memory(one.device, self._sampler.report, 0, self._residents.all())
        try:
            check_memory(one.device, one.host_bytes, memory)
        except StageError as error:
            raise RefusedError("no_memory", error.failure.detail) from error

    async def _parked(self, worker: Worker, child: ParkChild, size_bytes: int) -> ParkReport:
        """Return how a park ended. Where its child died nobody knows how far it came: the process is put back."""
        try:
            return await child.report(size_bytes)
        except ParkChildError as error:
            failure = Failure("park_failed", str(error))
            if error.is_hung:
                return ParkReport("lost", {}, failure)
        try:
            left = (await self._put_back(worker, size_bytes)).state
        except RefusedError:
            left = "lost"
        return ParkReport("running" if left == "running" else "lost", {}, failure)

    async def _put_back(self, worker: Worker, size_bytes: int) -> ParkReport:
        """Have the driver let a process run on, whatever state it is in. Raises: RefusedError if nothing was tried"""
        for is_last in (False, True):
            child = self._start(worker, "unpark")
            try:
                return await child.report(size_bytes)
            except ParkChildError as error:
                if is_last or error.is_hung:
                    return ParkReport("lost", {}, Failure("unpark_failed", str(error)))
            finally:
                await self._end(child)
        raise AssertionError

    async def _ask(self, held: Held, worker: Worker, question: InternalMessage, answer: type[Answer]) -> Answer:
        """Return what a worker answers; one that does not is lost. Raises: StandbyLostError"""
        try:
            return await worker.ask(question, answer, ANSWER_S)
        except NoAnswerError as error:
            await self.lose(held, worker, str(error))

    def _start(self, worker: Worker, action: Literal["park", "unpark"]) -> ParkChild:
        child = ParkChild(self._workers, worker, action)
        self._children.add(child)
        return child

    async def _end(self, child: ParkChild) -> None:
        await child.end()
        self._children.discard(child)


def _why(report: ParkReport) -> str:
    return report.failure.detail if report.failure else f"its driver says that the process is {report.state}"
