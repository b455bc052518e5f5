"""A CUDA runtime and driver in plain Python that keep the real ones' rules and their laziness.

Copies run only when something waits for them, so a buffer that is filled again too early
corrupts the data, as it would on a GPU. Registering a map pins its pages as the driver does:
a page beyond the file's end is refused, and one that the file loses later keeps its bytes. Every
object must be given back; every call may be made to fail. Device memory is torch memory of the CPU.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from remote_agent.devices.cuda import CAPTURE_WARMUPS, CudaDevice
from remote_agent.loader.filemap import PAGE_BYTES
from remote_agent.loader.limits import Cut, LoaderLimits
from remote_agent.loader.ring import PinnedRing
from remote_agent.resident.gpu_memory import GpuSpace
from remote_agent.resident.host_memory import tensor_at
from remote_agent.resident.memory import SharedMemory
from tests.remote_agent.fake_vmm import FakeVmm

ALLOCATION_STREAM = 7
"""The stream that torch hands memory out on."""

UUID = bytes(range(16))
UUID_TEXT = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
POOL_BYTES = 1000
"""What torch's allocator has."""


class Code(enum.IntEnum):
    success = 0
    invalid_value = 1
    memory_allocation = 2
    not_initialised = 3
    invalid_pitch = 12
    illegal_access = 700
    already_registered = 712
    not_registered = 713
    not_ready = 600
    unspecified_failure = 719
    not_supported = 801


READ_ONLY = 8
"""``cudaHostRegisterReadOnly``."""


class FakeStream:
    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.done = 0
        self.ordered_behind = 0
        """How many allocations it waited for: their last users are done before its next operation."""

    def run_to(self, position: int) -> None:
        while self.done < position:
            self.queue[self.done]()
            self.done += 1


class FakeEvent:
    def __init__(self, disables_timing: bool) -> None:
        self.disables_timing = disables_timing
        self.stream: FakeStream | None = None
        self.allocations = 0
        self.position = 0


