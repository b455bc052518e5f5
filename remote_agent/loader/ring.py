"""Pinned buffers between the page cache and a GPU, made once for a context and kept.

Pinning runs at about 2 GB/s, so the ring is small: 6 lanes of 2 buffers of 8 MiB are 96 MiB,
some 50 ms. Copies reach the link's speed from 8 MiB on. While one buffer of a lane is on its
way the other is filled; 6 lanes read faster than any link where the page cache is warm.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from remote_agent.errors import DeviceError

if TYPE_CHECKING:
    from remote_agent.devices.calls import Calls

LANES = 6
DEPTH = 2
BUFFER_BYTES = 8 << 20

HOST_ALLOC_DEFAULT = 0
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2

CEILING_COPIES = 12


@dataclass
class Buffer:
    """One pinned buffer. ``event`` marks the end of the last copy out of it; ``busy`` says there was one."""

    address: int
    view: memoryview
    event: Any
    busy: bool = False


@dataclass
class Lane:
    """What one reader thread uses: a stream, and buffers taken in turn."""

    stream: Any
    buffers: list[Buffer] = field(default_factory=list)


class PinnedRing:
    """Lanes of pinned buffers, streams and events on one device; all or nothing.

    Raises: DeviceError if a call fails; whatever was made before is given back.
    """

    def __init__(
        self,
        runtime: Calls,
        ordinal: int,
        lanes: int | None = None,
        depth: int = DEPTH,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._runtime = runtime
        self._ordinal = ordinal
        self.buffer_bytes = buffer_bytes
        self.lanes: list[Lane] = []
        self._address: int | None = None
        count = min(LANES, max(2, len(os.sched_getaffinity(0)))) if lanes is None else lanes
        self.size_bytes = count * depth * buffer_bytes
        try:
            self._make(count, depth)
        except BaseException:
            with contextlib.suppress(DeviceError):
                self.close()
            raise

    def _make(self, count: int, depth: int) -> None:
        self._runtime("cudaSetDevice", self._ordinal)
        self._address = int(self._runtime("cudaHostAlloc", self.size_bytes, HOST_ALLOC_DEFAULT))
        for number in range(count):
            lane = Lane(self._runtime("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING))
            self.lanes.append(lane)
            for slot in range(depth):
                address = self._address + (number * depth + slot) * self.buffer_bytes
                view = memoryview((ctypes.c_ubyte * self.buffer_bytes).from_address(address)).cast("B")
                event = self._runtime("cudaEventCreateWithFlags", EVENT_DISABLE_TIMING)
                lane.buffers.append(Buffer(address, view, event))

    @contextlib.contextmanager
    def mark(self, stream: int) -> Iterator[Any]:
        """Yield an event recorded on ``stream``, for lanes to wait for."""
        event = self._runtime("cudaEventCreateWithFlags", EVENT_DISABLE_TIMING)
        try:
            self._runtime("cudaEventRecord", event, stream)
            yield event
        finally:
            self._runtime("cudaEventDestroy", event)

    def measure_ceiling(self, target: int, size_bytes: int) -> float:
        """Return the bytes a second that pinned copies to device address ``target`` reach just now.

        ``size_bytes`` at ``target`` are overwritten, at most a buffer's worth. Takes some milliseconds.
        """
        length = min(size_bytes, self.buffer_bytes)
        copied = 0
        begun = time.perf_counter_ns()
        try:
            for number in range(CEILING_COPIES):
                lane = self.lanes[number % len(self.lanes)]
                self.copy(lane, lane.buffers[0].address, target, length)
                copied += length
        finally:
            self.drain()
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
        """Bind the calling thread to the device, and the lane's stream behind ``event``."""
        self._runtime("cudaSetDevice", self._ordinal)
        self._runtime("cudaStreamWaitEvent", lane.stream, event, 0)

    def drain(self) -> None:
        """Wait for every lane, even when one fails. Raises: the first lane's DeviceError."""
        first: DeviceError | None = None
        for lane in self.lanes:
            try:
                self._runtime("cudaStreamSynchronize", lane.stream)
            except DeviceError as error:
                first = first or error
            for buffer in lane.buffers:
                buffer.busy = False
        if first is not None:
            raise first

    def close(self) -> None:
        """Give everything back, even when a call fails; then raise the first failure."""
        first: DeviceError | None = None
        lanes, self.lanes = self.lanes, []
        address, self._address = self._address, None
        calls: list[tuple[Any, ...]] = []
        for lane in lanes:
            for buffer in lane.buffers:
                buffer.view.release()
                calls.append(("cudaEventDestroy", buffer.event))
            calls.insert(0, ("cudaStreamSynchronize", lane.stream))
            calls.append(("cudaStreamDestroy", lane.stream))
        if address is not None:
            calls.append(("cudaFreeHost", address))
        for call in calls:
            try:
                self._runtime(*call)
            except DeviceError as error:
                first = first or error
        if first is not None:
            raise first
