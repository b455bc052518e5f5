"""The preflight of one run: a process of its own reads the headers, then the memory is counted. No GPU is touched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from remote_agent.agentd import hostfacts
from remote_agent.agentd.capacity import CPU, check_memory, device_memory
from remote_agent.agentd.reaper import Child
from remote_agent.agentd.services import Services
from remote_agent.agentd.timeline import Figure, Figures
from remote_agent.agentd.workers import Order, SpawnError
from remote_agent.errors import StageError
from remote_agent.protocol.internal import InternalMessage, PreflightReport
from remote_agent.protocol.messages import Failure, Recipe, Tier

CACHED_SHARE = 0.95


class Preflight:
    """One check. ``child`` is its process, once there is one."""

    def __init__(self, services: Services, order: Order) -> None:
        self._services, self._order = services, order
        self.child: Child | None = None

    async def report(self) -> PreflightReport:
        """Return what the process found. Raises: StageError if the checkpoint is refused or the process died."""
        reported: asyncio.Future[PreflightReport | None] = asyncio.get_running_loop().create_future()

        def heard(message: InternalMessage | None) -> None:
            if not reported.done():
                reported.set_result(message if isinstance(message, PreflightReport) else None)

        try:
            self.child = self._services.preflights.start(self._order, heard)
        except SpawnError as error:
            raise StageError(Failure("preflight_not_started", str(error), "preflight")) from error
        self.child.exit.add_done_callback(lambda _: heard(None))
        report = await reported
        if report is None:
            await asyncio.wait([self.child.exit])
            how = self.child.describe_exit()
            raise StageError(Failure("preflight_died", f"preflight {how} without a report", "preflight"))
        if not report.ok or report.failure is not None:
            raise StageError(report.failure or Failure("checkpoint_refused", "preflight refused it", "preflight"))
        return report

    def check_memory(self, devices: Sequence[str], needed_bytes: int) -> None:
        """Raises: StageError ``no_memory`` if a device has not enough left for the weights."""
        residents = self._services.residents.all()
        spares = {pid: name for name, pid in self._services.spares.pids.items()}
        available_bytes = hostfacts.memory_bytes()[1]
        for device in devices:
            memory = device_memory(device, self._services.sampler.report, available_bytes, residents, spares)
            check_memory(device, needed_bytes, memory)


def found_tier(report: PreflightReport) -> Tier:
    """Return ``cached`` where nearly every byte is in the page cache already, else ``cold``."""
    is_cached = report.cached_bytes is not None and 0 < report.bytes * CACHED_SHARE <= report.cached_bytes
    return Tier.CACHED if is_cached else Tier.COLD


def figures(report: PreflightReport, tier: Tier) -> Figures:
    extra: dict[str, Figure] = {
        **report.extra,
        "tier_from": tier.value,
        "tensors": report.tensors,
        "shards": len(report.shards),
        "cached_bytes": report.cached_bytes,
    }
    return Figures(bytes=report.bytes, extra=extra)


def refuse_devices(recipe: Recipe, devices: Sequence[str]) -> None:
    """Raise StageError where a recipe can't be done on the devices that it came to."""
    if recipe.target_tier == "host" and CPU in devices:
        text = "target_tier host registers files with a GPU, and there is none on this host: cached is what it has"
        raise StageError(Failure("needs_gpu", text, "queue"))
    if recipe.serve is not None and len(devices) > 1:
        text = f"one process serves one device, and devices names {len(devices)}: {', '.join(devices)}"
        raise StageError(Failure("serves_one_device", text, "queue"))