class FakeRuntime:
    """Implements the calls of ``cuda.bindings.runtime`` that the agent uses.

    ``fail_at``: the number of the call that fails, counted from 0, or a name of which every call fails, with
    ``fail_with``. ``registers``: whether the device says that it registers read-only memory.
    """

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrHostRegisterReadOnlySupported=113)

    def __init__(self, fail_at: int | str | None = None, fail_with: Code = Code.illegal_access) -> None:
        self._lock = threading.RLock()
        self._local = threading.local()
        self._next = 1000
        self.fail_at, self.fail_with = fail_at, fail_with
        self.registers, self.version = True, 13000
        self.bus_id = b"0000:1b:00.0\0"
        self.registered: dict[int, bytes] = {}
        self.most_registered = 0
        self.on_register: Callable[[int], None] = lambda address: None
        self.calls: Counter[str] = Counter()
        self.callers: set[str] = set()
        """Names of the threads that made a call."""
        self.failed_call: str | None = None
        self.pinned: dict[int, Any] = {}
        self.streams: dict[int, FakeStream] = {}
        self.events: dict[int, FakeEvent] = {}
        self.device_memory: list[tuple[int, int]] = []
        self.allocated: dict[int, Any] = {}
        self.copied_bytes = 0
        self.errors: list[str] = []

    def leaks(self) -> list[str]:
        """Return what was made and not given back."""
        left = {
            "pinned": self.pinned, "streams": self.streams, "events": self.events, "registered": self.registered,
            "allocated": self.allocated,
        }  # fmt: skip
        return [f"{len(what)} {name}" for name, what in left.items() if what]

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        implementation = getattr(type(self), f"do_{name}", None)
        if implementation is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            with self._lock:
                number = self.calls.total()
                self.calls[name] += 1
                self.callers.add(threading.current_thread().name)
                if self.fail_at in (number, name):
                    self.failed_call = name
                    if (
                        name in ("cudaFreeHost", "cudaFree", "cudaHostUnregister")
                        or "Destroy" in name
                        or "Synchronize" in name
                    ):
                        implementation(self, *arguments)  # the driver does it and reports an older error
                    gives = any(word in name for word in ("Create", "lloc", "Get", "Elapsed"))
                    return (self.fail_with, None) if gives else (self.fail_with,)
                return implementation(self, *arguments)

        return call

    def _handle(self) -> int:
        self._next += 1
        return self._next

    def _complain(self, text: str) -> tuple[Code]:
        self.errors.append(text)
        return (Code.invalid_value,)

    def do_cudaSetDevice(self, ordinal: int) -> tuple[Code]:
        self._local.device = ordinal
        return (Code.success,)

    def do_cudaHostAlloc(self, size: int, flags: int) -> tuple[Code, int]:
        memory = (ctypes.c_ubyte * size).from_buffer(mmap.mmap(-1, size))  # begins on a page, as the driver's does
        address = ctypes.addressof(memory)
        self.pinned[address] = memory
        return Code.success, address

    def do_cudaFreeHost(self, address: int) -> tuple[Code]:
        return (Code.success,) if self.pinned.pop(address, None) else self._complain("freed twice")

    def do_cudaMalloc(self, size: int) -> tuple[Code, int]:
        memory = (ctypes.c_ubyte * size)()
        address = ctypes.addressof(memory)
        self.allocated[address] = memory
        return Code.success, address

    def do_cudaFree(self, address: int) -> tuple[Code]:
        return (Code.success,) if self.allocated.pop(address, None) else self._complain("device memory freed twice")

    def do_cudaStreamCreateWithFlags(self, flags: int) -> tuple[Code, int]:
        handle = self._handle()
        self.streams[handle] = FakeStream()
        return Code.success, handle

    def do_cudaStreamDestroy(self, handle: int) -> tuple[Code]:
        return (Code.success,) if self.streams.pop(handle, None) else self._complain("stream destroyed twice")

    def do_cudaEventCreateWithFlags(self, flags: int) -> tuple[Code, int]:
        handle = self._handle()
        self.events[handle] = FakeEvent(flags == 2)
        return Code.success, handle

    def do_cudaEventDestroy(self, handle: int) -> tuple[Code]:
        return (Code.success,) if self.events.pop(handle, None) else self._complain("event destroyed twice")

    def do_cudaEventRecord(self, event: int, stream: int) -> tuple[Code]:
        record = self.events[event]
        record.stream = self.streams.get(stream)
        record.allocations = len(self.device_memory) if stream == ALLOCATION_STREAM else 0
        record.position = len(record.stream.queue) if record.stream else 0
        return (Code.success,)

    def do_cudaEventSynchronize(self, event: int) -> tuple[Code]:
        record = self.events[event]
        if record.stream is not None:
            record.stream.run_to(record.position)
        return (Code.success,)

    def do_cudaEventQuery(self, event: int) -> tuple[Code]:
        """The GPU makes one more copy meanwhile; "not yet" stays the thread's last error until that is read."""
        record = self.events[event]
        if record.stream is not None:
            record.stream.run_to(min(record.position, record.stream.done + 1))
            if record.stream.done < record.position:
                self._local.last_error = Code.not_ready
                return (Code.not_ready,)
        return (Code.success,)

    def do_cudaEventElapsedTime(self, begun: int, ended: int) -> tuple[Code, float]:
        """Copies take a tenth of a millisecond each here."""
        first, last = self.events[begun], self.events[ended]
        if first.disables_timing or last.disables_timing:
            return (*self._complain("an event that tells no time"), 0.0)
        if last.stream is None or last.stream.done < last.position:
            return Code.not_ready, 0.0
        return Code.success, (last.position - first.position) * 0.1

    def do_cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Code]:
        record = self.streams[stream]
        record.ordered_behind = max(record.ordered_behind, self.events[event].allocations)
        return (Code.success,)

    def do_cudaStreamSynchronize(self, stream: int) -> tuple[Code]:
        self.streams[stream].run_to(len(self.streams[stream].queue))
        return (Code.success,)

    def do_cudaDeviceSynchronize(self) -> tuple[Code]:
        for stream in self.streams.values():
            stream.run_to(len(stream.queue))
            stream.ordered_behind = len(self.device_memory)
        return (Code.success,)

    def do_cudaMemGetInfo(self) -> tuple[Code, int, int]:
        return Code.success, 3 << 30, 8 << 30

    def do_cudaMemcpyAsync(self, target: int, source: int, length: int, kind: int, stream: int) -> tuple[Code]:
        if getattr(self._local, "device", None) is None:
            return self._complain("a thread copies without having set its device")
        if length <= 0:
            return self._complain("a copy of no bytes")
        read = self._source(source, length)
        if read is None:
            return self._complain("the source is neither pinned nor within one registration")
        if any(a <= target and target + length <= a + len(memory) for a, memory in self.allocated.items()):
            self.streams[stream].queue.append(lambda: read(target))
            return (Code.success,)
        inside = [a <= target and target + length <= a + size for a, size in self.device_memory]
        if True not in inside:
            return self._complain("the target is no device memory")
        if len(inside) - inside[::-1].index(True) > self.streams[stream].ordered_behind:
            return self._complain("a copy into memory that its last user may still write")
        self.copied_bytes += length
        self.streams[stream].queue.append(lambda: read(target))
        return (Code.success,)

    def do_cudaMemcpy(self, target: int, source: int, length: int, kind: int) -> tuple[Code]:
        """Copy at once, out of what stands for a GPU's memory."""
        if kind != self.cudaMemcpyKind.cudaMemcpyDeviceToHost:
            return self._complain("a copy that waits, and not out of a device")
        ctypes.memmove(target, source, length)
        return (Code.success,)

    def do_cudaMemcpy2D(
        self, target: int, target_pitch: int, source: int, pitch: int, width: int, height: int, kind: int
    ) -> tuple[Code]:
        """Copy rows at once, whose distance has a limit."""
        if not width <= target_pitch < 1 << 31 or not width <= pitch < 1 << 31:
            return (Code.invalid_pitch,)
        for row in range(height):
            code = self.do_cudaMemcpy(target + row * target_pitch, source + row * pitch, width, kind)[0]
            if code is not Code.success:
                return (code,)
        return (Code.success,)

    def _source(self, source: int, length: int) -> Callable[[int], None] | None:
        """Return what copies from host memory to a target, when the copy's turn has come."""
        if any(address <= source and source + length <= address + len(m) for address, m in self.pinned.items()):
            return lambda target: _move(target, source, length)
        for address, content in self.registered.items():
            if address <= source and source + length <= address + len(content):
                return partial(self._copy_registered, address, source - address, length)
        return None

    def _copy_registered(self, address: int, start: int, length: int, target: int) -> None:
        content = self.registered.get(address)
        if content is None:
            self.errors.append("unregistered while a copy out of it was queued")
        elif not _is_mapped(address, len(content)):
            self.errors.append("unmapped while a copy out of it was queued")
        else:
            ctypes.memmove(target, content[start : start + length], length)

    def do_cudaHostRegister(self, address: int, length: int, flags: int) -> tuple[Code]:
        if getattr(self._local, "device", None) is None:
            return self._complain("a thread registers without having set its device")
        if address % PAGE_BYTES or length % PAGE_BYTES or length <= 0:
            return self._complain("a registration of no whole pages")
        if any(a < address + length and address < a + len(content) for a, content in self.registered.items()):
            self.errors.append("registered twice")
            return (Code.already_registered,)
        self.on_register(address)
        if not self.registers:
            return (Code.not_supported,)
        if flags != READ_ONLY or not _is_mapped(address, length):
            return self._complain("not the flag or the map for read-only memory")
        content = _pin(address, length)
        if len(content) < length:
            return (Code.invalid_value,)
        self.registered[address] = content
        self.most_registered = max(self.most_registered, sum(map(len, self.registered.values())))
        return (Code.success,)

    def do_cudaHostUnregister(self, address: int) -> tuple[Code]:
        if self.registered.pop(address, None) is None:
            self.errors.append("unregistered what was not registered")
            return (Code.not_registered,)
        return (Code.success,)

    def do_cudaGetLastError(self) -> tuple[Code]:
        error = getattr(self._local, "last_error", Code.success)
        self._local.last_error = Code.success
        return (error,)

    def do_cudaDeviceGetAttribute(self, attribute: int, ordinal: int) -> tuple[Code, int]:
        return (Code.success, int(self.registers)) if attribute == 113 else (Code.invalid_value, 0)

    def do_cudaDriverGetVersion(self) -> tuple[Code, int]:
        return Code.success, self.version

    def do_cudaDeviceGetPCIBusId(self, length: int, ordinal: int) -> tuple[Code, bytes]:
        return Code.success, self.bus_id


