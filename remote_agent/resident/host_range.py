"""Addresses of the host for a `ReservedRange`: maps that replace each other, and a stand-in of one small memfd."""

from __future__ import annotations

import mmap
import os

from remote_agent.errors import DeviceError
from remote_agent.resident.host_memory import check_held, map_at, unmap_at

LARGEST_CHUNK_BYTES = 16 << 20
NO_ACCESS, ANYWHERE, NOBODY = 0, None, -1
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_FIXED = 0x10
"""``MAP_FIXED``: what lay there is replaced in one step."""


class HostPlace:
    """Implements `Place`."""

    def __init__(self, size_bytes: int) -> None:
        """Reserve addresses for at least ``size_bytes``; no memory is taken yet. Raises: DeviceError"""
        self.size_bytes = -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._chunk_bytes, self._chunk = min(self.size_bytes, LARGEST_CHUNK_BYTES), -1
        try:
            self.address = map_at(ANYWHERE, self.size_bytes, NO_ACCESS, _RESERVED, NOBODY)
        except OSError as error:
            text = f"{self.size_bytes} bytes of addresses can't be had: {error.strerror}"
            raise DeviceError(text, "mmap", "out_of_memory") from error

    @property
    def stand_in_bytes(self) -> int:
        return 0 if self._chunk < 0 else self._chunk_bytes

    def open(self, descriptor: int, size_bytes: int) -> int:
        try:
            check_held(descriptor, size_bytes)
            return os.dup(descriptor)
        except OSError as error:
            raise DeviceError(f"the memory can't be opened: {error.strerror}", "dup", "out_of_memory") from error

    def forget(self, memory: int) -> None:
        os.close(memory)

    def put(self, memory: int, size_bytes: int) -> None:
        self._map(0, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, memory)

    def put_stand_in(self) -> None:
        try:
            if self._chunk < 0:
                self._chunk = os.memfd_create("glowplug-stand-in", os.MFD_CLOEXEC)
                os.truncate(self._chunk, self._chunk_bytes)
        except OSError as error:
            raise DeviceError(f"memfd_create failed: {error.strerror}", "memfd_create", "unavailable") from error
        for start in range(0, self.size_bytes, self._chunk_bytes):
            size_bytes = min(self._chunk_bytes, self.size_bytes - start)
            self._map(start, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self._chunk)

    def drop_stand_in(self) -> None:
        chunk, self._chunk = self._chunk, -1
        if chunk >= 0:
            os.close(chunk)

    def clear(self) -> None:
        self._map(0, self.size_bytes, NO_ACCESS, _RESERVED, NOBODY)

    def close(self) -> None:
        unmap_at(self.address, self.size_bytes)
        self.drop_stand_in()

    def _map(self, start: int, size_bytes: int, protection: int, flags: int, descriptor: int) -> None:
        try:
            map_at(self.address + start, size_bytes, protection, flags | _FIXED, descriptor)
        except OSError as error:
            raise DeviceError(f"{size_bytes} bytes can't be mapped: {error.strerror}", "mmap", "refused") from error
