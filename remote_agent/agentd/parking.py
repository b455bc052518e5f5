"""Which standbys may be parked and unparked, and when: one move at a time for each, and none while its device loads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping

from remote_agent.agentd.capacity import CPU, Slots
from remote_agent.agentd.gpu_locks import GpuLocks
from remote_agent.agentd.holders import Held
from remote_agent.agentd.park_moves import Mover, StandbyLostError
from remote_agent.agentd.residents import Residents, refuse_busy
from remote_agent.agentd.sampling import FRESH_LOOK_S, Sampler
from remote_agent.agentd.workers import Worker, Workers
from remote_agent.errors import RefusedError, StageError
from remote_agent.protocol.messages import Failure, ParkParams, ParkResult, Tier

log = logging.getLogger(__name__)

Move = Coroutine[object, object, Mapping[str, int]]


class Parking:
    """Parks and unparks for whoever asks. Who asks for a move that is under way waits for that one."""

    def __init__(
        self, residents: Residents, workers: Workers, slots: Slots, gpu_locks: GpuLocks, sampler: Sampler
    ) -> None:
        self._residents, self._slots, self._gpu_locks, self._sampler = residents, slots, gpu_locks, sampler
        self._mover = Mover(residents, workers, sampler)
        self._moves: dict[Held, tuple[Tier, asyncio.Task[Mapping[str, int]]]] = {}

    async def park(self, which: ParkParams) -> ParkResult:
        """Take standbys off their devices; those that are off stay so. Raises: RefusedError"""
        return await self._move_all(which, Tier.PARKED)

    async def unpark(self, which: ParkParams) -> ParkResult:
        """Put parked standbys back; those that are there stay so. Raises: RefusedError"""
        return await self._move_all(which, Tier.STANDBY)

    async def wake(self, worker: Worker) -> Mapping[str, int]:
        """Put a standby back for the run that has taken it and its device's slot; return nanoseconds by step.

        Raises: StageError ``no_memory``, and it stays parked; StandbyLostError for whatever else goes wrong
        """
        held = self._residents.of_worker(worker)
        try:
            return await asyncio.shield(self._begin(held, Tier.STANDBY, self._mover.unpark(held, worker)))
        except StandbyLostError:
            raise
        except RefusedError as refusal:
            if refusal.code == "no_memory":
                raise StageError(Failure("no_memory", str(refusal), "context")) from refusal
            await self._mover.lose(held, worker, str(refusal))

    async def stop(self) -> None:
        """End what moves standbys; their processes are ended by whoever calls."""
        await self._mover.stop()

    async def _move_all(self, which: ParkParams, tier: Tier) -> ParkResult:
        await self._residents.kept.settled.wait()
        chosen = self._residents.chosen(which.run_uid, which.name)
        moves = {held: self._join_or_begin(held, tier, worker) for held, worker in self._movable(chosen, tier)}
        # Shielded: a client that goes away leaves no process half parked.
        results = await asyncio.gather(*map(asyncio.shield, moves.values()), return_exceptions=True)
        steps: dict[str, Mapping[str, int]] = {}
        for held, result in zip(moves, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            steps[held.resident.device] = result
        return ParkResult(tuple(held.resident for held in chosen), steps)

    def _movable(self, chosen: list[Held], tier: Tier) -> list[tuple[Held, Worker]]:
        """Return those that are not there yet. Raises: RefusedError if one of them may not be moved"""
        found = []
        for held in chosen:
            one = held.resident
            what = f"{one.recipe} on {one.device}"
            if held.worker is None or one.tier not in (Tier.STANDBY, Tier.PARKED):
                raise RefusedError("not_a_standby", f"{what} is {one.tier.value}: only a standby can be parked")
            if one.device == CPU:
                text = f"{what} has nothing on a GPU: the driver parks processes on NVIDIA GPUs alone"
                raise RefusedError("unsupported", text)
            towards = self._moves[held][0] if held in self._moves else one.tier
            if towards is not tier:
                self._refuse_busy(held, what)
            if towards is not tier or held in self._moves:
                found.append((held, held.worker))
        return found

    def _refuse_busy(self, held: Held, what: str) -> None:
        refuse_busy(held)
        loading = self._slots.holders((held.resident.device,))
        if loading:
            raise RefusedError("busy", f"{what}: its device is taken by run {', '.join(loading)}")

    def _join_or_begin(self, held: Held, tier: Tier, worker: Worker) -> asyncio.Task[Mapping[str, int]]:
        if held in self._moves:
            return self._moves[held][1]
        return self._begin(held, tier, self._in_slot(held, tier, worker))

    def _begin(self, held: Held, tier: Tier, work: Move) -> asyncio.Task[Mapping[str, int]]:
        task = asyncio.ensure_future(work)
        held.is_moving, self._moves[held] = True, (tier, task)
        task.add_done_callback(lambda _: self._ended(held, task))
        return task

    def _ended(self, held: Held, task: asyncio.Task[Mapping[str, int]]) -> None:
        held.is_moving = False
        del self._moves[held]
        if not task.cancelled() and task.exception() is not None:  # there may be nobody left who waits for it
            log.info("%s on %s: %s", held.resident.recipe, held.resident.device, task.exception())

    async def _in_slot(self, held: Held, tier: Tier, worker: Worker) -> Mapping[str, int]:
        run_uid, devices = held.resident.run_uid, (held.resident.device,)
        who = f"{run_uid} (its standby on {devices[0]} is moved)"
        await self._slots.acquire(who, devices)
        try:
            if tier is Tier.PARKED:
                return await self._mover.park(held, worker)
            unchanged_mono_ns = await self._gpu_locks.take(who, devices, run_uid)
            await self._sampler.wait_newer(unchanged_mono_ns, FRESH_LOOK_S)
            return await self._mover.unpark(held, worker)
        finally:
            self._gpu_locks.release(who, has_loaded=True)
            self._slots.release(who)