def _move(target: int, source: int, length: int) -> None:
    ctypes.memmove(target, source, length)


def _pin(address: int, length: int) -> bytes:
    """Return what lies at an address, or less where touching it would kill the process."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        try:
            return os.pread(memory.fileno(), length, address)
        except OSError:
            return b""


def _is_mapped(address: int, length: int) -> bool:
    """Return whether a range lies within one map that is shared and read-only."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            place, mode = line.split()[:2]
            first, last = (int(end, 16) for end in place.split("-"))
            if first <= address and address + length <= last:
                return mode == "r--s"
    return False


class FakeDriver(FakeVmm):
    """Implements the calls of ``cuda.bindings.driver`` that the agent uses, for one GPU."""

    def __init__(self, uuid: bytes = UUID, count: int = 1) -> None:
        super().__init__()
        self.uuid = uuid
        self.count = count
        self.is_initialised = False
        self.contexts = 0

    def cuInit(self, flags: int) -> tuple[Code]:
        self.is_initialised = True
        return (Code.success,)

    def cuDeviceGetCount(self) -> tuple[Code, int]:
        return (Code.success, self.count) if self.is_initialised else (Code.not_initialised, 0)

    def cuDeviceGet(self, ordinal: int) -> tuple[Code, int]:
        return Code.success, ordinal

    def cuDeviceGetUuid(self, handle: int) -> tuple[Code, SimpleNamespace]:
        return Code.success, SimpleNamespace(bytes=self.uuid)

    def cuDeviceGetName(self, length: int, handle: int) -> tuple[Code, bytes]:
        return Code.success, b"Fake GPU\0\0\0"

    def cuDriverGetVersion(self) -> tuple[Code, int]:
        return Code.success, 13000

    def cuDevicePrimaryCtxRetain(self, handle: int) -> tuple[Code, int]:
        self.contexts += 1
        return Code.success, 99

    def cuDevicePrimaryCtxRelease(self, handle: int) -> tuple[Code]:
        self.contexts -= 1
        return (Code.success,)

    def cuCtxSetCurrent(self, context: int) -> tuple[Code]:
        return (Code.success,)


