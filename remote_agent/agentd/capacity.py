"""Who may use which device when, and whether a model fits. No I/O but the waiting itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remote_agent.errors import StageError
from remote_agent.loader.problems import gigabytes
from remote_agent.protocol.internal import SamplerReport
from remote_agent.protocol.messages import Failure, Gpu, Resident, Tier

CPU = "cpu"


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
    device: str, report: SamplerReport | None, host_available_bytes: int, residents: Iterable[Resident]
) -> Memory:
    """Return what is free on a device; for the CPU and for unified memory that is the host's."""
    ours = [resident for resident in residents if _lies_on(resident) == device]
    # What descriptors hold has no process, and nvidia-smi shows none.
    by = {r: "descriptors" if r.pid is None else f"process {r.pid}" for r in ours}
    holders = [f"{r.recipe} of {r.owner} ({gigabytes(r.bytes)}, {by[r]})" for r in ours]
    gpu = next((gpu for gpu in report.gpus if gpu.uuid == device), None) if report else None
    if device == CPU or (gpu is not None and gpu.unified):
        return Memory(host_available_bytes, tuple(holders))
    if gpu is None or gpu.memory_total_bytes is None or gpu.memory_used_bytes is None:
        return Memory(None)
    known = {resident.pid for resident in ours}
    for process in gpu.processes:
        if process.pid not in known:
            size = "" if process.memory_bytes is None else f"{gigabytes(process.memory_bytes)}, "
            holders.append(f"{process.name or 'a process'} ({size}process {process.pid})")
    return Memory(max(0, gpu.memory_total_bytes - gpu.memory_used_bytes), tuple(holders))


def _lies_on(resident: Resident) -> str:
    """Return whose memory a resident's bytes take: shards that are cached or registered are the host's."""
    return CPU if resident.tier in (Tier.CACHED, Tier.HOST) else resident.device


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
