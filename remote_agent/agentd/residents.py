"""Warm models that are held on this node: by the worker that loaded each, by the keeper, or both; and when they go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace

from remote_agent.agentd.capacity import bytes_on
from remote_agent.agentd.events import EventLog
from remote_agent.agentd.holders import Held, Holders, ReuseKey
from remote_agent.agentd.keeping import ATTACHED_HINT, KeeperLink
from remote_agent.agentd.kept import Kept
from remote_agent.agentd.servers import Servers
from remote_agent.agentd.workers import Worker
from remote_agent.errors import KeeperError, RefusedError
from remote_agent.protocol.internal import InternalMessage, ShardIdentity, WorkerFinding, WorkerLetsGo
from remote_agent.protocol.messages import Finding, Resident, Tier

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""How long what is attached stays after its time to live, before it is looked at again."""

LOOK_S = 0.1
SETTLE_S = 2.0

VERIFYING = "verify"
"""In place of a run's uid: the standby is asked, and gives that to nobody else meanwhile."""


class Residents:
    """Every warm model of this node. Each appears and goes with one event, whatever ended it."""

    def __init__(self, events: EventLog, keeper: KeeperLink, servers: Servers) -> None:
        self._events, self._keeper, self._servers = events, keeper, servers
        self._holders = Holders(events)
        self._holders.servers_of = servers.of
        servers.on_change = self._servers_changed
        self.kept = Kept(self._holders, keeper, self._arm, self._orphaned)
        self._tasks: set[asyncio.Task[None]] = set()

    def all(self) -> tuple[Resident, ...]:
        return tuple(held.resident for held in self._holders)

    @property
    def held(self) -> tuple[Held, ...]:
        return tuple(self._holders)

    @property
    def pids(self) -> dict[str, int]:
        workers = [(held.resident, held.worker) for held in self._holders]
        return {f"worker {one.run_uid} {one.device}": w.child.pid for one, w in workers if w is not None}

    def hold(self, worker: Worker, key: ReuseKey, resident: Resident) -> None:
        """Take in what a run left warm: ``worker`` holds it, anew or again, or the keeper does, and the worker goes."""
        by = f"taken over by run {resident.run_uid}"
        known = self._holders.of_worker(worker)
        if known is not None:
            self._holders.remove(known, by)
        self._take_name(resident.name, by)
        if resident.tier is Tier.RESIDENT:
            held = Held(replace(resident, pid=None), order=worker.order)
            self._dismiss(worker, held)
        else:
            held = Held(resident, worker, key, worker.order)
            if known is None:
                worker.gone.add_done_callback(lambda gone: self._gone(worker, gone.result()))
            worker.on_message = self._heard
        self._holders.add(held)
        self._arm(held)

    def hold_nothing(self, worker: Worker, resident: Resident) -> None:
        """Let a worker go whose run left nothing that anybody has to hold."""
        self.blame(worker, f"run {resident.run_uid} left nothing with it")
        self._dismiss(worker, Held(resident))

    def find(self, key: ReuseKey) -> Worker | None:
        """Return an idle standby that fits and is to stay, one that is parked only where there is no other."""
        fitting = [held for held in self._holders if held.key == key and not (_is_busy(held) or held.reason)]
        workers = [held.worker for held in sorted(fitting, key=lambda held: held.is_off_device)]
        return next((worker for worker in workers if worker is not None and worker.is_alive), None)

    def of_worker(self, worker: Worker) -> Held:
        """Return the entry of a standby. Raises: KeyError if it is gone"""
        held = self._holders.of_worker(worker)
        if held is None:
            raise KeyError(worker.child.pid)
        return held

    def tier_of(self, worker: Worker) -> Tier | None:
        """Return what a worker holds, if anything."""
        held = self._holders.of_worker(worker)
        return None if held is None else held.resident.tier

    def coldest(self, workers: Iterable[Worker]) -> Tier | None:
        """Return the coldest of what workers hold; None where there are none, or one holds nothing."""
        tiers = [self.tier_of(worker) for worker in workers]
        known = [tier for tier in tiers if tier is not None]
        return min(known, key=list(Tier).index) if known and len(known) == len(tiers) else None

    def registered_bytes(self, shards: Sequence[ShardIdentity]) -> int:
        """Return how much of the host's memory workers keep registered of other files, each file's pages once."""
        workers = [(held.worker, held.resident) for held in self._holders]
        others = {worker.shards: one.bytes for worker, one in workers if worker is not None and one.tier is Tier.HOST}
        return sum(size_bytes for files, size_bytes in others.items() if files != tuple(shards))

    def take(self, worker: Worker, run_uid: str) -> None:
        """Mark a standby as serving another run; its time to live stands still."""
        held = self._holders.of_worker(worker)
        assert held is not None
        held.busy_with = run_uid
        if held.timer is not None:
            held.timer.cancel()

    def give_back(self, worker: Worker) -> None:
        """Say that the run that took a standby did not touch it."""
        held = self._holders.of_worker(worker)
        if held is not None:
            held.busy_with = None
            self._arm(held)

    def blame(self, worker: Worker, reason: str) -> None:
        """Say why a holder will be gone, if it is one."""
        held = self._holders.of_worker(worker)
        if held is not None:
            held.reason = held.reason or reason

    async def replace(self, worker: Worker, reason: str) -> None:
        """Let one standby go and wait until it has; what the keeper has of it goes unless it is attached."""
        held = self._holders.of_worker(worker)
        if held is None:
            return
        try:
            await self._release(held, reason)
        except RefusedError as refusal:
            self._tell_stale(held, reason, refusal)
            await self._end_worker(worker, held, reason)

    async def replace_stale(self, name: str, model: str, device: str, reason: str) -> None:
        """Let go what the keeper has of other files of the same model on that device, where nobody is attached."""
        for held in self._holders:
            one = held.resident
            is_stale = one.name not in (None, name) and (one.model, one.device) == (model, device)
            if is_stale and held.worker is None:
                try:
                    await self._release(held, reason)
                except RefusedError as refusal:
                    self._tell_stale(held, reason, refusal)

    def held_besides(self, run_uid: str) -> tuple[Resident, ...]:
        """Return what is held, but for what one run is using and takes over."""
        return tuple(held.resident for held in self._holders if held.busy_with != run_uid)

    def idle(self, device: str) -> tuple[Held, ...]:
        """Return what nobody is attached to there and no run uses, the least recently used first."""
        there = [held for held in self._holders if bytes_on(held.resident, device) and not _is_busy(held)]
        return tuple(sorted((held for held in there if not held.resident.attached), key=lambda held: held.used_wall_ns))

    async def let_go(self, held: Held, reason: str) -> bool:
        """Let one go that nobody is attached to, and return whether it went."""
        if _is_busy(held) or held not in self._holders:
            return False
        try:
            await self._release(held, reason)
        except RefusedError:
            return False  # somebody attached just now
        return held not in self._holders

    def lose(self, device: str, reason: str) -> None:
        """Drop everything on a device, attached or in use or not: its memory is not what it was."""
        self._background(self._servers.stop_device(device, reason))
        for held in self._holders:
            if held.resident.device == device:
                held.reason = held.reason or reason
                self._background(self._drop_for_good(held, reason))

    async def release(
        self, run_uid: str | None, reason: str, force: bool = False, wait_s: float = 0.0
    ) -> tuple[Resident, ...]:
        """Let the models of one run go, or all (None), and return those that went.

        Raises: RefusedError if there is none of that run, a run is using one, or one stays attached for
        ``wait_s`` and not ``force``; then nothing has gone.
        """
        await self.kept.settled.wait()
        chosen = list(self._holders) if run_uid is None else self.chosen(run_uid)
        for held in chosen:
            refuse_busy(held)
        if not force:
            await self._wait_until_free(chosen, wait_s, self._servers.pids.values())
            for held in chosen:
                refuse_busy(held)  # a run may have come meanwhile
        await self._servers.stop_of([held.resident.name for held in chosen], reason)
        if not force:
            await self._wait_until_free(chosen, SETTLE_S)  # the keeper hears of a process's end a moment later
        await asyncio.gather(*(self._release(held, reason, force) for held in chosen))
        return tuple(held.resident for held in chosen if held not in self._holders)

    def chosen(self, run_uid: str | None, name: str | None = None) -> list[Held]:
        """Return the entries of a run, or the one of that name. Raises: RefusedError if there is none"""
        by_name = self._holders.of_name(name)
        found = [held for held in self._holders if held.resident.run_uid == run_uid or held is by_name]
        if not found:
            who = f"run {run_uid} holds nothing" if run_uid is not None else f"nothing is warm as {name}"
            raise RefusedError("no_such_resident", f"{who} on this node")
        return found

    def moved(self, held: Held, tier: Tier, host_bytes: int, steps: Mapping[str, int]) -> None:
        """Tell that a standby was parked or put back."""
        self._holders.change(held, steps, tier=tier, host_bytes=host_bytes)

    async def end_lost(self, held: Held, worker: Worker, reason: str) -> None:
        """End a standby that can't be used any more. What the keeper has of it is a resident from now on."""
        held.is_moving = True
        await self._end_worker(worker, held, reason)

    async def stop_standbys(self, recipe: str, reason: str) -> tuple[Resident, ...]:
        """End the processes that hold a recipe or are armed for it; what the keeper has of it stays resident.

        Raises: RefusedError ``busy`` if one serves a run; then none has ended
        """
        chosen = [held for held in self._holders if held.worker is not None and held.resident.recipe == recipe]
        for held in chosen:
            refuse_busy(held)
        ends = [self._end_worker(held.worker, held, reason) for held in chosen if held.worker is not None]
        await asyncio.gather(*ends)
        return tuple(held.resident for held in chosen if held not in self._holders)

    async def end_all(self, reason: str) -> None:
        """End every worker that holds something, busy or not. What the keeper has stays there."""
        await asyncio.gather(
            *(self._end_worker(held.worker, held, reason) for held in self._holders if held.worker is not None)
        )

    async def _wait_until_free(self, chosen: Sequence[Held], wait_s: float, but: Collection[int] = ()) -> None:
        """Wait until nobody is attached ``but`` some. Raises: RefusedError if somebody is for longer than ``wait_s``"""
        give_up_s = time.monotonic() + wait_s
        while True:
            try:
                attached = {one.name: one.attached for one in await self._keeper.residents()}
            except KeeperError as error:
                raise RefusedError("keeper_silent", f"the keeper can't say who is attached: {error}") from error
            busy = [(held.resident.name, attached.get(held.resident.name or "", ())) for held in chosen]
            busy = [(name, tuple(pid for pid in pids if pid not in but)) for name, pids in busy]
            busy = [(name, pids) for name, pids in busy if pids]
            if not busy:
                return
            if time.monotonic() >= give_up_s:
                passed = f" after {wait_s:g} s" if wait_s else ""
                text = ", ".join(f"{name} is attached by {_processes(pids)}{passed}" for name, pids in busy)
                raise RefusedError("attached", f"{text}; {ATTACHED_HINT}")
            await asyncio.sleep(LOOK_S)

    async def _release(self, held: Held, reason: str, force: bool = False) -> None:
        """Let everything go that holds one model.

        Raises: RefusedError while it is attached, unless ``force``, and while it is being moved
        """
        if held.is_moving:
            raise RefusedError("busy", _describe_busy(held))
        before, held.reason = held.reason, held.reason or reason
        try:
            await self._drop(held, force)
        except RefusedError:
            held.reason = before
            raise
        if held.worker is not None:
            await self._end_worker(held.worker, held, reason)
        else:
            self._holders.remove(held, reason)

    async def _drop(self, held: Held, force: bool) -> None:
        name = held.resident.name
        if name is None:
            return
        try:
            await self._keeper.drop(name, force)
        except KeeperError as error:
            raise RefusedError("keeper_silent", f"{name}: the keeper does not let go: {error}") from error
        held.is_dropped = True

    def _dismiss(self, worker: Worker, held: Held) -> None:
        worker.on_message = lambda worker, message: None
        self._background(self._end_worker(worker, held))

    async def _end_worker(self, worker: Worker, held: Held, reason: str = "") -> None:
        held.reason = held.reason or reason or None
        stuck = await (worker.kill() if held.is_off_device else worker.release())
        if stuck:
            self._events.emit(
                Finding("holder_stuck", "error", f"{held.resident.recipe}: {stuck}"), held.resident.run_uid
            )
        await asyncio.sleep(0)  # let what waits for the end of the worker hear of it

    def _servers_changed(self, name: str) -> None:
        held = self._holders.of_name(name)
        if held is not None:
            self._holders.change(held)

    def _take_name(self, name: str | None, reason: str) -> None:
        """Let what stood for the keeper's ``name`` stand for it no longer."""
        known = self._holders.of_name(name)
        if known is None:
            return
        if known.worker is None:
            self._holders.remove(known, reason)
        else:
            self._holders.change(known, name=None, attached=0)

    def _arm(self, held: Held) -> None:
        ttl_s = held.resident.ttl_s
        if ttl_s is None:
            return
        left_s = ttl_s
        if held.worker is None:  # its time runs on while no agent does
            left_s = max(0.0, held.resident.since_wall_ns / 1e9 + ttl_s - time.time())
            left_s = min(ttl_s, left_s)  # a clock that was put back must not make it longer
        self._arm_in(left_s, held, f"its time to live of {ttl_s:g} s is over")

    def _arm_in(self, delay_s: float, held: Held, reason: str) -> None:
        if held.timer is not None:
            held.timer.cancel()
        held.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, held, reason)

    def _expire(self, held: Held, reason: str) -> None:
        self._background(self._let_go(held, reason))

    async def _let_go(self, held: Held, reason: str) -> None:
        try:
            refuse_busy(held)
            await self._release(held, reason)
        except RefusedError as refusal:
            log.info("%s, but %s", reason, refusal)
            if held in self._holders:
                self._arm_in(RETRY_S, held, reason)

    async def _drop_for_good(self, held: Held, reason: str) -> None:
        while held in self._holders:
            try:
                await self._release(held, reason, force=True)
            except RefusedError as refusal:
                log.error("%s: %s", reason, refusal)
                await asyncio.sleep(RETRY_S)

    def _tell_stale(self, held: Held, reason: str, refusal: RefusedError) -> None:
        finding = Finding("stale_resident", "warning", f"{reason}, but {refusal}")
        self._events.emit(finding, held.resident.run_uid)

    def _heard(self, worker: Worker, message: InternalMessage) -> None:
        if isinstance(message, WorkerFinding):
            self._events.emit(message.finding, worker.order.run_uid)
        elif isinstance(message, WorkerLetsGo):
            self.blame(worker, message.reason)

    def _orphaned(self, held: Held, reason: str) -> None:
        """End a parked standby whose weights are no more: nothing could be mapped into it again."""
        if held.worker is not None and held.resident.tier is Tier.PARKED:
            self._background(self._end_worker(held.worker, held, f"lost: reload: {reason}"))

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _gone(self, worker: Worker, how: str) -> None:
        """Take note that a standby has ended; what the keeper has of it is a resident from now on."""
        held = self._holders.of_worker(worker)
        if held is None:
            return
        self._holders.remove(held, f"its worker {how}")
        if held.resident.name is not None and not held.is_dropped:
            left = Held(replace(held.resident, tier=Tier.RESIDENT, pid=None, host_bytes=0), order=held.order)
            self._holders.add(left)
            self._arm(left)


def refuse_busy(held: Held) -> None:
    """Raises: RefusedError while an entry serves a run or is moved: it can't be let go or moved then"""
    if _is_busy(held):
        raise RefusedError("busy", _describe_busy(held))


def _describe_busy(held: Held) -> str:
    doing = f"serves run {held.busy_with}" if held.busy_with else "is being parked or unparked"
    doing = "answers verify" if held.busy_with == VERIFYING else doing
    return f"{held.resident.recipe} on {held.resident.device} {doing}"


def _is_busy(held: Held) -> bool:
    return held.busy_with is not None or held.is_moving


def _processes(pids: Sequence[int]) -> str:
    return f"{'process' if len(pids) == 1 else 'processes'} {', '.join(map(str, pids))}"