class FakeGpu(CudaDevice):
    """The real `CudaDevice` over the fake calls, with small buffers; torch's part is done on the CPU."""

    buffer_bytes = 4096
    readers = 3
    registration_bytes = 16384
    registered_bytes: int | None = None

    def __init__(self, runtime: FakeRuntime, driver: FakeDriver | None = None, name: str = "cuda:0") -> None:
        self.fake_driver = driver or FakeDriver()
        self.fake_runtime = runtime
        self.replays = 0
        super().__init__(name, self.fake_driver, runtime)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def _wake_torch(self, torch_module: Any) -> None:
        """There is no GPU for torch to wake."""

    def make_ring(self) -> PinnedRing:
        cut = Cut(self.readers, 2 * self.readers, self.buffer_bytes)
        cold = replace(cut, readers=2 * cut.buffers)
        limits = LoaderLimits(cut, cut, cold, self.registration_bytes, self.registered_bytes)
        return PinnedRing(self.runtime, self.ordinal, limits)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        # 0xEE where nothing is copied; the base is aligned as an allocator on a GPU aligns it
        room = torch.full((size_bytes + 512,), 0xEE, dtype=torch.uint8)
        start = -room.data_ptr() % 512
        memory = room[start : start + size_bytes].clone() if size_bytes == 0 else room[start : start + size_bytes]
        self.fake_runtime.device_memory.append((memory.data_ptr(), size_bytes))
        return memory

    def pool_bytes(self) -> int:
        return POOL_BYTES

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """As a graph's, a replay reads what lies where the work read, and writes where it wrote."""
        for _ in range(CAPTURE_WARMUPS):
            work()
        result = work()

        def replay() -> None:
            self.replays += 1
            result.copy_(work())

        return result, replay

    def shared_space(self) -> GpuSpace:
        return GpuSpace(self._driver, self.ordinal, self.synchronise, tensor_at)

    def share(self, size_bytes: int) -> SharedMemory:
        memory = super().share(size_bytes)
        self.fake_runtime.device_memory.append((memory.tensor.data_ptr(), memory.size_bytes))
        return memory

    def current_stream(self) -> int:
        return ALLOCATION_STREAM
