"""Devices a run can use: the CPU, or one GPU."""

from __future__ import annotations

import re

from remote_agent.devices.base import Device, Fact
from remote_agent.errors import DeviceError

__all__ = ["Device", "Fact", "open_device"]


def open_device(name: str) -> Device:
    """Return the device called ``name``: ``cpu``, ``cuda:N``, or a GPU or MIG UUID.

    Initialises nothing. For a UUID this process sees that GPU alone from now on, as ``cuda:0``;
    where CUDA was initialised before, `Device.initialise` checks that it is the one CUDA gives.
    Raises: DeviceError if the name is none of these.
    """
    if name == "cpu":
        from remote_agent.devices.cpu import CpuDevice

        return CpuDevice()
    if re.fullmatch(r"cuda:\d{1,4}|(GPU|MIG)-[0-9A-Fa-f-]{8,64}", name):
        from remote_agent.devices.cuda import CudaDevice

        return CudaDevice(name)
    raise DeviceError(f"device {name[:80]!r} is not cpu, cuda:N or a GPU UUID", "open_device", "unknown_device")
