"""Pinned buffers between the page cache and a GPU, made once for a context and kept.

Pinning runs at about 2 GB/s, so the ring is small, some 96 MiB in some 50 ms, and is divided anew
for each load, as the load needs: few large buffers where threads copy out of the page cache, many
small ones where they wait for a disk. While one buffer of a lane is on its way another is filled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from remote_agent.errors import DeviceError
from remote_agent.loader.cleanup import finally_do
from remote_agent.loader.limits import Cut, LoaderLimits
from remote_agent.loader.numa import bind_thread, bound_thread, processors_near

if TYPE_CHECKING:
    from remote_agent.devices.calls import Calls

HOST_ALLOC_DEFAULT = 0
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2

CEILING_COPY_BYTES = 8 << 20
"""Copies reach the link's speed from this size on."""

CEILING_COPIES = 32
BUS_ID_CHARACTERS = 32


@dataclass
class Buffer:
    """One pinned buffer. ``event`` marks the end of the last copy out of it; ``busy`` says there was one."""

    address: int
    view: memoryview
    event: Any
    busy: bool = False


@dataclass
class Lane:
    """What one thread uses: a stream, and buffers taken in turn."""

    stream: Any
    buffers: list[Buffer] = field(default_factory=list)


class PinnedRing:
    """Pinned memory with its streams and events on one device; all or nothing.

    ``processors``: those near the device, where there is a choice. Raises: DeviceError if a call
    fails; whatever was made before is given back.
    """

    def __init__(self, runtime: Calls, ordinal: int, limits: LoaderLimits | None = None) -> None:
        self._runtime = runtime
        self._ordinal = ordinal
        self.limits = limits or LoaderLimits().within(len(os.sched_getaffinity(0)))
        self.size_bytes = self.limits.ring_bytes
        self._in_use = threading.Lock()
        self._streams: list[Any] = []
        self._lanes: dict[Cut, list[Lane]] = {}
        self._memory: int | None = None
        self.processors: frozenset[int] | None = None
        try:
            self._make()
        except BaseException:
            with contextlib.suppress(DeviceError):
                self.close()
            raise

    def _make(self) -> None:
        self._runtime("cudaSetDevice", self._ordinal)
        bus_id = self._runtime("cudaDeviceGetPCIBusId", BUS_ID_CHARACTERS, self._ordinal)
        self.processors = processors_near(bus_id.split(b"\0")[0].decode("ascii", "replace"))
        with bound_thread(self.processors):
            self._memory = int(self._runtime("cudaHostAlloc", self.size_bytes, HOST_ALLOC_DEFAULT))
        for cut in (self.limits.mixed, self.limits.staged, self.limits.cold):
            self._divide(cut)

    def _divide(self, cut: Cut) -> None:
        if self._memory is None or cut in self._lanes:
            return
        lanes = self._lanes.setdefault(cut, [])
        for number in range(cut.threads):
            lane = Lane(self._stream(number))
            lanes.append(lane)
            for slot in range(cut.depth):
                address = self._memory + (number * cut.depth + slot) * cut.stride_bytes
                view = memoryview((ctypes.c_ubyte * cut.buffer_bytes).from_address(address)).cast("B")
                event = self._runtime("cudaEventCreateWithFlags", EVENT_DISABLE_TIMING)
                lane.buffers.append(Buffer(address, view, event))

    def _stream(self, number: int) -> Any:
        """Return a stream that the lanes of that number share in every cut."""
        if number == len(self._streams):
            self._streams.append(self._runtime("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING))
        return self._streams[number]

    @contextlib.contextmanager
    def use(self, cut: Cut) -> Iterator[list[Lane]]:
        """Yield the lanes of a cut to one load at a time; another load of this context waits."""
        with self._in_use:
            yield self._lanes[cut]

    @contextlib.contextmanager
    def make_stream(self) -> Iterator[Lane]:
        """Yield a lane without buffers, for copies out of other memory; drained and gone on exit."""
        stream = self._runtime("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING)
        with finally_do(
            lambda: self._runtime("cudaStreamSynchronize", stream), lambda: self._runtime("cudaStreamDestroy", stream)
        ):
            yield Lane(stream)

    @contextlib.contextmanager
    def mark(self, stream: int) -> Iterator[Any]:
        """Yield an event recorded on ``stream``, for lanes to wait for."""
        event = self._runtime("cudaEventCreateWithFlags", EVENT_DISABLE_TIMING)
        with finally_do(lambda: self._runtime("cudaEventDestroy", event)):
            self._runtime("cudaEventRecord", event, stream)
            yield event

    def measure_ceiling(self, target: int, size_bytes: int) -> float:
        """Return the bytes a second that pinned copies to device address ``target`` reach just now.

        ``size_bytes`` at ``target`` are overwritten. Takes some milliseconds.
        """
        length = min(size_bytes, CEILING_COPY_BYTES, self.size_bytes)
        copied = 0
        with self._in_use:
            begun = time.perf_counter_ns()
            with finally_do(self.drain):
                for number in range(CEILING_COPIES):
                    source = (self._memory or 0) + number * length % (self.size_bytes // length * length)
                    self.copy(Lane(self._streams[number % len(self._streams)]), source, target, length)
                    copied += length
            return copied / max(time.perf_counter_ns() - begun, 1) * 1e9

    def copy(self, lane: Lane, source: int, target: int, length: int) -> None:
        """Queue a copy from host address ``source`` to device address ``target`` on a lane's stream."""
        kind = self._runtime.module.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._runtime("cudaMemcpyAsync", target, source, length, kind, lane.stream)

    def record(self, lane: Lane, buffer: Buffer) -> None:
        """Mark that every copy out of ``buffer`` is queued."""
        self._runtime("cudaEventRecord", buffer.event, lane.stream)
        buffer.busy = True

    def acquire(self, buffer: Buffer) -> None:
        """Wait until nothing is read from ``buffer`` any more."""
        if buffer.busy:
            self._runtime("cudaEventSynchronize", buffer.event)
            buffer.busy = False

    def enter(self, lane: Lane, event: Any) -> None:
        """Bind the calling thread to the device and its processors, and the lane's stream behind ``event``."""
        bind_thread(self.processors)
        self._runtime("cudaSetDevice", self._ordinal)
        self._runtime("cudaStreamWaitEvent", lane.stream, event, 0)

    def drain(self) -> None:
        """Wait for every lane, even when one fails. Raises: the first lane's DeviceError."""
        for lanes in self._lanes.values():
            for lane in lanes:
                for buffer in lane.buffers:
                    buffer.busy = False
        self._call_all("cudaStreamSynchronize", self._streams)

    def close(self) -> None:
        """Give everything back, even when a call fails; then raise the first failure."""
        streams, self._streams = self._streams, []
        cuts, self._lanes = self._lanes, {}
        memory, self._memory = self._memory, None
        buffers = [buffer for lanes in cuts.values() for lane in lanes for buffer in lane.buffers]
        for buffer in buffers:
            buffer.view.release()
        with finally_do(
            lambda: self._call_all("cudaStreamSynchronize", streams),
            lambda: self._call_all("cudaEventDestroy", [buffer.event for buffer in buffers]),
            lambda: self._call_all("cudaStreamDestroy", streams),
            lambda: self._call_all("cudaFreeHost", [] if memory is None else [memory]),
        ):
            pass

    def _call_all(self, function: str, handles: Sequence[Any]) -> None:
        """Call ``function`` for every handle, even after one fails. Raises: the first DeviceError."""
        with finally_do(*(functools.partial(self._runtime, function, handle) for handle in handles)):
            pass
