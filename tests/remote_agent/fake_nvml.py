"""NVML in plain Python: the functions the agent uses, with pynvml's own errors."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

NOT_SUPPORTED = 3
NO_PERMISSION = 4
TIMEOUT = 10
UNKNOWN = 999
LOST = 15


@dataclass(frozen=True)
class NvmlCode:
    """A call's failure."""

    code: int


@dataclass
class FakeGpu:
    """One GPU. A field that is an ``NvmlCode`` makes the calls that would tell it fail with that code."""

    uuid: Any = "GPU-aaaaaaaa-0000-4000-8000-000000000001"
    name: Any = "NVIDIA H200"
    memory: Any = (150_754_820_096, 4_000_000_000)
    utilisation: Any = 17
    temperature: Any = 41
    power_mw: Any = 70_120
    mig: Any = 0
    compute_mode: Any = 0
    persistence: Any = 1
    ecc: Any = 0
    capability: Any = (9, 0)
    minor: Any = 0
    processes: Any = field(default_factory=list)
    handle: Any = None
    reserved: Any = NvmlCode(NOT_SUPPORTED)
    event_types: Any = pynvml.nvmlEventTypeXidCriticalError


@dataclass
class FakeEventSet:
    """GPUs whose events are asked for, and those that nobody has taken yet."""

    gpus: list[FakeGpu] = field(default_factory=list)
    waiting: list[tuple[FakeGpu, int]] = field(default_factory=list)


class FakeNvml:
    """Stands for the module ``pynvml``. ``start`` is the code that ``nvmlInit`` fails with, 0 for none."""

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(self, gpus: list[FakeGpu] | None = None, start: int = 0) -> None:
        self.gpus = gpus if gpus is not None else []
        self.start = start
        self.inits = 0
        self.shutdowns = 0
        self.event_sets: list[FakeEventSet] = []

    def nvmlInit(self) -> None:
        self.inits += 1
        self._tell(NvmlCode(self.start) if self.start else None)

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.03"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid == 1:
            raise pynvml.NVMLError(NO_PERMISSION)
        return "/usr/bin/python3 -m server"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._tell(self.gpus[index].handle)
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return str(self._tell(gpu.uuid))

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> Any:
        return self._tell(gpu.name)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> SimpleNamespace:
        total, used = self._tell(gpu.memory)
        if version is not None:
            reserved = self._tell(gpu.reserved)
            return SimpleNamespace(total=total, used=used - reserved, free=total - used, reserved=reserved)
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._tell(gpu.utilisation), memory=0)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> Any:
        return self._tell(gpu.temperature)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> Any:
        return self._tell(gpu.power_mw)

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[Any]:
        return [self._tell(gpu.mig), gpu.mig]

    def nvmlDeviceGetComputeMode(self, gpu: FakeGpu) -> Any:
        return self._tell(gpu.compute_mode)

    def nvmlDeviceGetPersistenceMode(self, gpu: FakeGpu) -> Any:
        return self._tell(gpu.persistence)

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> Any:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return self._tell(gpu.ecc)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> Any:
        return self._tell(gpu.capability)

    def nvmlDeviceGetMinorNumber(self, gpu: FakeGpu) -> Any:
        return self._tell(gpu.minor)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> Any:
        return self._tell(gpu.processes)

    def nvmlEventSetCreate(self) -> FakeEventSet:
        self.event_sets.append(FakeEventSet())
        return self.event_sets[-1]

    def nvmlEventSetFree(self, events: FakeEventSet) -> None:
        self.event_sets.remove(events)

    def nvmlDeviceGetSupportedEventTypes(self, gpu: FakeGpu) -> Any:
        return self._tell(gpu.event_types)

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, types: int, events: FakeEventSet) -> None:
        if types & ~self._tell(gpu.event_types):
            raise pynvml.NVMLError(NOT_SUPPORTED)
        events.gpus.append(gpu)

    def nvmlEventSetWait_v2(self, events: FakeEventSet, timeout_ms: int) -> SimpleNamespace:
        assert timeout_ms == 0, "a sampler that waits for events reports nothing meanwhile"
        if not events.waiting:
            raise pynvml.NVMLError(TIMEOUT)
        gpu, xid = events.waiting.pop(0)
        return SimpleNamespace(device=gpu, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid)

    def fail(self, gpu: FakeGpu, xid: int) -> None:
        """Let a GPU have an error; who has not asked for its events is not told."""
        for events in self.event_sets:
            events.waiting += [(gpu, xid) for asked in events.gpus if asked is gpu]

    def _tell(self, value: Any) -> Any:
        if isinstance(value, NvmlCode):
            raise pynvml.NVMLError(value.code)
        return value


def all_failing(code: int, **known: Any) -> FakeGpu:
    """Return a GPU of which every field but ``known`` fails with ``code``."""
    failing = NvmlCode(code)
    fields = dict.fromkeys(FakeGpu.__dataclass_fields__, failing)
    return FakeGpu(**{**fields, "handle": None, **known})


def from_smi_csv(path: Path) -> FakeNvml:
    """Return what NVML says on a host where ``nvidia-smi --format=csv`` prints ``path``."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, skipinitialspace=True))
    return FakeNvml([_from_row(row) for row in rows])


def _from_row(row: dict[str, str]) -> FakeGpu:
    failures = {"[N/A]": NvmlCode(NOT_SUPPORTED), "[Unknown Error]": NvmlCode(UNKNOWN)}

    def value(column: str, convert: Any) -> Any:
        return failures.get(row[column]) or convert(row[column])

    def number(text: str) -> float:
        return float(text.split()[0])

    used = value("memory.used [MiB]", lambda text: int(number(text)) << 20)
    return FakeGpu(
        uuid=row["uuid"],
        name=row["name"],
        memory=value("memory.total [MiB]", lambda text: (int(number(text)) << 20, used)),
        utilisation=value("utilization.gpu [%]", lambda text: int(number(text))),
        power_mw=value("power.draw [W]", lambda text: int(number(text) * 1000)),
        persistence=value("persistence_mode", lambda text: int(text == "Enabled")),
        compute_mode=value("compute_mode", lambda text: {"Default": 0, "Prohibited": 2, "Exclusive_Process": 3}[text]),
        ecc=value("ecc.errors.uncorrected.volatile.total", int),
        mig=value("mig.mode.current", lambda text: int(text == "Enabled")),
    )
