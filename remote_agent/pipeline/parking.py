"""What a worker does around the driver's checkpoint of it: its weights' memory goes before and is mapped again after.

Their addresses stay, so that module, kernels and graphs are right again as soon as the same bytes lie there.
"""

from __future__ import annotations

import ctypes
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remote_agent.pipeline.keeping import Backing, Keeping
from remote_agent.protocol.internal import WorkerUnmapped

if TYPE_CHECKING:
    from remote_agent.devices import Device
    from remote_agent.pipeline.host import HostShards

CONTEXT_BYTES = 640 << 20
"""What a context with its kernels takes of a device: 528 MiB were seen on an H200, before kernels."""

PR_SET_PDEATHSIG = 1


def unmap_weights(
    backing: Backing, keeping: Keeping, device: Device, host_room_bytes: int, host: HostShards
) -> WorkerUnmapped:
    """Unmap the weights, if the keeper has them and the host has room for the rest; say why not otherwise.

    What ``host`` keeps registered of files is given back as well.
    Raises: DeviceError if the driver does not unmap them; then this process is of no use any more
    """
    begun_ns = time.monotonic_ns()
    device.synchronise()
    needed_bytes = device_bytes(device)
    problem = None
    if backing.range is not None and not (backing.is_kept and keeping.is_there()):
        problem = f"its weights lie in shared memory that the keeper does not have: {backing.problem or keeping.name}"
    elif needed_bytes > host_room_bytes:
        problem = f"{needed_bytes} bytes of the device go to the host's memory, which has {host_room_bytes} left"
    if problem is not None:
        return WorkerUnmapped(needed_bytes, problem=problem)
    die_with_agent()
    for registered in host.let_go(device):
        registered.finish()
    if backing.range is not None:
        backing.range.unmap(stand_in=False)
        backing.range.drop_stand_in()
    return WorkerUnmapped(needed_bytes, {"unmap_ns": time.monotonic_ns() - begun_ns})


def map_weights(backing: Backing, keeping: Keeping) -> tuple[Backing, dict[str, int]]:
    """Map the weights where they were, and return what stands behind them now with nanoseconds by step.

    Raises: KeeperError, ResidentLostError if they are resident no more, DeviceError
    """
    if backing.range is None:
        return backing, {}
    begun_ns = time.monotonic_ns()
    steps = keeping.attach_again(backing.range, backing.checksum)
    fetched = {f"{step}_ns": steps[step] for step in ("fetch", "verify")}
    # What was loaded here was released with its map: from now on it is the keeper's, as if it had been attached.
    return replace(backing, keepable=None), {**fetched, "map_ns": time.monotonic_ns() - begun_ns}


def device_bytes(device: Device) -> int:
    """Return what this process has on its device beside shared memory: what torch keeps, and the context."""
    if device.kind != "cuda":
        return 0
    import torch

    torch.cuda.empty_cache()
    return device.pool_bytes() + CONTEXT_BYTES


def die_with_agent() -> None:
    """Have the kernel end this process with its parent: while it is parked it might not see its socket close."""
    libc: Any = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
