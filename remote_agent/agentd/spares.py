"""Spare workers: forked while nothing runs and ready up to a context, one for each device that the last run used.

A spare holds no memory of its device. It knows no run and has no environment but its zygote's, so a recipe with
variables of its own never gets one. It holds the driver's device files, as every worker does.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from remote_agent.agentd.reaper import Reaper
from remote_agent.agentd.workers import Order, Worker, Workers
from remote_agent.agentd.zygotes import Zygote, ZygoteError, Zygotes, ZygoteTimes
from remote_agent.protocol.internal import InternalMessage, WorkerPrepare, WorkerPrepared

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Spare:
    worker: Worker
    zygote: Zygote
    overdue: asyncio.TimerHandle
    is_ready: bool = False


class Spares:
    """Keeps them. ``idle_s``: how long nothing must have run before any is forked; ``times``: how long one may take.

    ``log_descriptor``: where they print before they have a run.
    """

    def __init__(
        self, reaper: Reaper, workers: Workers, zygotes: Zygotes, log_descriptor: int, idle_s: float, times: ZygoteTimes
    ) -> None:
        self._reaper, self._workers, self._zygotes = reaper, workers, zygotes
        self._log_descriptor, self._idle_s, self._times = log_descriptor, idle_s, times
        self._wanted: dict[str, Order] = {}
        self._spares: dict[str, _Spare] = {}
        self._leaving: set[Worker] = set()
        self._due: asyncio.TimerHandle | None = None
        self._forking: asyncio.Task[None] | None = None
        self._forking_for: str | None = None
        self._is_idle = False
        zygotes.on_end = self._zygote_ended

    @property
    def pids(self) -> Mapping[str, int]:
        """Return the process of each device's, by what it is."""
        named = {f"spare {device}": spare for device, spare in self._spares.items() if spare.is_ready}
        named.update({f"coming spare {device}": one for device, one in self._spares.items() if not one.is_ready})
        return {name: spare.worker.child.pid for name, spare in named.items()}

    def expect(self, order: Order) -> None:
        """Say that a run has a worker that a zygote forked: another is to be ready for the next run there."""
        if order.recipe.environment:
            return
        if any(other.run_uid != order.run_uid for other in self._wanted.values()):
            self._wanted.clear()
        self._wanted[order.device] = order

    def agent_is_idle(self) -> None:
        """Have them ready soon, unless a run comes first."""
        self.agent_is_busy()
        self._is_idle = True
        self._due = asyncio.get_running_loop().call_later(self._idle_s, self._begin)

    def agent_is_busy(self) -> None:
        """Fork no further one: a zygote forks one process at a time, and the run's is next."""
        self._is_idle = False
        if self._due is not None:
            self._due.cancel()
            self._due = None

    async def take(self, order: Order) -> tuple[Worker, float] | None:
        """Return the one that waits on an order's device, if it is as good as one forked now, and the seconds in which
        it should begin a job.

        One that is still being forked or prepared counts: a new one would be ready later.
        """
        if order.recipe.environment or not order.recipe.needs_device:
            return None
        if self._forking is not None and self._forking_for == order.device:
            await asyncio.wait({self._forking})
        self._reaper.reap()  # one that has just ended is none
        spare = self._spares.get(order.device)
        if spare is None or not spare.worker.is_reachable:
            return None
        if self._zygotes.find(order.python) is not spare.zygote:
            self._let_go(order.device)
            return None
        self._remove(order.device)
        return spare.worker, self._times.fork_s if spare.is_ready else self._times.spare_s

    def lose(self, device: str) -> None:
        """End the one of a device that is not to be trusted, and have none there before the next run."""
        self._wanted.pop(device, None)
        self._let_go(device)

    async def end_all(self) -> bool:
        """End all of them, have none before the next run, and return whether they have gone."""
        self.agent_is_busy()
        self._wanted.clear()
        if self._forking is not None:
            self._forking.cancel()  # what it forks has not touched the driver yet, and ends with its socket
        for device in list(self._spares):
            self._let_go(device)
        stuck = await asyncio.gather(*(worker.kill() for worker in self._leaving))
        for reason in filter(None, stuck):
            log.error("a spare worker can't be ended: %s", reason)
        return not any(stuck)

    def _begin(self) -> None:
        self._due = None
        if self._forking is None:
            self._forking = asyncio.ensure_future(self._fork_missing())
            self._forking.add_done_callback(self._forked)

    def _forked(self, task: asyncio.Future[None]) -> None:
        self._forking = self._forking_for = None
        if not task.cancelled() and task.exception() is not None:
            log.error("no spare worker is kept ready: %r", task.exception())

    async def _fork_missing(self) -> None:
        for device in [device for device in self._spares if device not in self._wanted]:
            self._let_go(device)
        for device, order in list(self._wanted.items()):
            if not self._is_idle:
                return
            zygote, spare = self._zygotes.find(order.python), self._spares.get(device)
            if spare is not None and spare.zygote is zygote:
                continue
            self._let_go(device)
            if zygote is None:
                continue
            self._forking_for = device
            try:
                await self._fork(zygote, order)
            except (ZygoteError, OSError) as error:
                log.warning("no spare worker is kept ready on %s: %s", device, error)

    async def _fork(self, zygote: Zygote, order: Order) -> None:
        worker = await self._workers.fork_spare(zygote, order, self._log_descriptor)
        if self._wanted.get(order.device) is not order:
            worker.child.signal(signal.SIGKILL)
            return
        late = f"it is not ready within {self._times.spare_s:g} s"
        overdue = asyncio.get_running_loop().call_later(self._times.spare_s, self._failed, order.device, late)
        spare = self._spares[order.device] = _Spare(worker, zygote, overdue)
        worker.on_message = lambda _, message: self._heard(spare, message)
        worker.gone.add_done_callback(lambda gone: self._gone(spare, gone.result()))
        worker.send(WorkerPrepare(order.device, order.recipe.model.path))

    def _heard(self, spare: _Spare, message: InternalMessage) -> None:
        if isinstance(message, WorkerPrepared):
            if message.problem is not None:
                self._failed(spare.worker.order.device, message.problem)
                return
            spare.is_ready = True
            spare.overdue.cancel()

    def _failed(self, device: str, reason: str) -> None:
        log.warning("no spare worker is kept ready on %s: %s", device, reason)
        self._let_go(device)

    def _gone(self, spare: _Spare, how: str) -> None:
        device = spare.worker.order.device
        self._leaving.discard(spare.worker)
        if self._spares.get(device) is spare:
            self._remove(device)
            log.warning("the spare worker on %s %s", device, how)

    def _zygote_ended(self, zygote: Zygote) -> None:
        for device in [device for device, spare in self._spares.items() if spare.zygote is zygote]:
            self._let_go(device)

    def _let_go(self, device: str) -> None:
        worker = self._remove(device)
        if worker is not None and worker.is_alive:
            self._leaving.add(worker)
            worker.child.signal(signal.SIGKILL)

    def _remove(self, device: str) -> Worker | None:
        spare = self._spares.pop(device, None)
        if spare is None:
            return None
        spare.overdue.cancel()
        spare.worker.on_message = lambda worker, message: None
        return spare.worker
