"""What CUDA makes of CUDA_VISIBLE_DEVICES. Entries are never taken for numbers before they are known to be.

Semantics: CUDA C++ Programming Guide, "CUDA Environment Variables". What the guide leaves open
(duplicates, mixed forms) is answered with no device and a reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostGpu:
    """A physical GPU in PCI order, and the UUIDs of the MIG slices on it."""

    uuid: str
    mig: tuple[str, ...] = ()


@dataclass(frozen=True)
class VisibleDevice:
    """One device that CUDA shows: its physical index, its GPU, and the slice if it is one."""

    index: int
    uuid: str
    mig: str | None = None


@dataclass(frozen=True)
class Visible:
    """Devices in CUDA's order. ``problem`` says what hides devices that were meant, in one line."""

    devices: tuple[VisibleDevice, ...]
    problem: str | None = None


_WORDS = {
    "void": "'void' is a container runtime's word for no GPU",
    "none": "'none' hides every GPU",
    "nodevfiles": "'NoDevFiles' hides every GPU",
    "all": "'all' is NVIDIA_VISIBLE_DEVICES syntax: CUDA takes it for no GPU",
}


def visible_devices(value: str | None, gpus: Sequence[HostGpu]) -> Visible:
    """Return the devices that a process with CUDA_VISIBLE_DEVICES=``value`` sees; None stands for an unset variable.

    An entry that names nothing ends the list: what stands before it is visible, what follows is not.
    """
    if value is None:
        return Visible(tuple(VisibleDevice(index, gpu.uuid) for index, gpu in enumerate(gpus)))
    entries = [entry.strip() for entry in value.split(",")]
    if entries == [""]:
        return Visible((), "CUDA_VISIBLE_DEVICES is empty, which hides every GPU")
    if entries[0].lower() in _WORDS:
        return Visible((), f"CUDA_VISIBLE_DEVICES: {_WORDS[entries[0].lower()]}")
    if len({_form(entry) for entry in entries} - {"other"}) > 1:
        return Visible((), f"CUDA_VISIBLE_DEVICES={value[:200]!r} mixes numbers, GPU and MIG UUIDs: use one form")
    found: list[VisibleDevice] = []
    for entry in entries:
        device, problem = _find(entry, gpus)
        if device is None:
            return Visible(tuple(found), problem)
        if device in found:
            return Visible((), f"CUDA_VISIBLE_DEVICES={value[:200]!r} names {entry[:80]} twice, which is invalid")
        found.append(device)
    if found and found[0].mig is not None and len(found) > 1:
        return Visible((found[0],), f"CUDA uses one MIG slice a process: only {found[0].mig} of {len(found)}")
    return Visible(tuple(found))


def _form(entry: str) -> str:
    if re.fullmatch(r"-?[0-9]+", entry, re.ASCII):
        return "number"
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else "other"


def _find(entry: str, gpus: Sequence[HostGpu]) -> tuple[VisibleDevice | None, str | None]:
    shown = repr(entry[:80])
    if _form(entry) == "number":
        if len(entry) < 6 and 0 <= int(entry) < len(gpus):
            return VisibleDevice(int(entry), gpus[int(entry)].uuid), None
        ends = "" if entry == "-1" else f": this host has {len(gpus)} GPU(s)"
        return None, f"CUDA_VISIBLE_DEVICES: {shown} is no GPU and ends the list{ends}"
    if entry.startswith("GPU-"):
        matches = [VisibleDevice(index, gpu.uuid) for index, gpu in enumerate(gpus) if gpu.uuid.startswith(entry)]
    elif entry.startswith("MIG-"):
        matches = [
            VisibleDevice(index, gpu.uuid, mig)
            for index, gpu in enumerate(gpus)
            for mig in gpu.mig
            if mig.startswith(entry)
        ]
    else:
        return None, f"CUDA_VISIBLE_DEVICES: {shown} is neither a number nor a GPU- or MIG- UUID and ends the list"
    if len(matches) == 1:
        return matches[0], None
    why = "begins several UUIDs" if matches else "is on no GPU of this host"
    return None, f"CUDA_VISIBLE_DEVICES: {shown} {why} and ends the list"
