"""Xid errors as NVML tells them: each once, without waiting. Where a driver tells none, there are none."""

from __future__ import annotations

from typing import Any

from remote_agent.devices.nvml import Nvml
from remote_agent.protocol.internal import GpuXid

XID_EVENT = 8
"""nvmlEventTypeXidCriticalError, which stands for every Xid."""

AT_ONCE_MS = 0
MOST_A_LOOK = 64


class GpuEvents:
    """Events of every GPU from `start` on, for one life of NVML."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._set: Any = None

    def start(self) -> None:
        """Ask for the events of every GPU that has some; what can't be asked is left out."""
        made = self._nvml.ask("nvmlEventSetCreate")
        if not made.is_known:
            return
        registered = False
        for index in range(self._nvml.number("nvmlDeviceGetCount") or 0):
            handle = self._nvml.ask("nvmlDeviceGetHandleByIndex", index)
            supported = self._nvml.number("nvmlDeviceGetSupportedEventTypes", handle.value) if handle.is_known else None
            if supported is not None and supported & XID_EVENT:
                asked = self._nvml.ask("nvmlDeviceRegisterEvents", handle.value, XID_EVENT, made.value)
                registered = registered or asked.is_known
        if registered:
            self._set = made.value
        else:
            self._nvml.ask("nvmlEventSetFree", made.value)

    def read(self) -> tuple[GpuXid, ...]:
        """Return what has happened since the last time."""
        found: list[GpuXid] = []
        while self._set is not None and len(found) < MOST_A_LOOK:
            event = self._nvml.ask("nvmlEventSetWait_v2", self._set, AT_ONCE_MS)
            if not event.is_known:
                break  # a timeout: there is none
            uuid = self._nvml.text("nvmlDeviceGetUUID", event.value.device)
            if uuid is not None and int(event.value.eventType) == XID_EVENT:
                found.append(GpuXid(uuid, int(event.value.eventData)))
        return tuple(found)

    def stop(self) -> None:
        """Give the events back, before NVML is shut down."""
        if self._set is not None:
            self._nvml.ask("nvmlEventSetFree", self._set)
            self._set = None
