"""One GPU through the driver API; torch is used for its memory alone.

A UUID is pinned by CUDA_VISIBLE_DEVICES before the driver is initialised, so that torch,
the runtime and whatever else is loaded see exactly one device, number 0.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.devices.base import Fact, Replay
from remote_agent.devices.calls import Calls
from remote_agent.errors import DeviceError
from remote_agent.loader.cleanup import Settling
from remote_agent.loader.ring import PinnedRing
from remote_agent.resident.gpu_memory import GpuSpace
from remote_agent.resident.gpu_range import GpuPlace
from remote_agent.resident.gpu_shared import GpuMemory, map_descriptor, reserve_nothing
from remote_agent.resident.reserved import ReservedRange

if TYPE_CHECKING:
    import torch

    from remote_agent.resident.memory import SharedMemory

DRIVER = "cuda.bindings.driver"
RUNTIME = "cuda.bindings.runtime"
CAPTURE_WARMUPS = 2
NOT_INITIALISED = 3
"""CUDA_ERROR_NOT_INITIALIZED."""


class CudaDevice:
    """Implements `Device`. ``driver`` and ``runtime`` may be given for tests."""

    kind = "cuda"
    has_graphs = True

    def __init__(self, name: str, driver: Any = None, runtime: Any = None) -> None:
        self.name = name
        self._driver = Calls(DRIVER, driver)
        self.runtime = Calls(RUNTIME, runtime)
        self.ordinal = int(name.partition(":")[2]) if name.startswith("cuda:") else 0
        self._handle: Any = None
        self._has_context = False
        self._ring: PinnedRing | None = None
        self._pinning: Settling | None = None
        self._pinning_lock = threading.Lock()
        if not name.startswith("cuda:"):
            self._claim()
        else:
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", self.ordinal)

    @property
    def ring(self) -> PinnedRing:
        """Return the pinned buffers of this context, once they are there. Raises: DeviceError before ``open_context``,
        and where they can't be pinned: the first who needs them is told, and for the next one it is tried again.
        """
        with self._pinning_lock:
            if not self._wait_for_ring() and self._has_context:
                self._pin_ring()
            if self._ring is None:
                raise DeviceError(f"{self.name}: no context is open", "ring", "no_context")
            return self._ring

    def _wait_for_ring(self) -> bool:
        """Return whether there are pinned buffers, once none are being pinned. Raises: what hindered that"""
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning.finish()
        return self._ring is not None

    def initialise(self) -> Mapping[str, Fact]:
        begun = time.monotonic_ns()
        self._driver.initialise()
        init_ns = time.monotonic_ns() - begun
        count = self._driver("cuDeviceGetCount")
        if self.ordinal >= count:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            text = f"{self.name} is not there: CUDA sees {count} device(s) with CUDA_VISIBLE_DEVICES={seen!r}"
            raise DeviceError(text, "cuDeviceGetCount", "no_device")
        self._handle = self._driver("cuDeviceGet", self.ordinal)
        found = self._uuid()
        if self.name.startswith("GPU-") and not found.lower().startswith(self.name.lower()):
            text = f"{self.name} was asked for and CUDA gives {found}: it was initialised before the device was chosen"
            raise DeviceError(text, "cuDeviceGetUuid", "wrong_device")
        version = self._driver("cuDriverGetVersion")
        return {
            "cu_init_ns": init_ns,
            "gpu_uuid": found,
            "gpu_name": _text(self._driver("cuDeviceGetName", 256, self._handle)),
            "cuda_driver_version": f"{version // 1000}.{version % 1000 // 10}",
        }

    def open_context(self) -> Mapping[str, Fact]:
        """Open the primary context, torch's allocator and the math library's handle; begin to pin the ring.

        Pinning takes some 40 ms, in which a run can go on to what needs no buffers.
        """
        import torch

        if self._handle is None:
            self.initialise()
        facts: dict[str, Fact] = {}
        begun = time.monotonic_ns()
        if not self._has_context:
            context = self._driver("cuDevicePrimaryCtxRetain", self._handle)
            self._has_context = True
            self._driver("cuCtxSetCurrent", context)
        self.runtime("cudaSetDevice", self.ordinal)
        facts["primary_context_ns"], begun = _lap(begun)
        self._wake_torch(torch)
        facts["torch_ns"], begun = _lap(begun)
        if self._ring is None and self._pinning is None:
            self._pinning = Settling(self._pin_ring, "pinned-ring")
        return facts

    def _pin_ring(self) -> None:
        self._ring = self.make_ring()

    def _wake_torch(self, torch: Any) -> None:
        try:
            torch.cuda.init()
            torch.cuda.set_device(self.ordinal)
            torch.empty(1, device=self.torch_device)
            torch.cuda.current_blas_handle()
            # Its first call takes 75 ms for what flash attention does as well at a first request's length.
            getattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)(False)
        except (RuntimeError, AssertionError) as error:
            text = f"torch can't use {self.name}: {' '.join(str(error).split())[:300]}"
            raise DeviceError(text, "torch.cuda.init", "torch") from error

    def make_ring(self) -> PinnedRing:
        """Return new pinned buffers. Raises: DeviceError."""
        return PinnedRing(self.runtime, self.ordinal)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return ``size_bytes`` of device memory as one uint8 tensor; not zeroed.

        Raises: torch.OutOfMemoryError.
        """
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def pool_bytes(self) -> int:
        import torch

        return int(torch.cuda.memory_reserved(self.torch_device))

    def share(self, size_bytes: int) -> SharedMemory:
        return GpuMemory(self.shared_space(), size_bytes)

    def map_shared(self, descriptor: int, size_bytes: int, on_gone: Callable[[], None]) -> torch.Tensor:
        return map_descriptor(self.shared_space(), descriptor, size_bytes, on_gone)

    def reserve(self, size_bytes: int, stand_in: bool = True) -> ReservedRange:
        space = self.shared_space()
        if not stand_in:
            return reserve_nothing(space, size_bytes)
        free_bytes, _ = self.memory()
        return ReservedRange(GpuPlace(space, size_bytes, free_bytes), space.to_tensor)

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        import torch

        with self._pinning_lock, contextlib.suppress(DeviceError):
            self._wait_for_ring()  # while a stream is captured, no thread may make a call that allocates
        stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            for _ in range(CAPTURE_WARMUPS):  # what is chosen or allocated at a first time can't be captured
                work()
        torch.cuda.current_stream(self.torch_device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = work()
        return result, graph.replay

    def shared_space(self) -> GpuSpace:
        """Return what makes and maps memory behind descriptors here."""
        return GpuSpace(self._driver, self.ordinal, self.synchronise)

    def current_stream(self) -> int:
        """Return the stream on which `allocate` hands memory out; other streams must wait for it."""
        import torch

        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def synchronise(self) -> None:
        if self._has_context:
            self.runtime("cudaSetDevice", self.ordinal)
            self.runtime("cudaDeviceSynchronize")

    def memory(self) -> tuple[int, int]:
        self.runtime("cudaSetDevice", self.ordinal)
        free, total = self.runtime("cudaMemGetInfo")
        return int(free), int(total)

    def close(self) -> None:
        """Free the ring and this object's hold on the context; torch keeps its own until the process ends."""
        with self._pinning_lock, contextlib.suppress(DeviceError):
            self._wait_for_ring()  # what is being pinned is given back too
        ring, self._ring = self._ring, None
        had_context, self._has_context = self._has_context, False
        try:
            if ring is not None:
                ring.close()
        finally:
            if had_context:
                self._driver("cuDevicePrimaryCtxRelease", self._handle)

    def _claim(self) -> None:
        """Make this GPU the only one that this process sees."""
        if os.environ.get("CUDA_VISIBLE_DEVICES") == self.name:
            return
        if self._is_driver_initialised():
            return  # too late to choose; `initialise` compares what CUDA gives with the name
        os.environ["CUDA_VISIBLE_DEVICES"] = self.name

    def _is_driver_initialised(self) -> bool:
        try:
            return int(self._driver.attempt("cuDeviceGetCount")[0]) != NOT_INITIALISED
        except DeviceError:
            return False  # no driver here; `initialise` says so

    def _uuid(self) -> str:
        return uuid_of(self._driver, self._handle, "MIG" if self.name.startswith("MIG-") else "GPU")


def uuid_of(driver: Calls, handle: Any, prefix: str = "GPU") -> str:
    """Return a device's UUID as NVML writes it. Raises: DeviceError"""
    name = "cuDeviceGetUuid_v2" if hasattr(driver.module, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    value = driver(name, handle)
    return f"{prefix}-{uuid.UUID(bytes=bytes(value.bytes)[:16])}"


def visible_uuids(driver: Calls) -> list[str]:
    """Return the UUID of each GPU that this process sees, by ordinal; initialises the driver. Raises: DeviceError"""
    driver.initialise()
    return [uuid_of(driver, driver("cuDeviceGet", ordinal)) for ordinal in range(driver("cuDeviceGetCount"))]


def _lap(begun_ns: int) -> tuple[int, int]:
    now = time.monotonic_ns()
    return now - begun_ns, now


def _text(value: bytes | str) -> str:
    return value.split(b"\0")[0].decode("utf-8", "replace") if isinstance(value, bytes) else value
