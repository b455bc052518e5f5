"""CUDA's virtual memory management in plain Python: real memory behind real descriptors, with the driver's own rules.

An allocation is a memfd, an address range a map of nothing, access what the kernel protects. So a descriptor can
go to another process, memory lives as long as a handle, a map or a descriptor, and a write through a read-only map
ends the process. Calls out of order fail as the driver lets them fail.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GRANULARITY_BYTES = 64 << 10
MAP_FIXED = 0x10
PROTECTION = {1: mmap.PROT_READ, 3: mmap.PROT_READ | mmap.PROT_WRITE}


class VmmCode(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801


OK = VmmCode.CUDA_SUCCESS
INVALID = (VmmCode.CUDA_ERROR_INVALID_VALUE,)


def _settings() -> SimpleNamespace:
    return SimpleNamespace(
        type=None, requestedHandleTypes=None, flags=None, location=SimpleNamespace(type=None, id=None)
    )


class FakeVmm:
    """The calls of ``cuda.bindings.driver`` for memory behind descriptors.

    ``fail_at``: a call that always fails, once it has worked ``works_before`` times. ``maps``: by address, its size
    and whether it may be touched.
    """

    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103)
    CUmemAllocationProp = staticmethod(_settings)
    CUmemAccessDesc = staticmethod(_settings)

    def __init__(self) -> None:
        self.supports_descriptors = True
        self.free_bytes = 1 << 30
        self.fail_at: str | None = None
        self.works_before = 0
        self.vmm_calls: list[str] = []
        self.handles: dict[int, int] = {}
        self.ranges: dict[int, int] = {}
        self.maps: dict[int, tuple[int, bool]] = {}
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def vmm_leaks(self) -> list[str]:
        """Return what was made and not given back."""
        left = {"handles": self.handles, "address ranges": self.ranges, "maps": self.maps}
        return [f"{len(what)} {name}" for name, what in left.items() if what]

    def _fails(self, name: str) -> bool:
        self.vmm_calls.append(name)
        if self.fail_at != name:
            return False
        self.works_before -= 1
        return self.works_before < 0

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return OK, int(attribute == 103 and self.supports_descriptors)

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[Any, ...]:
        return INVALID if self._fails("cuMemGetAllocationGranularity") else (OK, GRANULARITY_BYTES)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        asked = (properties.type, properties.location.type, properties.location.id, properties.requestedHandleTypes)
        if self._fails("cuMemCreate") or asked != (1, 1, 0, 1) or size <= 0 or size % GRANULARITY_BYTES:
            return INVALID
        if size > self.free_bytes:
            return (VmmCode.CUDA_ERROR_OUT_OF_MEMORY,)
        descriptor = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.truncate(descriptor, size)
        return OK, self._handle(descriptor)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:
        if self._fails("cuMemExportToShareableHandle") or handle not in self.handles:
            return INVALID
        return OK, os.dup(self.handles[handle])

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> tuple[Any, ...]:
        if self._fails("cuMemImportFromShareableHandle"):
            return INVALID
        if not str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("/memfd:fake-gpu"):
            return INVALID
        return OK, self._handle(os.dup(descriptor))

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        if self._fails("cuMemAddressReserve"):
            return INVALID
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = self._libc.mmap(None, size, 0, kind, -1, 0)
        self.ranges[address] = size
        return OK, address

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        if self._fails("cuMemMap") or offset or flags or size % GRANULARITY_BYTES or handle not in self.handles:
            return INVALID
        if not self._is_reserved(address, size) or self._maps_in(address, size):
            return INVALID
        if size > os.fstat(self.handles[handle]).st_size:
            return (VmmCode.CUDA_ERROR_NOT_SUPPORTED,)
        self._libc.mmap(address, size, 0, mmap.MAP_SHARED | MAP_FIXED, self.handles[handle], 0)
        self.maps[address] = (size, False)
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, accesses: list[Any], count: int) -> tuple[Any, ...]:
        """Take a range of whole maps with nothing unmapped between them, as the driver does."""
        inside = self._maps_in(address, size)
        whole = sum(self.maps[place][0] for place in inside) == size and min(inside, default=-1) == address
        if self._fails("cuMemSetAccess") or not whole or len(accesses) != count:
            return INVALID
        self._libc.mprotect(address, size, PROTECTION[accesses[0].flags])
        self.maps.update({place: (self.maps[place][0], True) for place in inside})
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        if self._fails("cuMemUnmap") or self.maps.get(address, (0, False))[0] != size:
            return INVALID
        del self.maps[address]
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        self._libc.mmap(address, size, 0, kind, -1, 0)
        return (OK,)

    def _is_reserved(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + length for start, length in self.ranges.items())

    def _maps_in(self, address: int, size: int) -> list[int]:
        """Return where maps begin that lie in a range, if only in part."""
        return [
            start for start, (length, _) in self.maps.items() if start < address + size and address < start + length
        ]

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        if self._fails("cuMemAddressFree") or self._maps_in(address, size) or self.ranges.get(address) != size:
            return INVALID
        del self.ranges[address]
        self._libc.munmap(address, size)
        return (OK,)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        if self._fails("cuMemRelease") or handle not in self.handles:
            return INVALID
        os.close(self.handles.pop(handle))
        return (OK,)

    def _handle(self, descriptor: int) -> int:
        number = 5000 + len(self.vmm_calls)
        self.handles[number] = descriptor
        return number
