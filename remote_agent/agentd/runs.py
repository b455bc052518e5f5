"""One run from acceptance to its end: what happens in which order, and what each thing that goes wrong becomes.

`execute` always ends in a terminal state and one ``run.finished`` event; it is
never cancelled itself, only its work is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from remote_agent.agentd.capacity import CPU, needs_sampler, process_bytes, resolve_devices
from remote_agent.agentd.checking import Preflight, figures, found_tier, refuse_devices
from remote_agent.agentd.conclusion import resident_of, stuck, with_answers
from remote_agent.agentd.crew import Crew
from remote_agent.agentd.holders import reuse_key
from remote_agent.agentd.lifecycle import RunEvent, next_run_state
from remote_agent.agentd.reaper import Child
from remote_agent.agentd.room import Room
from remote_agent.agentd.sampling import FRESH_LOOK_S, probe_figures
from remote_agent.agentd.services import Services
from remote_agent.agentd.stages import WORKER_STAGES, StageBoard
from remote_agent.agentd.timeline import Timeline
from remote_agent.agentd.workers import Order, Worker
from remote_agent.errors import StageError
from remote_agent.protocol.budget import parse_budget
from remote_agent.protocol.internal import PreflightReport, ShardIdentity, WorkerGo
from remote_agent.protocol.messages import (
    Failure,
    Finding,
    RunAccepted,
    RunFinished,
    RunRecord,
    RunStarted,
    RunStartParams,
    RunState,
    StageChanged,
    StageRecord,
    Tier,
)
from remote_agent.recipe import recipe_hash
from remote_agent.resident.names import resident_name
from remote_agent.resident.stand_in import choose_chunk_bytes

log = logging.getLogger(__name__)

SAMPLER_PATIENCE_S = 30.0
PROBE_PATIENCE_S = 0.15


class Run:
    """An accepted run. `record` is what it is now; ``finished`` is set once that is final.

    With ``arm`` its workers make all but the weights, and wait for a run that brings those.
    """

    def __init__(self, services: Services, params: RunStartParams, arm: bool = False) -> None:
        self._services, self.params, self._recipe, self.arm = services, params, params.recipe, arm
        self._hash = recipe_hash(params.recipe)
        self._accepted_wall_ns = time.time_ns()
        timeline = Timeline(time.monotonic_ns(), self._recipe.stages)
        self._board = StageBoard(
            timeline, self._recipe.deadlines, self._stage_changed, lambda error: self._crew.fail(error)
        )
        self._crew = Crew(services, self._board, params.run_uid)
        self._state = RunState.QUEUED
        self._devices = self._devices_known_now()
        self._tier_from = self._tier_waiting()
        self._shards: tuple[ShardIdentity, ...] = ()
        self._preflight: Preflight | None = None
        self._found: PreflightReport | None = None
        self._work: asyncio.Future[None] | None = None
        self._stopped: tuple[RunEvent, str] | None = None
        self._final: RunRecord | None = None
        self.finished = asyncio.Event()

    def accepted(self) -> RunAccepted:
        """Return the run's first event. Values of the environment are kept out of every journal and history."""
        hidden = replace(self._recipe, environment=dict.fromkeys(self._recipe.environment, "(hidden)"))
        return RunAccepted(hidden, self._hash, self.params.actor, self._tier_from, self._devices)

    def record(self) -> RunRecord:
        return self._final or self._record(self._board.timeline.records())

    @property
    def pids(self) -> dict[str, int]:
        return self._crew.pids

    def stop(self, event: RunEvent, reason: str) -> None:
        """End the run soon, as cancelled or interrupted; nothing if it is ending already."""
        if self._stopped is None:
            self._stopped = (event, reason)
            if self._work is not None:
                self._work.cancel()

    async def execute(self) -> None:
        """Take the run to its end."""
        event, failure = await self._outcome()
        try:
            await self._conclude(event, failure)
        except Exception:
            log.exception("run %s could not be concluded", self.params.run_uid)
        finally:
            self.finished.set()

    async def _outcome(self) -> tuple[RunEvent, Failure | None]:
        if self._stopped is None:
            self._work = asyncio.ensure_future(self._do_stages())
            try:
                await self._work
                return RunEvent.SUCCEED, None
            except StageError as error:
                return RunEvent.FAIL, self._explained(error.failure)
            except asyncio.CancelledError:
                if self._stopped is None:
                    raise
            except Exception as error:
                log.exception("run %s failed inside the agent", self.params.run_uid)
                detail = f"a mistake inside the agent: {type(error).__name__}: {error}"
                return RunEvent.FAIL, Failure("internal", detail[:500], self._board.current)
        event, reason = self._stopped
        code = "cancelled" if event is RunEvent.CANCEL else "interrupted"
        return event, Failure(code, reason, self._board.current)

    async def _do_stages(self) -> None:
        self._board.begin("queue")
        await self._crew.watch(self._resolve_devices())
        await self._crew.watch(self._wait_for_slot())
        if not self._find_standbys():
            await self._crew.watch(self._wait_for_locks())
        await self._crew.watch(self._wait_for_keeper())
        self._board.end("queue")
        self._state = next_run_state(self._state, RunEvent.DEQUEUE)
        self._services.events.emit(RunStarted(), self.params.run_uid)
        await self._probe_host()
        self._board.timeline.divide(WORKER_STAGES, self._devices)
        orders = [self._order(device) for device in self._devices]
        standbys = self._find_standbys()
        if standbys:
            self._crew.borrow(standbys)
            await self._crew.watch(self._check_files())
            await self._crew.watch(self._wake_parked())
            await self._crew.use_standbys_or_start(orders, self._shards)
        else:
            await self._crew.watch(self._check_files(), *(self._crew.start_worker(order) for order in orders))
        self._crew.send_go(self._shards, {device: self._resident_name(device) for device in self._devices})
        await self._crew.watch(self._crew.wait_ready())
        resident = self._hold()
        if self._recipe.serve is not None and not self.arm:
            await self._crew.watch(self._listen(resident))

    async def _listen(self, resident: str | None) -> None:
        """Have a process serve what is warm now, and see that it answers. Raises: StageError"""
        self._board.begin("listening")
        go = WorkerGo(self._shards, resident, is_resident=True)
        figures = await self._services.servers.start(self._order(self._devices[0]), go)
        self._board.end("listening", figures=figures)

    # --- stages of the agent's own ---

    def _devices_known_now(self) -> tuple[str, ...]:
        if not self._recipe.needs_device:
            return (CPU,)
        sampler = self._services.sampler
        if needs_sampler(self._recipe.devices) and not sampler.known.is_set():
            return ()
        try:
            return resolve_devices(self._recipe.devices, sampler.report, sampler.status)
        except StageError:
            return ()

    async def _resolve_devices(self) -> None:
        if not self._recipe.needs_device:
            self._devices = (CPU,)
            return
        sampler = self._services.sampler
        if needs_sampler(self._recipe.devices):
            await sampler.wait_known(SAMPLER_PATIENCE_S)
        self._devices = resolve_devices(self._recipe.devices, sampler.report, sampler.status)
        refuse_devices(self._recipe, self._devices)

    async def _wait_for_slot(self) -> None:
        """Wait until the devices are this run's; what uses none waits for nobody."""
        slots, devices = self._services.slots, self._devices if self._recipe.needs_device else ()
        ahead = slots.holders(devices)
        if ahead:
            text = f"waits for run {', '.join(dict.fromkeys(ahead))} on {', '.join(self._devices)}"
            self._services.events.emit(Finding("waiting", "info", text), self.params.run_uid)
        await slots.acquire(self.params.run_uid, devices)

    async def _wait_for_locks(self) -> None:
        """Wait until no other agent loads onto the run's GPUs, and for a look at them from after its load."""
        unchanged_mono_ns = await self._services.gpu_locks.take(self.params.run_uid, self._devices)
        await self._services.sampler.wait_newer(unchanged_mono_ns, FRESH_LOOK_S)

    async def _wait_for_keeper(self) -> None:
        """Wait until it is known what is resident: a moment, after the agent's own start."""
        await self._services.residents.kept.settled.wait()

    async def _probe_host(self) -> None:
        self._board.begin("probe")
        await self._services.sampler.wait_known(PROBE_PATIENCE_S)
        self._board.end("probe", figures=probe_figures(self._services.sampler))

    async def _check_files(self) -> None:
        """Have a process read the checkpoint's headers, and see that the model fits."""
        self._board.begin("preflight")
        if self._devices != (CPU,):
            self._services.keeper.hold()
        self._preflight = check = Preflight(self._services, self._order(self._devices[0]))
        self._found = report = await check.report()
        self._shards = report.shards
        self._tier_from = await self._find_start(check, report)
        if self._recipe.is_for_others or self._crew.tier_held(report.shards) is Tier.ARMED:
            await self._services.keeper.ensure()
        self._board.end("preflight", figures=figures(report, self._tier_from))

    async def _find_start(self, check: Preflight, report: PreflightReport) -> Tier:
        """Return from where the run starts, once there is room for what it needs beside that.

        Raises: StageError ``no_memory`` or ``over_budget``
        """
        held = self._crew.tier_held(report.shards)
        if held is None and not self.arm:
            await self._replace_stale()
        found = [found_tier(report)]
        if self._recipe.builds_model:
            missing = [device for device in self._devices if not self._is_resident(device)]
            is_armed_now = self.arm and held is None
            needed_bytes = choose_chunk_bytes(report.bytes, 0) if is_armed_now else report.bytes
            for device in self._devices if is_armed_now else self._in_need(held, missing):
                await self._find_room(check, device, needed_bytes)
            # Without its weights an armed process saves less than they cost.
            counts = held is not None and (held is not Tier.ARMED or self.arm or not missing)
            found += [held] if held is not None and counts else []
            found += [Tier.RESIDENT] if not missing else []
        elif held is None:
            await self._find_room(check, CPU, report.bytes - (report.cached_bytes or 0))
        else:
            found.append(held)
        return max(found, key=list(Tier).index)

    def _in_need(self, held: Tier | None, missing: Sequence[str]) -> Sequence[str]:
        """Return where weights come to lie, of the devices on which the keeper has none."""
        if held is Tier.PARKED:  # what comes back with its process
            return [device for device in missing if device in self._crew.parked]
        return () if held is Tier.STANDBY or self.arm else missing

    async def _wake_parked(self) -> None:
        """Have parked standbys put back. Where one is lost, a fresh worker loads.

        Raises: StageError ``no_memory`` or ``over_budget``
        """
        if not self._crew.has_standbys(self._shards) or not self._crew.parked:
            return  # or they are to be replaced
        await self._wait_for_locks()
        lost = await self._crew.wake()
        if lost is not None:
            self._services.events.emit(Finding("unpark_failed", "warning", lost[:2000]), self.params.run_uid)
            assert self._preflight is not None
            assert self._found is not None
            self._tier_from = await self._find_start(self._preflight, self._found)

    async def _find_room(self, check: Preflight, device: str, needed_bytes: int) -> None:
        """See that the weights fit on a device, alone there, and let idle ones go for them where the recipe says so.

        Raises: StageError ``no_memory`` or ``over_budget``
        """
        await self._wait_for_locks()
        own = (parse_budget(self.params.hold_budget),) if self.params.hold_budget else ()
        budgets = (*own, *self._services.hold_budgets) if self._recipe.builds_model else ()
        room = Room(
            self._services,
            self.params.run_uid,
            device,
            needed_bytes,
            budgets,
            lambda wanted_bytes: check.check_memory((device,), wanted_bytes),
        )
        await room.find(self._recipe.hold.make_room)

    async def _replace_stale(self) -> None:
        reason = f"its files changed: run {self.params.run_uid} loads them again"
        for device in self._devices:
            name, model = self._resident_name(device), self._recipe.model.path
            await self._services.residents.replace_stale(name, model, device, reason)

    # --- workers ---

    def _order(self, device: str) -> Order:
        cache = self._recipe.compile.cache_directory or str(self._services.state.cache)
        stderr = self._services.store.stderr_path(self.params.run_uid)
        state, python = str(self._services.state.root), self.params.python
        return Order(self.params.run_uid, self._recipe, device, python, cache, stderr, state, self._owner, self.arm)

    @property
    def _owner(self) -> str:
        return self._recipe.hold.owner or f"{self.params.actor.user}@{self.params.actor.host}"

    def _resident_name(self, device: str) -> str:
        return resident_name(self._recipe.model.path, self._shards, device)

    def _is_resident(self, device: str) -> bool:
        return self._services.residents.kept.has(self._resident_name(device))

    def _find_standbys(self) -> dict[str, Worker]:
        """Return an idle process for every device: one that has the model warm, is armed, or has its shards registered.

        To arm, shards that are registered are of no use.
        """
        for tier in (Tier.STANDBY, Tier.ARMED) if self.arm else (Tier.STANDBY, Tier.ARMED, Tier.HOST):
            keys = {device: reuse_key(self._recipe, self.params.python, device, tier) for device in self._devices}
            found = {device: self._services.residents.find(key) for device, key in keys.items()}
            whole = {device: worker for device, worker in found.items() if worker is not None}
            if whole and len(whole) == len(found):
                return whole
        return {}

    def _tier_waiting(self) -> Tier:
        """Return how warm a process that waits has the model; cold where none does, or where weights are missing."""
        tier = self._services.residents.coldest(self._find_standbys().values())
        return Tier.COLD if tier in (None, Tier.ARMED) else tier

    def _hold(self) -> str | None:
        """Have what is ready held; return what the keeper calls it, on the last device."""
        name, residents = None, self._services.residents
        for device, (worker, ready) in self._crew.hand_over().items():
            # Of an armed process NVML knows the context's part too.
            is_armed, pid = ready.tier is Tier.ARMED, worker.child.pid
            size_bytes = max(ready.bytes, process_bytes(pid, self._services.sampler.report) if is_armed else 0)
            resident = resident_of(self.params, device, pid, ready, self._owner, size_bytes)
            if ready.is_held:
                residents.hold(worker, reuse_key(self._recipe, self.params.python, device, ready.tier), resident)
            else:
                residents.hold_nothing(worker, resident)
            name = ready.resident
        return name

    # --- what happens to it ---

    def _stage_changed(self, record: StageRecord) -> None:
        self._services.events.emit(StageChanged(record), self.params.run_uid)

    def device_failed(self, device: str, reason: str) -> None:
        """End the run as failed, if it is on that device already."""
        if device in self._devices and self._state is RunState.RUNNING:
            self._crew.fail(StageError(Failure("gpu_error", reason, self._board.current)))

    def _explained(self, failure: Failure) -> Failure:
        stage = failure.stage or self._board.current
        log_tail = failure.log_tail[-20:] or self._crew.log_tail()
        return replace(failure, stage=stage, detail=failure.detail[:2000], log_tail=log_tail)

    async def _conclude(self, event: RunEvent, failure: Failure | None) -> None:
        """End what is left of the run and say how it ended."""
        left: list[tuple[Child, str]] = []
        if event is RunEvent.SUCCEED:
            unreached = "not reported" if self._recipe.builds_model else f"not part of {self._recipe.target_tier}"
            self._board.close("over when the run was", "weights are brought later" if self.arm else unreached)
        else:
            self._board.close(failure.detail[:300] if failure else event.value)
            left = await self._crew.dismiss(self._preflight.child if self._preflight else None)
        if left:
            event, failure = RunEvent.HANG, stuck(failure, [reason for _, reason in left])
        self._services.residents.kept.expect_no_more(self.params.run_uid)
        self._services.gpu_locks.release(self.params.run_uid, has_loaded=True)
        self._state = next_run_state(self._state, event)
        self._final = final = self._settled(failure)
        self._services.events.emit(RunFinished(final), self.params.run_uid)
        self._services.store.add(final)
        if left:  # the device is not free before the process has gone
            left[0][0].exit.add_done_callback(lambda _: self._services.slots.release(self.params.run_uid))
        else:
            self._services.slots.release(self.params.run_uid)

    def _settled(self, failure: Failure | None) -> RunRecord:
        wall_ns = time.monotonic_ns() - self._board.timeline.accepted_mono_ns
        stages, unattributed_ns = self._board.timeline.settle(wall_ns)
        record = replace(self._record(stages), wall_ns=wall_ns, unattributed_ns=unattributed_ns, failure=failure)
        ready = self._crew.answers if self._state is RunState.READY else ()
        return with_answers(record, ready, self._board.timeline.accepted_mono_ns) if ready else record

    def _record(self, stages: tuple[StageRecord, ...]) -> RunRecord:
        return RunRecord(
            self.params.run_uid,
            self._recipe.name,
            self._hash,
            self._recipe.model.path,
            self.params.actor,
            self._state,
            self._tier_from,
            None,
            self._accepted_wall_ns,
            self._devices,
            stages=stages,
        )
