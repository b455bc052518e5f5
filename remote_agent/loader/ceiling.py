"""What the link to a GPU gives to pinned copies alone, measured beside each load."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from remote_agent.loader.cleanup import finally_do

if TYPE_CHECKING:
    from remote_agent.devices.calls import Calls

CEILING_COPY_BYTES = 8 << 20
"""Copies reach the link's speed from this size on. As much of the device's memory is kept to measure it with."""

CEILING_COPIES = 8
EVENT_DEFAULT = 0


class Ceiling:
    """Copies of ``size_bytes`` between two calls of `mark`; then `finish` or `close` it.

    The device times them, so that anything but other copies may go on beside them.
    """

    def __init__(self, runtime: Calls, size_bytes: int) -> None:
        self._runtime, self._size_bytes = runtime, size_bytes
        self._events: list[Any] = []

    def mark(self, stream: Any) -> None:
        """Note when what is queued on a stream by now is over. Raises: DeviceError"""
        self._events.append(self._runtime("cudaEventCreateWithFlags", EVENT_DEFAULT))
        self._runtime("cudaEventRecord", self._events[-1], stream)

    def finish(self) -> float:
        """Return the bytes a second that were reached, once the last copy is over. Raises: DeviceError"""
        with finally_do(self.close):
            self._runtime("cudaEventSynchronize", self._events[-1])
            taken_ms = float(self._runtime("cudaEventElapsedTime", *self._events))
        return self._size_bytes / max(taken_ms, 1e-6) * 1e3

    def close(self) -> None:
        """Give its events back. Safe to call again. Raises: DeviceError"""
        events, self._events = self._events, []
        with finally_do(*(partial(self._runtime, "cudaEventDestroy", event) for event in events)):
            pass
