"""Warm models that are held on this node, each by the worker that loaded it, and when they go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from remote_agent.agentd.events import EventLog
from remote_agent.agentd.workers import Worker
from remote_agent.errors import RefusedError
from remote_agent.protocol.internal import InternalMessage, WorkerFinding
from remote_agent.protocol.messages import Finding, Resident, ResidentChanged

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReuseKey:
    """What must be equal for a standby to serve a run again; its files are compared besides."""

    recipe_hash: str
    environment: tuple[tuple[str, str], ...]
    python: tuple[str, ...]
    device: str


@dataclass
class _Held:
    resident: Resident
    worker: Worker
    key: ReuseKey
    busy_with: str | None = None
    reason: str | None = None
    timer: asyncio.TimerHandle | None = None


class Residents:
    """Every standby of this node. Each appears and goes with one event, whatever ended it."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._held: dict[Worker, _Held] = {}
        self._releases: set[asyncio.Task[None]] = set()

    def all(self) -> tuple[Resident, ...]:
        return tuple(held.resident for held in self._held.values())

    @property
    def pids(self) -> dict[str, int]:
        return {f"worker {h.resident.run_uid} {h.resident.device}": w.child.pid for w, h in self._held.items()}

    def hold(self, worker: Worker, key: ReuseKey, resident: Resident) -> None:
        """Take ``worker`` in as holder, anew or again after it served another run."""
        old = self._held.get(worker)
        if old is None:
            worker.gone.add_done_callback(lambda gone: self._gone(worker, gone.result()))
        else:
            self._tell_gone(old, f"taken over by run {resident.run_uid}")
        held = self._held[worker] = _Held(resident, worker, key)
        worker.on_message = self._heard
        self._events.emit(ResidentChanged(resident, "held"), resident.run_uid)
        self._arm(held)

    def find(self, key: ReuseKey) -> Worker | None:
        """Return an idle standby that fits."""
        fitting = (w for w, held in self._held.items() if held.key == key and not held.busy_with and w.is_alive)
        return next(fitting, None)

    def take(self, worker: Worker, run_uid: str) -> None:
        """Mark a standby as serving another run; its time to live stands still."""
        held = self._held[worker]
        held.busy_with = run_uid
        if held.timer is not None:
            held.timer.cancel()

    def give_back(self, worker: Worker) -> None:
        """Say that the run that took a standby did not touch it."""
        held = self._held.get(worker)
        if held is not None:
            held.busy_with = None
            self._arm(held)

    def blame(self, worker: Worker, reason: str) -> None:
        """Say why a holder will be gone, if it is one."""
        held = self._held.get(worker)
        if held is not None:
            held.reason = held.reason or reason

    async def replace(self, worker: Worker, reason: str) -> None:
        """Let one standby go and wait until it has."""
        held = self._held.get(worker)
        if held is not None:
            await self._release(held, reason)

    async def release(self, run_uid: str | None, reason: str) -> tuple[Resident, ...]:
        """Let the models of one run go, or all (None), and return those that went.

        Raises: RefusedError if there is none of that run, or a run is using one.
        """
        chosen = [held for held in self._held.values() if run_uid in (None, held.resident.run_uid)]
        if run_uid is not None and not chosen:
            raise RefusedError("no_such_resident", f"run {run_uid} holds nothing on this node")
        for held in chosen:
            if held.busy_with:
                raise RefusedError(
                    "busy", f"{held.resident.recipe} on {held.resident.device} serves run {held.busy_with}"
                )
        await asyncio.gather(*(self._release(held, reason) for held in chosen))
        return tuple(held.resident for held in chosen if held.worker not in self._held)

    async def end_all(self, reason: str) -> None:
        """End every holder, busy or not."""
        await asyncio.gather(*(self._release(held, reason) for held in list(self._held.values())))

    async def _release(self, held: _Held, reason: str) -> None:
        held.reason = held.reason or reason
        stuck = await held.worker.release()
        if stuck:
            self._events.emit(
                Finding("holder_stuck", "error", f"{held.resident.recipe}: {stuck}"), held.resident.run_uid
            )
        await asyncio.sleep(0)  # let what waits for the end of the worker hear of it

    def _arm(self, held: _Held) -> None:
        ttl_s = held.resident.ttl_s
        if ttl_s is not None:
            reason = f"its time to live of {ttl_s:g} s is over"
            held.timer = asyncio.get_running_loop().call_later(ttl_s, self._let_go, held, reason)

    def _heard(self, worker: Worker, message: InternalMessage) -> None:
        if isinstance(message, WorkerFinding):
            self._events.emit(message.finding, worker.order.run_uid)

    def _let_go(self, held: _Held, reason: str) -> None:
        task = asyncio.ensure_future(self._release(held, reason))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _gone(self, worker: Worker, how: str) -> None:
        held = self._held.pop(worker)
        self._tell_gone(held, held.reason or f"its worker {how}")

    def _tell_gone(self, held: _Held, reason: str) -> None:
        if held.timer is not None:
            held.timer.cancel()
        self._events.emit(ResidentChanged(held.resident, "gone", reason), held.resident.run_uid)


def explain(residents: Sequence[Resident]) -> str:
    """Return in words what is held, for a refusal."""
    return ", ".join(f"{resident.recipe} on {resident.device}" for resident in residents)
