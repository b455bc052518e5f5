"""The CPU as a device: nothing to initialise, memory is the host's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.devices.base import Fact, Replay
from remote_agent.errors import DeviceError

if TYPE_CHECKING:
    import torch

    from remote_agent.resident.memory import SharedMemory
    from remote_agent.resident.reserved import ReservedRange

MEMINFO = Path("/proc/meminfo")


class CpuDevice:
    """Implements `Device`."""

    name = "cpu"
    kind = "cpu"
    has_graphs = False

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def initialise(self) -> Mapping[str, Fact]:
        return {"processors": len(os.sched_getaffinity(0))}

    def open_context(self) -> Mapping[str, Fact]:
        return {}

    def synchronise(self) -> None:
        """Nothing is ever queued."""

    def memory(self) -> tuple[int, int]:
        """Return what the kernel says can be had without swapping, and all there is."""
        sizes = {}
        try:
            for line in MEMINFO.read_text(encoding="ascii").splitlines():
                name, _, rest = line.partition(":")
                sizes[name] = rest.split()[0] if rest.split() else ""
            return int(sizes["MemAvailable"]) << 10, int(sizes["MemTotal"]) << 10
        except (OSError, ValueError, KeyError) as error:
            raise DeviceError(f"{MEMINFO} can't be read: {error}", "read", "meminfo") from error

    def pool_bytes(self) -> int:
        """Torch's memory is the process's own."""
        return 0

    def share(self, size_bytes: int) -> SharedMemory:
        from remote_agent.resident.host_memory import HostMemory

        free_bytes, _ = self.memory()
        if size_bytes > free_bytes:  # the kernel would promise it, and kill whoever writes
            text = f"{size_bytes} bytes of shared memory can't be had: {free_bytes} are free"
            raise DeviceError(text, "share", "out_of_memory")
        return HostMemory(size_bytes)

    def map_shared(self, descriptor: int, size_bytes: int, on_gone: Callable[[], None]) -> torch.Tensor:
        from remote_agent.resident.host_memory import map_host_memory

        return map_host_memory(descriptor, size_bytes, on_gone)

    def reserve(self, size_bytes: int, stand_in: bool = True) -> ReservedRange:
        from remote_agent.resident.host_memory import tensor_at
        from remote_agent.resident.host_range import HostPlace
        from remote_agent.resident.reserved import RangeState, ReservedRange

        return ReservedRange(HostPlace(size_bytes), tensor_at, RangeState.STAND_IN if stand_in else RangeState.NOTHING)

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        raise DeviceError("a CPU has no graphs", "capture", "unsupported")

    def close(self) -> None:
        """Nothing was taken."""
