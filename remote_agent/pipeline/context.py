"""Stage ``context``: what a device needs before bytes can go there."""

from __future__ import annotations

from remote_agent.devices import Device
from remote_agent.pipeline.timing import Measure


def open_context(device: Device, measure: Measure) -> None:
    """Open the device's context with its allocator and library handles; a GPU's pinned ring is begun.

    Raises: DeviceError if the driver refuses.
    """
    measure.extra.update(device.open_context())
    free, total = device.memory()
    measure.extra["memory_free_bytes"] = free
    measure.extra["memory_total_bytes"] = total
