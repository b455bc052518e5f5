"""The wire's methods, but for those that belong to one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from remote_agent.agentd.session import Handler
from remote_agent.agentd.supervisor import Supervisor
from remote_agent.cache_store import clear_cache, list_cache
from remote_agent.protocol.messages import (
    CacheClearParams,
    CacheClearResult,
    CacheListParams,
    CacheListResult,
    Empty,
    ParkParams,
    ParkResult,
    Probe,
    ReleaseParams,
    ReleaseResult,
    ResidentListResult,
    RunListParams,
    RunListResult,
    RunResult,
    RunStartParams,
    RunStartResult,
    RunUidParams,
    ServeStopParams,
    ServeStopResult,
    ShutdownParams,
    StandbyStopParams,
    StandbyStopResult,
    StatusResult,
    VerifyParams,
    VerifyResult,
)

FIRST_REPORT_PATIENCE_S = 5.0
"""How long a probe of an agent just started waits for the sampler, lest a GPU host be called one without GPUs."""


def methods(supervisor: Supervisor) -> Mapping[str, Handler]:
    """Return a handler for each method; parameters have their method's type already."""
    calls = _Calls(supervisor)
    return {
        "probe": calls.probe,
        "status": calls.status,
        "run.start": calls.run_start,
        "run.cancel": calls.run_cancel,
        "run.list": calls.run_list,
        "run.get": calls.run_get,
        "resident.list": calls.resident_list,
        "resident.release": calls.resident_release,
        "cache.list": calls.cache_list,
        "cache.clear": calls.cache_clear,
        "standby.start": calls.standby_start,
        "standby.stop": calls.standby_stop,
        "serve.stop": calls.serve_stop,
        "verify": calls.verify,
        "park": calls.park,
        "unpark": calls.unpark,
        "shutdown": calls.shutdown,
    }


class _Calls:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def probe(self, _: object) -> Probe:
        await self._supervisor.sampler.wait_known(FIRST_REPORT_PATIENCE_S)
        return self._supervisor.probe()

    async def status(self, _: object) -> StatusResult:
        return self._supervisor.status()

    async def run_start(self, params: object) -> RunStartResult:
        return self._supervisor.start_run(cast(RunStartParams, params))

    async def run_cancel(self, params: object) -> RunResult:
        return RunResult(await self._supervisor.cancel_run(cast(RunUidParams, params).run_uid))

    async def run_list(self, params: object) -> RunListResult:
        return RunListResult(self._supervisor.list_runs(cast(RunListParams, params).limit))

    async def run_get(self, params: object) -> RunResult:
        return RunResult(self._supervisor.get_run(cast(RunUidParams, params).run_uid))

    async def resident_list(self, _: object) -> ResidentListResult:
        return ResidentListResult(await self._supervisor.list_residents())

    async def resident_release(self, params: object) -> ReleaseResult:
        return await self._supervisor.release(cast(ReleaseParams, params))

    async def cache_list(self, params: object) -> CacheListResult:
        root = self._cache(cast(CacheListParams, params).directory)
        return await asyncio.to_thread(list_cache, root)

    async def cache_clear(self, params: object) -> CacheClearResult:
        wanted = cast(CacheClearParams, params)
        return await asyncio.to_thread(clear_cache, self._cache(wanted.directory), wanted)

    def _cache(self, directory: str | None) -> Path:
        return self._supervisor.cache if directory is None else Path(directory).expanduser()

    async def standby_start(self, params: object) -> RunStartResult:
        return self._supervisor.start_run(cast(RunStartParams, params), arm=True)

    async def standby_stop(self, params: object) -> StandbyStopResult:
        return StandbyStopResult(await self._supervisor.stop_standbys(cast(StandbyStopParams, params).recipe))

    async def serve_stop(self, params: object) -> ServeStopResult:
        return ServeStopResult(await self._supervisor.stop_servers(cast(ServeStopParams, params).recipe))

    async def verify(self, params: object) -> VerifyResult:
        return await self._supervisor.verifying.verify(cast(VerifyParams, params))

    async def park(self, params: object) -> ParkResult:
        return await self._supervisor.parking.park(cast(ParkParams, params))

    async def unpark(self, params: object) -> ParkResult:
        return await self._supervisor.parking.unpark(cast(ParkParams, params))

    async def shutdown(self, params: object) -> Empty:
        await self._supervisor.shut_down(cast(ShutdownParams, params))
        return Empty()
