"""Who may use which device when, and whether a model fits. No I/O but the waiting itself."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from remote_agent.errors import StageError
from remote_agent.loader.problems import gigabytes
from remote_agent.protocol.internal import SamplerReport
from remote_agent.protocol.messages import Failure, Gpu, Resident, Tier

CPU = "cpu"

WORTH_SAYING_BYTES = 1 << 30
"""Memory that nobody is known for; less is the driver's own, as far as it does not say that itself."""


def needs_sampler(wanted: Sequence[str]) -> bool:
    """Return whether the GPUs must be known to say what ``wanted`` means."""
    return any(device != CPU for device in wanted)


def resolve_devices(wanted: Sequence[str], report: SamplerReport | None, sampler_status: str) -> tuple[str, ...]:
    """Return the devices a recipe means, as ``cpu`` or GPU UUIDs.

    Raises: StageError ``no_such_device`` that names what there is.
    """
    gpus = sorted(report.gpus, key=lambda gpu: gpu.index) if report else []
    if wanted[0] == "auto":
        if gpus or sampler_status == "absent":
            return (gpus[0].uuid,) if gpus else (CPU,)
        raise _no_such_device("auto: the GPUs of this host are not known", gpus, sampler_status)
    if wanted[0] == "all":
        if gpus:
            return tuple(gpu.uuid for gpu in gpus)
        raise _no_such_device("all: this host shows no GPU", gpus, sampler_status)
    found = tuple(device if device == CPU else _find(device, gpus, sampler_status) for device in wanted)
    if len(set(found)) < len(found):
        raise _no_such_device("a device is named twice, by index and by UUID", gpus, sampler_status)
    return found


def _find(wanted: str, gpus: Sequence[Gpu], sampler_status: str) -> str:
    for gpu in gpus:
        if wanted in (gpu.uuid, f"cuda:{gpu.index}"):
            return gpu.uuid
    raise _no_such_device(f"{wanted}: no such device", gpus, sampler_status)


def _no_such_device(complaint: str, gpus: Sequence[Gpu], sampler_status: str) -> StageError:
    there = ", ".join(f"cuda:{gpu.index} {gpu.name} {gpu.uuid}" for gpu in gpus)
    if not there:
        why = {"absent": "no NVIDIA driver", "hung": "the driver does not answer", "failed": "the sampler fails"}
        there = f"cpu only ({why.get(sampler_status, 'the GPUs are not known yet')})"
    return StageError(Failure("no_such_device", f"{complaint}; there is: {there}", "probe"))


@dataclass(frozen=True)
class Memory:
    """Free memory of a device, and in words who holds the rest. ``None``: the driver does not tell."""

    free_bytes: int | None
    holders: tuple[str, ...] = ()


def device_memory(
    device: str,
    report: SamplerReport | None,
    host_available_bytes: int,
    residents: Iterable[Resident],
    spares: Mapping[int, str] = MappingProxyType({}),
) -> Memory:
    """Return what is free on a device; for the CPU and for unified memory that is the host's.

    ``spares``: names of the agent's processes that are no run's, by pid.
    """
    ours = [one for one in residents if bytes_on(one, device)]
    holders = [f"{r.recipe} of {r.owner} ({gigabytes(bytes_on(r, device))}, {_held_by(r, device)})" for r in ours]
    gpu = next((gpu for gpu in report.gpus if gpu.uuid == device), None) if report else None
    if device == CPU or (gpu is not None and gpu.unified):
        return Memory(host_available_bytes, tuple(holders))
    if gpu is None or gpu.memory_total_bytes is None or gpu.memory_used_bytes is None:
        return Memory(None)
    known = {resident.pid for resident in ours}
    for process in gpu.processes:
        if process.pid not in known:
            size = "" if process.memory_bytes is None else f"{gigabytes(process.memory_bytes)}, "
            name = spares.get(process.pid) or process.name or "a process"
            holders.append(f"{name} ({size}process {process.pid})")
    nobody_bytes = unexplained_bytes(gpu, ours, spares) or 0
    if nobody_bytes >= WORTH_SAYING_BYTES:
        holders.append(f"nobody known here ({gigabytes(nobody_bytes)}, no process)")
    return Memory(max(0, gpu.memory_total_bytes - gpu.memory_used_bytes), tuple(holders))


