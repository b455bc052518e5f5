"""Everything an agent does, but for who asks: runs, holders, children, and what was left by the agent before."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from remote_agent import __version__
from remote_agent.agentd import hostfacts
from remote_agent.agentd.accounting import account
from remote_agent.agentd.capacity import Slots
from remote_agent.agentd.commands import Commands
from remote_agent.agentd.events import EventLog
from remote_agent.agentd.gpu_errors import GpuErrors
from remote_agent.agentd.gpu_locks import GpuLocks
from remote_agent.agentd.journal import Journal
from remote_agent.agentd.keeping import KeeperLink
from remote_agent.agentd.ledger import interrupted
from remote_agent.agentd.lifecycle import RunEvent
from remote_agent.agentd.options import Options
from remote_agent.agentd.parking import Parking
from remote_agent.agentd.paths import StateDir
from remote_agent.agentd.preflights import Preflights
from remote_agent.agentd.processes import end, left_behind
from remote_agent.agentd.reaper import Reaper
from remote_agent.agentd.residents import Residents
from remote_agent.agentd.runs import Run
from remote_agent.agentd.sampling import Sampler
from remote_agent.agentd.servers import Servers, describe
from remote_agent.agentd.services import Services
from remote_agent.agentd.spares import Spares
from remote_agent.agentd.store import RunStore
from remote_agent.agentd.verifying import Verifying
from remote_agent.agentd.workers import Workers
from remote_agent.agentd.zygotes import Zygotes
from remote_agent.errors import RefusedError
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import (
    DaemonStarted,
    Finding,
    Probe,
    Progress,
    ReleaseParams,
    ReleaseResult,
    Resident,
    ResidentChanged,
    RunFinished,
    RunRecord,
    RunStartParams,
    RunStartResult,
    Server,
    ShutdownParams,
    StatusResult,
)

log = logging.getLogger(__name__)

MAX_UNFINISHED = 256
MAX_RECIPE_BYTES = 128 << 10
LIST_BYTES = 768 << 10
"""What a list of runs may take, so that it fits one frame."""

ABANDON_S = 5.0
END_S = 0.5
ORPHANS_END_S, ORPHANS_KILL_S = 1.0, 5.0
"""How long an agent waits, before it says that a model is gone, for its process to end by itself and by SIGKILL."""


class Supervisor:
    """One agent. Its methods are the wire's, without the wire."""

    def __init__(
        self,
        state: StateDir,
        run_directory: int,
        log_descriptor: int,
        options: Options | None = None,
        commands: Commands | None = None,
        reaper: Reaper | None = None,
    ) -> None:
        self.options = options or Options()
        commands = commands or Commands()
        self._root, self.cache, self.boot_id = state.root, state.cache, hostfacts.boot_id()
        self._reaper = reaper or Reaper()
        self.journal = Journal(state.journal, hostfacts.machine_id(), self.options.journal)
        self.events = EventLog(self.journal)
        self._store = RunStore(state.runs, self.options.runs_kept)
        self.sampler = Sampler(self._reaper, commands, log_descriptor, self.events.emit, self.options.sampler)
        self._zygotes = Zygotes(self._reaper, commands, state.run, self.options.zygote)
        self._keeper = KeeperLink(
            state, run_directory, self._reaper, commands, log_descriptor, self.options.devices_folder
        )
        workers, slots = Workers(self._reaper, commands, self._zygotes), Slots()
        self._servers = Servers(self.events, workers)
        self._residents = Residents(self.events, self._keeper, self._servers)
        damage = GpuErrors(state.root / "gpu_errors.json", self.boot_id, self.events.emit, self._gpu_damaged)
        self.sampler.on_report = damage.take_in
        gpu_locks = GpuLocks(self.events, self.options.lock_folders)
        self.parking = Parking(self._residents, workers, slots, gpu_locks, self.sampler)
        self.verifying = Verifying(state, self._store, self._residents, self._servers, workers, self._keeper)
        self._preflights = Preflights(self._reaper, commands, log_descriptor, self.options.idle_s)
        self._spares = Spares(
            self._reaper, workers, self._zygotes, log_descriptor, self.options.idle_s, self.options.zygote
        )
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self._services = Services(
            state, self.events, self._store, self.sampler, slots, gpu_locks, workers, self._spares, self._preflights,
            self._residents, self.parking, self._servers, self._keeper, self.options.hold_budgets, self._progress,
        )  # fmt: skip
        self._runs: dict[str, Run] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watching: list[asyncio.Future[None]] = []
        self._closing = False
        self.stopping = asyncio.Event()

    def start(self) -> None:
        """Begin: say so, end what an agent before left unfinished, start the sampler and find the keeper."""
        self._reaper.start()
        self.events.emit(DaemonStarted(__version__, self.boot_id, os.getpid()))
        self._end_what_was_left()
        self._keeper.start()
        self._agent_is_idle()
        self._watching = [
            asyncio.ensure_future(self.sampler.supervise()),
            asyncio.ensure_future(self._residents.kept.watch(self.options.keeper_s)),
        ]

    # --- runs ---

    def start_run(self, params: RunStartParams, arm: bool = False) -> RunStartResult:
        """Accept a run, or answer with the one of that uid; with ``arm`` one without weights. Raises: RefusedError"""
        known = self.find_run(params.run_uid)
        if known is not None:
            return RunStartResult(known, created=False)
        self._refuse_unsupported(params)
        if arm and params.recipe.target_tier != "standby":
            tier = params.recipe.target_tier
            text = f'target_tier is "{tier}": arming needs target_tier = "standby", a process that waits for weights'
            raise RefusedError("unsupported", text)
        run = Run(self._services, params, arm)
        self.events.emit_or_refuse(run.accepted(), params.run_uid)
        self._spares.agent_is_busy()
        self._runs[params.run_uid] = run
        task = self._tasks[params.run_uid] = asyncio.ensure_future(run.execute())
        task.add_done_callback(lambda _: self._forget(params.run_uid))
        return RunStartResult(run.record(), created=True)

    async def cancel_run(self, run_uid: str) -> RunRecord:
        """End a run and return how it ended; one that had ended is returned as it is. Raises: RefusedError"""
        run = self._runs.get(run_uid)
        if run is not None:
            run.stop(RunEvent.CANCEL, "cancelled by request")
            await run.finished.wait()
            return run.record()
        return self.get_run(run_uid)

    def find_run(self, run_uid: str) -> RunRecord | None:
        run = self._runs.get(run_uid)
        return run.record() if run is not None else self._store.get(run_uid)

    def get_run(self, run_uid: str) -> RunRecord:
        """Return a run, unfinished or kept. Raises: RefusedError if there is none."""
        found = self.find_run(run_uid)
        if found is None:
            raise RefusedError("no_such_run", f"no run {run_uid} on this node")
        return found

    def list_runs(self, limit: int) -> tuple[RunRecord, ...]:
        """Return the newest runs, at most ``limit`` and at most what fits one answer."""
        unfinished = [run.record() for run in self._runs.values()]
        known = {record.run_uid for record in unfinished}
        kept = [record for record in self._store.newest(limit) if record.run_uid not in known]
        newest = sorted([*unfinished, *kept], key=lambda record: record.accepted_wall_ns, reverse=True)[:limit]
        left_bytes = LIST_BYTES
        chosen = []
        for record in newest:
            left_bytes -= len(json.dumps(encode(record)))
            if left_bytes < 0:
                break
            chosen.append(record)
        return tuple(chosen)

    # --- the node ---

    def probe(self) -> Probe:
        """Return what is known of this host, at once."""
        start_ns = time.monotonic_ns()
        total, available = hostfacts.memory_bytes()
        report = self.sampler.report
        gpus, unexplained = account(report.gpus if report else (), self._residents.all(), self._spares.pids.values())
        return Probe(
            hostfacts.hostname(),
            os.uname().release,
            os.cpu_count() or 0,
            total,
            available,
            self.sampler.status,
            report.driver_version if report else None,
            report.cuda_version if report else None,
            gpus,
            (*(report.findings if report else ()), *unexplained, *self.events.findings()),
            time.monotonic_ns() - start_ns,
        )

    def status(self) -> StatusResult:
        """Return what is on the node now."""
        processes: dict[str, int | None] = {
            "agentd": os.getpid(),
            "keeper": self._keeper.pid,
            "sampler": self.sampler.pid,
            "preflight": self._preflights.pid,
        }
        processes.update({f"zygote {index}": pid for index, pid in enumerate(self._zygotes.pids, 1)})
        processes.update(self._spares.pids)
        for run in self._runs.values():
            processes.update(run.pids)
        processes.update(self._residents.pids)
        processes.update(self._servers.pids)
        runs = tuple(run.record() for run in self._runs.values())
        return StatusResult(runs, self._residents.all(), processes, self.probe())

    async def list_residents(self) -> tuple[Resident, ...]:
        """Return what is warm, and who is attached now."""
        await self._residents.kept.refresh()
        return self._residents.all()

    async def release(self, params: ReleaseParams) -> ReleaseResult:
        """Let warm models go, and the driver when asked. Raises: RefusedError"""
        if params.run_uid is None and not params.everything and not params.driver:
            raise RefusedError("nothing_named", "name a run, everything or the driver")
        released: tuple[Resident, ...] = ()
        if params.everything or params.run_uid is not None:
            run_uid = None if params.everything else params.run_uid
            released = await self._residents.release(run_uid, "released by request", params.force, params.wait_s)
            if params.everything:  # what the keeper has lost is held by its servers alone
                await self._servers.stop(None, "released by request")
        is_closed = params.driver and await self._keeper.release()
        if params.everything or params.driver:
            is_closed = await self._spares.end_all() and is_closed
        return ReleaseResult(released, is_closed)

    async def stop_standbys(self, recipe: str) -> tuple[Resident, ...]:
        """End the standbys of a recipe, armed or with weights, and what arms one now. Raises: RefusedError"""
        arming = [run for run in self._runs.values() if run.arm and run.params.recipe.name == recipe]
        for run in arming:
            run.stop(RunEvent.CANCEL, "its standby was stopped by request")
        await asyncio.gather(*(run.finished.wait() for run in arming))
        stopped = await self._residents.stop_standbys(recipe, "stopped by request")
        if not stopped and not arming:
            raise RefusedError("no_such_standby", f"no process waits for or holds {recipe} on this node")
        return stopped

    async def stop_servers(self, recipe: str | None) -> tuple[Server, ...]:
        """Stop the server of a recipe, or all; what they served stays warm. Raises: RefusedError if there is none"""
        stopped = await self._servers.stop(recipe, "stopped by request")
        if not stopped:
            text = f"nothing serves {recipe} on this node" if recipe is not None else "nothing serves on this node"
            raise RefusedError("no_such_server", text)
        return stopped

    async def shut_down(self, params: ShutdownParams) -> None:
        """End runs, holders and the agent. Raises: RefusedError ``busy`` unless forced or idle."""
        busy = [f"run {uid}" for uid in self._runs]
        busy += [describe(one) for one in self._servers]
        residents = [one for one in self._residents.all() if one.pid is not None or params.keeper]
        busy += [f"{resident.recipe} on {resident.device}" for resident in residents]
        if busy and not params.force:
            raise RefusedError("busy", f"still here: {', '.join(busy[:20])}")
        await self.end_everything("the agent was told to stop")
        if params.keeper:
            await self._keeper.stop(params.force)
            self._residents.kept.all_lost("the keeper was told to stop")
        self.stopping.set()

    async def end_everything(self, reason: str) -> None:
        """Interrupt every run, end every holder, zygote and sampler; the keeper lives on."""
        self._closing = True
        for run in list(self._runs.values()):
            run.stop(RunEvent.INTERRUPT, reason)
        await asyncio.gather(*(run.finished.wait() for run in list(self._runs.values())))
        await self.parking.stop()
        await self._servers.stop(None, reason)
        await self._residents.end_all(reason)
        await self._spares.end_all()
        self._zygotes.stop()
        self._preflights.stop()
        self.sampler.stop()
        left = await self._reaper.end_all(END_S)
        if left:
            log.error("these processes ignore SIGKILL: %s", left)

    def find_keeper(self) -> None:
        """Find the keeper again, or start one, after the sockets' directory was removed."""
        self._keeper.start()

    def abandon(self, reason: str) -> NoReturn:
        """End every child and this process at once. Nothing is written: the state directory may be another agent's.

        The keeper is left: it ends by itself, unless its socket is still in place.
        """
        log.critical("the agent ends with everything it runs and holds: %s", reason)
        left = self._reaper.kill_all(ABANDON_S)
        if left:
            log.critical("these processes ignore SIGKILL: %s", left)
        os._exit(1)

    def close(self) -> None:
        """Write everything down; the last thing an agent does."""
        for task in self._watching:
            task.cancel()
        self.events.close()
        self._reaper.stop()

    def _gpu_damaged(self, uuid: str, reason: str) -> None:
        for run in self._runs.values():
            run.device_failed(uuid, reason)
        self._spares.lose(uuid)
        self._residents.lose(uuid, reason)

    def _progress(self, progress: Progress) -> None:
        self.on_progress(progress)

    def _forget(self, run_uid: str) -> None:
        """Drop a run that has ended; its record is in the store."""
        del self._runs[run_uid], self._tasks[run_uid]
        if not self._runs and not self._closing:
            self._agent_is_idle()

    def _agent_is_idle(self) -> None:
        self._preflights.agent_is_idle()
        self._spares.agent_is_idle()

    def _refuse_unsupported(self, params: RunStartParams) -> None:
        recipe = params.recipe
        if self._closing:
            raise RefusedError("stopping", "the agent is ending")
        if recipe.model.adapter != "native":
            raise RefusedError("unsupported", f"adapter {recipe.model.adapter} is not supported yet: use native")
        if not recipe.model.path.startswith(("/", "~")):
            text = f"model.path {recipe.model.path!r} is relative, and an agent has no folder it could start from"
            raise RefusedError("bad_path", f"{text}: give the whole path on the host, or one that starts with ~")
        if recipe.serve is not None and recipe.serve.path and not recipe.serve.path.startswith(("/", "~")):
            text = f"serve.path {recipe.serve.path!r} is relative, and an agent has no folder it could start from"
            raise RefusedError("bad_path", f"{text}: give the whole path on the host, or one that starts with ~")
        for name, value in recipe.environment.items():
            if "\0" in value:
                raise RefusedError("bad_environment", f"environment.{name}: a value can't hold a NUL")
        if len(self._runs) >= MAX_UNFINISHED:
            raise RefusedError("too_many_runs", f"{MAX_UNFINISHED} runs are unfinished on this node")
        size_bytes = len(json.dumps(encode(params)))
        if size_bytes > MAX_RECIPE_BYTES:
            raise RefusedError("too_large", f"the request has {size_bytes} bytes; {MAX_RECIPE_BYTES} are taken")

    def _end_what_was_left(self) -> None:
        ledger = self.events.ledger
        left = end(left_behind(self._root), ORPHANS_END_S, ORPHANS_KILL_S)
        states = {process.pid: hostfacts.process_state(process.pid) for process in left}
        for pid, state in states.items():
            log.error("process %s of the agent before ignores SIGKILL: %s", pid, state)
        for open_run in list(ledger.runs.values()):
            record = self._store.get(open_run.record.run_uid)
            if record is None:
                record = interrupted(open_run, "the agent ended while the run was unfinished")
                self._store.add(record)
            self.events.emit(RunFinished(record), record.run_uid)
        for resident in list(ledger.residents.values()):
            for server in resident.servers:
                text = f"{describe(server)} ended with its agent: its weights may be resident still, warm it again"
                self.events.emit(Finding("server_ended", "error", text), server.run_uid)
            if resident.pid is None and resident.name is not None:
                if resident.servers:
                    resident = replace(resident, servers=())
                    self.events.emit(ResidentChanged(resident, "held"), resident.run_uid)
                self._residents.kept.remember(resident)
                continue
            reason = "the agent that held it has ended"
            if resident.pid in states:
                reason += f", but process {resident.pid} ignores SIGKILL: {states[resident.pid]}"
            self.events.emit(ResidentChanged(resident, "gone", reason), resident.run_uid)
