"""Reads GPUs through NVML. Whatever the driver does not tell is None; one bad GPU never hides the others.

``nvml`` is pynvml's module, or anything with its functions; it is never imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from remote_agent.protocol.messages import Finding, Gpu, GpuProcess

NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
GPU_IS_LOST = 15
VERSION_MISMATCH = 18
UNKNOWN_ERROR = 999

COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}

UNIFIED_NAMES = ("GB10", "Thor", "Orin", "Xavier")
"""Parts whose GPU uses the host's memory; some drivers answer for it with figures of their own."""

NOT_AVAILABLE_BYTES = 2**64 - 1
MEMORY_ERROR_UNCORRECTED = 1
ECC_VOLATILE = 0
TEMPERATURE_GPU = 0


@dataclass(frozen=True)
class Answer:
    """A call's value, or the NVML code it failed with (None: this NVML has no such call)."""

    value: Any = None
    code: int | None = 0

    @property
    def is_known(self) -> bool:
        return self.code == 0


class Nvml:
    """Asks NVML without ever raising for what it does not know."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def ask(self, function: str, *arguments: Any) -> Answer:
        call = getattr(self._module, function, None)
        if call is None:
            return Answer(None, None)
        try:
            return Answer(call(*arguments))
        except self._module.NVMLError as error:
            return Answer(None, int(error.value))

    def number(self, function: str, *arguments: Any) -> int | None:
        """Return an integer, or None where the driver does not tell."""
        value = self.ask(function, *arguments).value
        return int(value) if isinstance(value, (int, float)) else None

    def reserved_bytes(self, handle: Any) -> int | None:
        """Return what of a GPU's used memory is the driver's own, or None where it does not tell."""
        version = getattr(self._module, "nvmlMemory_v2", None)
        if version is None:
            return None
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle, version)
        return int(memory.value.reserved) if memory.is_known else None

    def text(self, function: str, *arguments: Any) -> str | None:
        """Return text, or None where the driver does not tell."""
        value = self.ask(function, *arguments).value
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        return value if isinstance(value, str) else None


def read_versions(nvml: Nvml) -> tuple[str | None, str | None]:
    """Return the driver's version and the newest CUDA it serves."""
    cuda = nvml.number("nvmlSystemGetCudaDriverVersion")
    return nvml.text("nvmlSystemGetDriverVersion"), None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"


def read_gpus(nvml: Nvml) -> tuple[tuple[Gpu, ...], tuple[Finding, ...]]:
    """Return every GPU that answers, and a finding for each that does not."""
    count = nvml.ask("nvmlDeviceGetCount")
    if not count.is_known:
        return (), (_unreadable("the GPUs can't be counted", count.code),)
    gpus = []
    findings = []
    for index in range(int(count.value)):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        uuid = nvml.ask("nvmlDeviceGetUUID", handle.value) if handle.is_known else handle
        if not uuid.is_known:
            findings.append(_unreadable(f"GPU {index} does not answer", uuid.code))
            continue
        gpu, codes = _read_gpu(nvml, handle.value, index)
        gpus.append(gpu)
        for code in (GPU_IS_LOST, UNKNOWN_ERROR):
            if code in codes:
                findings.append(_unreadable(f"GPU {index} ({gpu.uuid}) does not answer", code))
                break
    return tuple(gpus), tuple(findings)


def _read_gpu(nvml: Nvml, handle: Any, index: int) -> tuple[Gpu, set[int | None]]:
    name = nvml.text("nvmlDeviceGetName", handle) or "unknown GPU"
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    total = int(memory.value.total) if memory.is_known and memory.value.total else None
    is_unified = memory.code == NOT_SUPPORTED or any(part in name for part in UNIFIED_NAMES)
    utilisation = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
    power_mw = nvml.number("nvmlDeviceGetPowerUsage", handle)
    mig = nvml.ask("nvmlDeviceGetMigMode", handle)
    mode = nvml.number("nvmlDeviceGetComputeMode", handle)
    persistence = nvml.number("nvmlDeviceGetPersistenceMode", handle)
    capability = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle)
    gpu = Gpu(
        uuid=nvml.text("nvmlDeviceGetUUID", handle) or "",
        index=index,
        name=name,
        minor=nvml.number("nvmlDeviceGetMinorNumber", handle),
        memory_total_bytes=total,
        memory_used_bytes=int(memory.value.used) if total is not None else None,
        memory_reserved_bytes=nvml.reserved_bytes(handle),
        unified=is_unified,
        utilisation=int(utilisation.value.gpu) if utilisation.is_known else None,
        temperature_c=nvml.number("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU),
        power_w=None if power_mw is None else power_mw / 1000,
        mig=bool(mig.value[0]) if mig.is_known else None,
        compute_mode=None if mode is None else COMPUTE_MODES.get(mode, f"mode {mode}"),
        persistence=None if persistence is None else bool(persistence),
        ecc_uncorrected=nvml.number("nvmlDeviceGetTotalEccErrors", handle, MEMORY_ERROR_UNCORRECTED, ECC_VOLATILE),
        compute_capability=f"{capability.value[0]}.{capability.value[1]}" if capability.is_known else None,
        processes=tuple(_read_processes(nvml, handle)),
    )
    return gpu, {memory.code, utilisation.code}


def _read_processes(nvml: Nvml, handle: Any) -> Iterator[GpuProcess]:
    for process in nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle).value or ():
        used = process.usedGpuMemory
        path = nvml.text("nvmlSystemGetProcessName", process.pid)
        yield GpuProcess(
            pid=int(process.pid),
            memory_bytes=None if used is None or used == NOT_AVAILABLE_BYTES else int(used),
            name=PurePosixPath(path.split(" ")[0]).name or None if path else None,
        )


def _unreadable(what: str, code: int | None) -> Finding:
    if code == GPU_IS_LOST:
        text = f"{what}: it has fallen off the bus (NVML error {code}); the host must be rebooted"
        return Finding("gpu_lost", "error", text)
    text = f"{what}: NVML error {code}"
    if code == UNKNOWN_ERROR:
        text += " (Unknown Error)"
    return Finding("gpu_unreadable", "error", text)
