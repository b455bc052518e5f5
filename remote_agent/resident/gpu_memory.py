"""A GPU's memory behind POSIX descriptors: CUDA's virtual memory management, before anything is mapped.

Whoever holds a descriptor or a map keeps the memory alive, though the process that made it is dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remote_agent.devices.calls import Calls
from remote_agent.errors import DeviceError, ResidentLostError
from remote_agent.resident.memory import Mapping

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

ToTensor = Callable[[Mapping], "torch.Tensor"]


class GpuSpace:
    """Makes and maps shared memory of one GPU; a context must be open. ``to_tensor`` may be given for tests."""

    def __init__(
        self, driver: Calls, ordinal: int, synchronise: Callable[[], None], to_tensor: ToTensor | None = None
    ) -> None:
        self.driver, self.ordinal, self.synchronise = driver, ordinal, synchronise
        self.to_tensor = to_tensor or tensor_on

    def rounded(self, size_bytes: int) -> int:
        """Return how much memory `make` is to be asked for to have ``size_bytes``. Raises: DeviceError"""
        self._require_support()
        flag = self.driver.module.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(self.driver("cuMemGetAllocationGranularity", self._properties(), flag))
        return -(-max(size_bytes, 1) // step) * step

    def make(self, size_bytes: int) -> Any:
        """Return a handle of new memory, not mapped yet; ``size_bytes`` must be `rounded`. Raises: DeviceError"""
        return self.driver("cuMemCreate", size_bytes, self._properties(), 0)

    def import_memory(self, descriptor: int) -> Any:
        """Return a handle of the memory behind a descriptor. Raises: ResidentLostError if it is not known any more."""
        try:
            return self.driver("cuMemImportFromShareableHandle", descriptor, self.handle_type)
        except DeviceError as error:
            raise ResidentLostError(f"the memory can't be imported: {error}") from error

    @property
    def handle_type(self) -> Any:
        return self.driver.module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def wait(self) -> None:
        """Wait for what may still use mapped memory; a device that can't say so is not waited for."""
        try:
            self.synchronise()
        except (DeviceError, RuntimeError) as error:
            log.warning("before memory is unmapped: %s", error)

    def access(self, kind: str) -> Any:
        """Return the driver's description of access to this GPU's memory: ``READ`` or ``READWRITE``."""
        module = self.driver.module
        access = module.CUmemAccessDesc()
        access.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = getattr(module.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{kind}")
        return access

    def _properties(self) -> Any:
        module = self.driver.module
        properties = module.CUmemAllocationProp()
        properties.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        properties.requestedHandleTypes = self.handle_type
        return properties

    def _require_support(self) -> None:
        attribute = "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
        number = getattr(self.driver.module.CUdevice_attribute, attribute)
        device = self.driver("cuDeviceGet", self.ordinal)
        if not self.driver("cuDeviceGetAttribute", number, device):
            text = "this GPU or its driver has no memory behind descriptors"
            raise DeviceError(text, "cuDeviceGetAttribute", "unsupported")


def tensor_on(mapping: Mapping) -> torch.Tensor:
    """Return mapped memory as a flat uint8 tensor that keeps ``mapping`` alive, by the public DLPack route."""
    import torch
    from torch.utils.dlpack import from_dlpack

    try:
        from cuda.core import Buffer
    except ImportError:  # cuda.core before 1.0
        try:
            from cuda.core.experimental import Buffer
        except ImportError as error:
            raise DeviceError(f"cuda.core can't be imported: {error}", "import", "missing_package") from error
    buffer = Buffer.from_handle(mapping.address, mapping.size_bytes, owner=mapping)
    tensor: torch.Tensor = from_dlpack(buffer)
    return tensor.view(torch.uint8)


def undo_calls(driver: Calls, calls: list[tuple[Any, ...]]) -> None:
    """Make ``calls``, the last first; one that fails does not keep the others from being made."""
    while calls:
        function, *arguments = calls.pop()
        try:
            driver(function, *arguments)
        except DeviceError as error:
            log.warning("memory is not given back whole: %s", error)
