"""The workers of one run: started together, failing together, ended together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from remote_agent.agentd.lifecycle import IllegalTransitionError
from remote_agent.agentd.park_moves import StandbyLostError
from remote_agent.agentd.paths import tail
from remote_agent.agentd.reaper import Child
from remote_agent.agentd.services import Services
from remote_agent.agentd.stages import StageBoard
from remote_agent.agentd.timeline import Figures
from remote_agent.agentd.workers import Order, SpawnError, Worker
from remote_agent.errors import StageError
from remote_agent.protocol.internal import (
    InternalMessage,
    ShardIdentity,
    WorkerFailed,
    WorkerFinding,
    WorkerGo,
    WorkerLostResident,
    WorkerMaps,
    WorkerPrepared,
    WorkerProgress,
    WorkerReady,
    WorkerStage,
)
from remote_agent.protocol.messages import Failure, Tier

log = logging.getLogger(__name__)


class Crew:
    """One worker a device. The first trouble of any of them is the run's."""

    def __init__(self, services: Services, board: StageBoard, run_uid: str) -> None:
        self._services, self._board, self._run_uid = services, board, run_uid
        self._workers: dict[str, Worker] = {}
        self._borrowed: dict[str, Worker] = {}
        self._ready: dict[str, WorkerReady] = {}
        self._mapped: dict[str, WorkerMaps] = {}
        self._loaded: set[str] = set()
        self._all_ready = asyncio.Event()
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> dict[str, int]:
        return {f"worker {self._run_uid} {device}": worker.child.pid for device, worker in self._workers.items()}

    def fail(self, error: StageError) -> None:
        """Let whatever is waited for end with ``error``; only the first counts."""
        if not self._trouble.done():
            self._trouble.set_exception(error)
            self._trouble.exception()  # there may be nobody who waits

    async def watch(self, *works: Coroutine[object, object, None]) -> None:
        """Do ``works`` side by side; the first error of one, or of a worker, ends them all and is raised."""
        tasks = [asyncio.ensure_future(work) for work in works]
        pending: set[asyncio.Future[None]] = set(tasks)
        try:
            while pending:
                done, _ = await asyncio.wait({*pending, self._trouble}, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    future.result()
                pending -= done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def start_worker(self, order: Order) -> None:
        """Start the worker of one device; what it reports goes to the run from then on. Raises: StageError"""
        asked_mono_ns = time.monotonic_ns()
        if order.recipe.needs_device:
            self._board.begin("init", order.device, asked_mono_ns)
        spare = await self._services.spares.take(order)
        if spare is not None and await self._begins(*spare, order, asked_mono_ns):
            worker, _ = spare
        else:
            try:
                worker = await self._services.workers.start(order, asked_mono_ns)
            except SpawnError as error:
                raise _not_started(error) from error
            self._enlist(worker)
        if order.recipe.needs_device and worker.zygote_reason is None:
            self._services.spares.expect(order)

    async def _begins(self, spare: Worker, limit_s: float, order: Order, asked_mono_ns: int) -> bool:
        """Give a spare the job and return whether it began that: one that died or hangs did nothing, and is ended.

        Raises: StageError
        """
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hear(worker: Worker, message: InternalMessage) -> None:
            if not isinstance(message, WorkerPrepared) and not begun.done():
                begun.set_result(None)
            self._heard(worker, message)

        self._workers[order.device] = spare
        spare.on_message = hear
        self._assign(spare, order, asked_mono_ns)
        awaited: set[asyncio.Future[Any]] = {begun, spare.gone}
        await asyncio.wait(awaited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if begun.done():
            self._enlist(spare)
            return True
        how = spare.gone.result() if spare.gone.done() else f"does not begin within {limit_s:g} s"
        log.warning("the spare worker on %s %s: run %s gets another", order.device, how, order.run_uid)
        spare.on_message = lambda worker, message: None
        await spare.kill()
        return False

    def _assign(self, worker: Worker, order: Order, asked_mono_ns: int) -> None:
        try:
            worker.assign(order, asked_mono_ns)
        except SpawnError as error:
            raise _not_started(error) from error

    def borrow(self, standbys: Mapping[str, Worker]) -> None:
        """Keep standbys for this run; none is touched yet."""
        for device, worker in standbys.items():
            self._services.residents.take(worker, self._run_uid)
            self._borrowed[device] = worker

    def has_standbys(self, shards: Sequence[ShardIdentity]) -> bool:
        """Return whether living standbys hold exactly these files."""
        return bool(self._borrowed) and all(_fits(worker, shards) for worker in self._borrowed.values())

    @property
    def parked(self) -> tuple[str, ...]:
        """The devices whose standby, kept for this run, is parked."""
        tier_of = self._services.residents.tier_of
        return tuple(device for device, worker in self._borrowed.items() if tier_of(worker) is Tier.PARKED)

    async def wake(self) -> str | None:
        """Put the parked ones back, as part of their ``context``; return why one of them is lost, if one is.

        Raises: StageError ``no_memory``
        """
        problems = await asyncio.gather(*(self._wake(device) for device in self.parked))
        return "; ".join(filter(None, problems)) or None

    async def _wake(self, device: str) -> str | None:
        self._board.begin("context", device)
        try:
            steps = await self._services.parking.wake(self._borrowed[device])
        except StandbyLostError as error:
            self._board.note("context", device, Figures(reason=str(error)))
            return str(error)
        self._board.note("context", device, Figures(reason="unparked", extra=steps))
        return None

    def tier_held(self, shards: Sequence[ShardIdentity]) -> Tier | None:
        """Return the coldest that living processes hold of exactly these files for this run, if anything."""
        return self._services.residents.coldest(self._borrowed.values()) if self.has_standbys(shards) else None

    async def use_standbys_or_start(self, orders: Sequence[Order], shards: Sequence[ShardIdentity]) -> None:
        """Give the standbys this run's job; those whose files are no longer these, or that are gone, are replaced.

        Raises: StageError
        """
        fitting = {device: worker for device, worker in self._borrowed.items() if _fits(worker, shards)}
        reason = f"its files changed: run {self._run_uid} loads them again"
        others = [worker for device, worker in self._borrowed.items() if device not in fitting]
        await self.watch(*(self._services.residents.replace(worker, reason) for worker in others))
        self._borrowed.clear()
        for order in orders:
            if order.device in fitting:
                self._enlist(fitting[order.device])
                self._assign(fitting[order.device], order, time.monotonic_ns())
        await self.watch(*(self.start_worker(order) for order in orders if order.device not in fitting))

    def send_go(self, shards: tuple[ShardIdentity, ...], residents: Mapping[str, str]) -> None:
        """Let every worker go on. ``residents``: by device, what the keeper calls these files' weights there."""
        kept, registered_bytes = self._services.residents.kept, self._services.residents.registered_bytes(shards)
        for device, worker in self._workers.items():
            name = residents[device]
            kept.expect(name, self._run_uid)
            worker.shards = shards
            worker.send(WorkerGo(shards, name, kept.has(name), registered_bytes))

    async def wait_ready(self) -> None:
        await self._all_ready.wait()

    @property
    def answers(self) -> tuple[WorkerReady, ...]:
        """What workers said when they were ready."""
        return tuple(self._ready.values())

    def hand_over(self) -> dict[str, tuple[Worker, WorkerReady]]:
        """Return the workers, which are ready: what becomes of them is the run's trouble no longer."""
        workers, self._workers = self._workers, {}
        return {device: (workers[device], message) for device, message in self._ready.items()}

    async def dismiss(self, also: Child | None) -> list[tuple[Child, str]]:
        """End every worker, and ``also``; return those that can't be ended, with the reason.

        Standbys that were not touched stay.
        """
        for worker in self._borrowed.values():
            self._services.residents.give_back(worker)
        for worker in self._workers.values():
            self._services.residents.blame(worker, f"run {self._run_uid}, which used it, ended without success")
        children = [worker.child for worker in self._workers.values()]
        children += [also] if also is not None else []
        reasons = await asyncio.gather(*(child.end() for child in children))
        return [(child, reason) for child, reason in zip(children, reasons, strict=True) if reason]

    def log_tail(self) -> tuple[str, ...]:
        return tuple(tail(self._services.store.stderr_path(self._run_uid)))

    def _enlist(self, worker: Worker) -> None:
        device = worker.order.device
        self._workers[device] = worker
        worker.on_message = self._heard
        worker.gone.add_done_callback(lambda gone: self._gone(device, worker, gone.result()))

    def _heard(self, worker: Worker, message: InternalMessage) -> None:
        device = worker.order.device
        try:
            self._take_in(device, worker, message)
        except (IllegalTransitionError, KeyError) as error:
            detail = f"the worker's report makes no sense: {error}"
            self.fail(StageError(Failure("worker_protocol", detail, self._board.current)))

    def _take_in(self, device: str, worker: Worker, message: InternalMessage) -> None:
        if isinstance(message, WorkerStage):
            self._board.from_worker(device, message, worker.zygote_reason)
            if message.stage == "weights" and message.status.is_over:
                self._loaded.add(device)
                if self._loaded == self._workers.keys():
                    self._services.gpu_locks.release(self._run_uid, has_loaded=True)
        elif isinstance(message, WorkerProgress):
            self._services.on_progress(self._board.progress(self._run_uid, device, message))
        elif isinstance(message, WorkerMaps):
            self._mapped[device] = message
        elif isinstance(message, WorkerFinding):
            self._services.events.emit(message.finding, self._run_uid)
        elif isinstance(message, WorkerLostResident):
            self._services.residents.kept.lost(message.resident, message.reason)
        elif isinstance(message, WorkerFailed):
            self.fail(StageError(message.failure))
        elif isinstance(message, WorkerReady):
            self._ready[device] = message
            if self._ready.keys() == self._workers.keys():
                self._all_ready.set()

    def _gone(self, device: str, worker: Worker, how: str) -> None:
        if self._workers.get(device) is not worker:
            return
        stage = self._board.current
        detail = f"the worker on {device} {how} during {stage}"
        mapped = self._mapped.get(device)
        if mapped is not None and mapped.stage == stage:
            detail += f"; the file it had mapped last is {mapped.path}"
        self.fail(StageError(Failure("worker_died", detail, stage)))


def _not_started(error: SpawnError) -> StageError:
    return StageError(Failure("worker_not_started", str(error), "init"))


def _fits(worker: Worker, shards: Sequence[ShardIdentity]) -> bool:
    return worker.is_alive and worker.shards == tuple(shards)
