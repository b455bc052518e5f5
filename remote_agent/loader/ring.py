"""Pinned buffers between the page cache and a GPU, made once for a context and kept.

Pinning runs at about 2 GB/s, so the ring is small, some 96 MiB in some 50 ms, and is divided anew
for each load, as the load needs. During a load one thread alone calls what is here: a driver has locks of its
own, and a thread that registers pages holds them for a millisecond.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remote_agent.errors import DeviceError
from remote_agent.loader.ceiling import CEILING_COPIES, CEILING_COPY_BYTES, Ceiling
from remote_agent.loader.cleanup import finally_do, on_failure
from remote_agent.loader.limits import Cut, LoaderLimits
from remote_agent.loader.numa import bound_thread, processors_near

if TYPE_CHECKING:
    from remote_agent.devices.calls import Calls

HOST_ALLOC_DEFAULT = 0
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
NOT_READY = 600
"""``cudaErrorNotReady``: what an event that is yet to come answers with."""

BUS_ID_CHARACTERS = 32


@dataclass(frozen=True)
class Buffer:
    """One pinned buffer; ``event`` is free to mark the end of copies out of it."""

    address: int
    view: memoryview
    event: Any


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
        self._events: list[Any] = []
        self._buffers: dict[Cut, list[Buffer]] = {}
        self._memory: int | None = None
        self._scratch: int | None = None
        self.processors: frozenset[int] | None = None
        try:
            self._make()
        except BaseException:
            with contextlib.suppress(DeviceError):
                self.close()
            raise

    @property
    def buffer_streams(self) -> Sequence[Any]:
        """Return the streams that take full buffers, in turn."""
        return self._streams[:-1]

    @property
    def pages_stream(self) -> Any:
        """Return the stream for registered pages: buffers, of which there are few, don't wait behind those."""
        return self._streams[-1]

    def _make(self) -> None:
        self._runtime("cudaSetDevice", self._ordinal)
        bus_id = self._runtime("cudaDeviceGetPCIBusId", BUS_ID_CHARACTERS, self._ordinal)
        self.processors = processors_near(bus_id.split(b"\0")[0].decode("ascii", "replace"))
        with bound_thread(self.processors):
            self._memory = int(self._runtime("cudaHostAlloc", self.size_bytes, HOST_ALLOC_DEFAULT))
        self._scratch = int(self._runtime("cudaMalloc", min(CEILING_COPY_BYTES, self.size_bytes)))
        for _ in range(self.limits.streams + 1):
            self._streams.append(self._runtime("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING))
        for _ in range(max(cut.buffers for cut in self.limits.cuts)):
            self._events.append(self._runtime("cudaEventCreateWithFlags", EVENT_DISABLE_TIMING))
        for cut in set(self.limits.cuts):
            self._buffers[cut] = [self._buffer(cut, number, self._memory) for number in range(cut.buffers)]

    def _buffer(self, cut: Cut, number: int, memory: int) -> Buffer:
        address = memory + number * cut.stride_bytes
        view = memoryview((ctypes.c_ubyte * cut.buffer_bytes).from_address(address)).cast("B")
        return Buffer(address, view, self._events[number])

    @contextlib.contextmanager
    def use(self, cut: Cut) -> Iterator[Sequence[Buffer]]:
        """Yield the buffers of a cut to one load at a time; another load of this context waits.

        The calling thread is bound to the processors near the device meanwhile. At the end every copy is over.
        """
        with self._in_use, bound_thread(self.processors), finally_do(self.drain):
            yield self._buffers[cut]

    def follow(self, stream: int) -> None:
        """Have every copy from now on wait for what is queued on ``stream``."""
        event = self._runtime("cudaEventCreateWithFlags", EVENT_DISABLE_TIMING)
        with finally_do(functools.partial(self._runtime, "cudaEventDestroy", event)):
            self.record(event, stream)
            for own in self._streams:
                self._runtime("cudaStreamWaitEvent", own, event, 0)

    def begin_ceiling(self) -> Ceiling:
        """Queue pinned copies into memory of the ring's own, timed by the device."""
        length = min(CEILING_COPY_BYTES, self.size_bytes)
        source, target, stream = self._memory or 0, self._scratch or 0, self.pages_stream
        self._runtime("cudaSetDevice", self._ordinal)
        ceiling = Ceiling(self._runtime, CEILING_COPIES * length)
        with on_failure(ceiling.close), self._in_use:
            self.copy(stream, source, target, length)  # a link that was idle is woken
            ceiling.mark(stream)
            for number in range(CEILING_COPIES):
                self.copy(stream, source + number % (self.size_bytes // length) * length, target, length)
            ceiling.mark(stream)
        return ceiling

    def copy(self, stream: Any, source: int, target: int, length: int) -> None:
        """Queue a copy from host address ``source`` to device address ``target``."""
        kind = self._runtime.module.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._runtime("cudaMemcpyAsync", target, source, length, kind, stream)

    def record(self, event: Any, stream: Any) -> None:
        """Have ``event`` mark the end of what is queued on a stream by now."""
        self._runtime("cudaEventRecord", event, stream)

    def is_over(self, event: Any) -> bool:
        """Return whether what ``event`` marks has come. Raises: DeviceError."""
        code = self._runtime.attempt("cudaEventQuery", event)[0]
        if int(code) == NOT_READY:
            return False
        self._runtime.check("cudaEventQuery", code)
        return True

    def wait(self, event: Any) -> None:
        """Wait until what ``event`` marks has come."""
        self._runtime("cudaEventSynchronize", event)

    def drain(self) -> None:
        """Wait for every copy, even when one fails. Raises: the first stream's DeviceError.

        Afterwards the calling thread's last error is none that `is_over` left: others ask for it.
        """
        with finally_do(functools.partial(self._runtime.attempt, "cudaGetLastError")):
            self._call_all("cudaStreamSynchronize", self._streams)

    def close(self) -> None:
        """Give everything back, even when a call fails; then raise the first failure."""
        streams, self._streams = self._streams, []
        events, self._events = self._events, []
        cuts, self._buffers = self._buffers, {}
        memory, self._memory = self._memory, None
        scratch, self._scratch = self._scratch, None
        for buffers in cuts.values():
            for buffer in buffers:
                buffer.view.release()
        with finally_do(
            lambda: self._call_all("cudaStreamSynchronize", streams),
            lambda: self._call_all("cudaEventDestroy", events),
            lambda: self._call_all("cudaStreamDestroy", streams),
            lambda: self._call_all("cudaFree", [] if scratch is None else [scratch]),
            lambda: self._call_all("cudaFreeHost", [] if memory is None else [memory]),
        ):
            pass

    def _call_all(self, function: str, handles: Sequence[Any]) -> None:
        """Call ``function`` for every handle, even after one fails. Raises: the first DeviceError."""
        with finally_do(*(functools.partial(self._runtime, function, handle) for handle in handles)):
            pass