def unexplained_bytes(gpu: Gpu, residents: Iterable[Resident], spares: Container[int] = ()) -> int | None:
    """Return what is used beyond the driver's own, the processes it names and ``residents``; None if nobody can tell.

    It is the least: a standby's weights at the keeper may count as its process's as well. Of one of ``spares`` (pids),
    which holds nothing, the driver need not tell how much that is.
    """
    sizes = {
        one.pid: one.memory_bytes for one in gpu.processes if one.memory_bytes is not None or one.pid not in spares
    }
    if gpu.unified or gpu.memory_used_bytes is None or None in sizes.values():
        return None
    explained = gpu.memory_reserved_bytes or 0
    for one in residents:
        held_bytes = bytes_on(one, gpu.uuid)
        if held_bytes and one.pid is not None and one.tier is not Tier.PARKED:
            held_bytes = max(held_bytes, sizes.pop(one.pid, None) or 0)
        explained += held_bytes
    return max(0, gpu.memory_used_bytes - explained - sum(size or 0 for size in sizes.values()))


def process_bytes(pid: int, report: SamplerReport | None) -> int:
    """Return what NVML says that a process takes of all GPUs; 0 where it says nothing."""
    processes = [process for gpu in (report.gpus if report else ()) for process in gpu.processes]
    return sum(process.memory_bytes or 0 for process in processes if process.pid == pid)


def bytes_on(resident: Resident, device: str) -> int:
    """Return what a resident takes of a device's memory; that of ``cpu`` is the host's.

    Shards that are cached or registered are the host's. What is parked is the host's too, but for weights that the
    keeper has: those stay where they are.
    """
    if resident.tier is Tier.PARKED and device == CPU:
        return resident.host_bytes
    if resident.tier is Tier.PARKED and resident.name is None:
        return 0
    lies_on = CPU if resident.tier in (Tier.CACHED, Tier.HOST) else resident.device
    return resident.bytes if lies_on == device else 0


def _held_by(resident: Resident, device: str) -> str:
    """Say what holds it there. What descriptors hold has no process, and nvidia-smi shows none."""
    is_away = resident.tier is Tier.PARKED and device != CPU
    return "descriptors" if resident.pid is None or is_away else f"process {resident.pid}"


def check_memory(device: str, needed_bytes: int, memory: Memory) -> None:
    """Raises: StageError ``no_memory`` with what is needed, what is free and who holds the rest."""
    if memory.free_bytes is None or needed_bytes <= memory.free_bytes:
        return
    held = "; held by " + ", ".join(memory.holders) if memory.holders else ""
    detail = f"{device}: needs {gigabytes(needed_bytes)}, free are {gigabytes(memory.free_bytes)}{held}"
    raise StageError(Failure("no_memory", detail, "preflight"))


class Slots:
    """One loading run a device; whoever asked first goes first, and nobody who waits is overtaken on its devices."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}
        self._waiting: list[tuple[str, tuple[str, ...], asyncio.Future[None]]] = []

    def holders(self, devices: Iterable[str]) -> list[str]:
        """Return the runs that have one of ``devices`` now."""
        return [self._holders[device] for device in devices if device in self._holders]

    async def acquire(self, run_uid: str, devices: tuple[str, ...]) -> None:
        """Wait until all ``devices`` are this run's, together."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((run_uid, devices, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting = [entry for entry in self._waiting if entry[2] is not turn]
            self.release(run_uid)
            raise

    def release(self, run_uid: str) -> None:
        """Give back whatever the run has."""
        self._holders = {device: holder for device, holder in self._holders.items() if holder != run_uid}
        self._grant()

    def _grant(self) -> None:
        spoken_for = set(self._holders)
        still_waiting = []
        for run_uid, devices, turn in self._waiting:
            if turn.done():
                continue
            if spoken_for.isdisjoint(devices):
                self._holders.update(dict.fromkeys(devices, run_uid))
                turn.set_result(None)
            else:
                still_waiting.append((run_uid, devices, turn))
            spoken_for.update(devices)
        self._waiting = still_waiting
