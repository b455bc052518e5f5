"""Shared memory of a GPU, mapped over a range of addresses of its own, so that it can be unmapped and mapped again.

Order of giving back: unmap, free the addresses, release the handle.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from remote_agent.errors import DeviceError, ResidentLostError
from remote_agent.resident.gpu_memory import GpuSpace
from remote_agent.resident.gpu_range import GpuPlace
from remote_agent.resident.reserved import RangeState, ReservedRange

if TYPE_CHECKING:
    import torch

TOO_LONG = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED")
"""What cuMemMap says of more bytes than there are, in memory of this process and in memory that was imported."""


class GpuMemory:
    """Implements `SharedMemory`."""

    def __init__(self, space: GpuSpace, size_bytes: int) -> None:
        """Make at least ``size_bytes`` of a GPU's memory. Raises: DeviceError"""
        self._space, self._place = space, GpuPlace(space, size_bytes)
        self.size_bytes = self._place.size_bytes
        try:
            self._memory = space.make(self.size_bytes)
            release = partial(self._place.forget, self._memory)
        except BaseException:
            self._place.close()
            raise
        try:
            self._place.put(self._memory, self.size_bytes, writable=True)
        except BaseException:
            self._place.close()
            release()
            raise
        self.range = ReservedRange(self._place, space.to_tensor, RangeState.WEIGHTS, release)
        self.tensor = self.range.tensor

    def seal(self) -> None:
        self._place.make_read_only(self.size_bytes)

    def export(self) -> int:
        descriptor = int(self._space.driver("cuMemExportToShareableHandle", self._memory, self._space.handle_type, 0))
        os.set_inheritable(descriptor, False)
        return descriptor

    def close(self) -> None:
        """Nothing is open but the map, which ends with its last tensor."""


def reserve_nothing(space: GpuSpace, size_bytes: int) -> ReservedRange:
    """Return addresses for at least ``size_bytes``, with nothing there. Raises: DeviceError"""
    return ReservedRange(GpuPlace(space, size_bytes), space.to_tensor, RangeState.NOTHING)


def map_descriptor(space: GpuSpace, descriptor: int, size_bytes: int, on_gone: Callable[[], None]) -> torch.Tensor:
    """Return ``size_bytes`` behind a descriptor as a uint8 tensor that no kernel and no copy can write.

    ``on_gone`` is called when the map has gone. Raises: ResidentLostError if the driver does not know the memory any
    more, or not so much of it; DeviceError for anything else, where others may well map it
    """
    reserved = reserve_nothing(space, size_bytes)
    try:
        reserved.map(descriptor, size_bytes, on_gone)
    except DeviceError as error:
        if error.call == "cuMemMap" and error.code in TOO_LONG:
            raise ResidentLostError(f"the memory is not of {size_bytes} bytes: {error}") from error
        raise
    return reserved.tensor
