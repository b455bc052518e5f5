"""Shared memory of the CPU: a sealed memfd, written through one map and read through any number."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remote_agent.errors import DeviceError, ResidentLostError
from remote_agent.resident.memory import Mapping
from remote_agent.resident.sealing import has_fixed_size, seal_future

if TYPE_CHECKING:
    import torch

_MAP_FAILED = ctypes.c_void_p(-1).value


class HostMemory:
    """Implements `SharedMemory`."""

    range = None

    def __init__(self, size_bytes: int) -> None:
        """Make room for at least ``size_bytes``; the host gives it as it is written. Raises: DeviceError"""
        self.size_bytes = -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._descriptor = os.memfd_create("glowplug-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError) as error:
            raise DeviceError(f"memfd_create failed: {error}", "memfd_create", "unavailable") from error
        try:
            os.fchmod(self._descriptor, 0o600)  # or another user who is lent it could open it anew, to write
            os.ftruncate(self._descriptor, self.size_bytes)
            self._mapping = _map(self._descriptor, self.size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, lambda: None)
        except OSError as error:
            self.close()
            text = f"{self.size_bytes} bytes of shared memory can't be had: {error.strerror}"
            raise DeviceError(text, "mmap", "out_of_memory") from error
        self.tensor = tensor_at(self._mapping)

    def seal(self) -> None:
        try:
            _check(_libc().mprotect(self._mapping.address, self.size_bytes, mmap.PROT_READ))
            seal_future(self._descriptor)
        except OSError as error:
            raise DeviceError(f"shared memory can't be sealed: {error.strerror}", "fcntl", "seal") from error

    def export(self) -> int:
        try:
            # Not a duplicate: nobody can make a writable map of a descriptor that was opened to read.
            return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(f"shared memory can't be exported: {error.strerror}", "open", "export") from error

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def map_host_memory(descriptor: int, size_bytes: int, on_gone: Callable[[], None]) -> torch.Tensor:
    """Return ``size_bytes`` behind a descriptor as a uint8 tensor that can't be written: writing ends the process.

    ``on_gone`` is called when the map has gone. Raises: ResidentLostError if the memory is not what it is said to be;
    DeviceError if this process can't map it, where others may
    """
    try:
        check_held(descriptor, size_bytes)
        return tensor_at(_map(descriptor, size_bytes, mmap.PROT_READ, on_gone))
    except OSError as error:
        raise DeviceError(f"{size_bytes} bytes can't be mapped: {error.strerror}", "mmap", "out_of_memory") from error


def check_held(descriptor: int, size_bytes: int) -> None:
    """Raises: ResidentLostError if the memory behind a descriptor is too short or could be cut short, OSError"""
    held_bytes = os.fstat(descriptor).st_size
    if held_bytes < size_bytes:
        raise ResidentLostError(f"the memory has {held_bytes} bytes, its manifest says {size_bytes}")
    if not has_fixed_size(descriptor):
        raise ResidentLostError("the memory is not sealed: it could be cut short while it is used")


def _map(descriptor: int, size_bytes: int, protection: int, on_gone: Callable[[], None]) -> Mapping:
    address = map_at(None, size_bytes, protection, mmap.MAP_SHARED, descriptor)

    def give_back() -> None:
        unmap_at(address, size_bytes)
        on_gone()

    return Mapping(address, size_bytes, give_back)


def map_at(address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    """Return where memory is mapped now: mmap(2), from the descriptor's first byte on. Raises: OSError

    Not the module's own: torch warns of a buffer that can't be written, and takes an address as it is.
    """
    found = _libc().mmap(address, size_bytes, protection, flags, descriptor, 0)
    if found == _MAP_FAILED:
        _check(-1)
    return int(found)


def unmap_at(address: int, size_bytes: int) -> None:
    """Give addresses back with what is mapped there."""
    _libc().munmap(address, size_bytes)


def tensor_at(mapping: Mapping) -> torch.Tensor:
    """Return mapped memory as a flat uint8 tensor that keeps ``mapping`` alive."""
    import torch

    array = (ctypes.c_uint8 * mapping.size_bytes).from_address(mapping.address)
    array.mapping = mapping  # type: ignore[attr-defined]  # torch keeps the array, the array keeps the map
    return torch.frombuffer(array, dtype=torch.uint8)


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
