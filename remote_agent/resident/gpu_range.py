"""Addresses of a GPU for a `ReservedRange`: ``cuMemAddressReserve``, and a stand-in of one physical chunk."""

from __future__ import annotations

import logging
from typing import Any

from remote_agent.errors import DeviceError
from remote_agent.resident.gpu_memory import GpuSpace, undo_calls
from remote_agent.resident.stand_in import choose_chunk_bytes

log = logging.getLogger(__name__)


class GpuPlace:
    """Implements `Place`."""

    def __init__(self, space: GpuSpace, size_bytes: int, free_bytes: int = 0) -> None:
        """Reserve addresses for at least ``size_bytes``; no memory is taken yet. Raises: DeviceError

        ``free_bytes``: of the device's memory, of which a stand-in takes no large part.
        """
        self._space, self._driver = space, space.driver
        self.size_bytes = space.rounded(size_bytes)
        self._chunk_bytes = space.rounded(choose_chunk_bytes(self.size_bytes, free_bytes))
        # Whole chunks, for a chunk is mapped as a whole.
        self._reserved_bytes = -(-self.size_bytes // self._chunk_bytes) * self._chunk_bytes
        self._chunk: Any = None
        self._mapped: list[tuple[int, int]] = []
        self.address = int(self._driver("cuMemAddressReserve", self._reserved_bytes, 0, 0, 0))

    @property
    def stand_in_bytes(self) -> int:
        return 0 if self._chunk is None else self._chunk_bytes

    def open(self, descriptor: int, size_bytes: int) -> Any:
        return self._space.import_memory(descriptor)

    def forget(self, memory: Any) -> None:
        undo_calls(self._driver, [("cuMemRelease", memory)])

    def put(self, memory: Any, size_bytes: int, writable: bool = False) -> None:
        self._map(self.address, size_bytes, memory)
        access = self._space.access("READWRITE" if writable else "READ")
        self._driver("cuMemSetAccess", self.address, size_bytes, [access], 1)

    def make_read_only(self, size_bytes: int) -> None:
        """Let nothing in this process write what was put there any more. Raises: DeviceError"""
        self._space.synchronise()
        self._driver("cuMemSetAccess", self.address, size_bytes, [self._space.access("READ")], 1)

    def put_stand_in(self) -> None:
        if self._chunk is None:
            self._chunk = self._space.make(self._chunk_bytes)
        for start in range(0, self._reserved_bytes, self._chunk_bytes):
            self._map(self.address + start, self._chunk_bytes, self._chunk)
        access = [self._space.access("READWRITE")]
        self._driver("cuMemSetAccess", self.address, self._reserved_bytes, access, 1)

    def drop_stand_in(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            self.forget(chunk)

    def clear(self) -> None:
        if self._mapped:
            self._space.wait()
        while self._mapped:
            self._driver("cuMemUnmap", *self._mapped[-1])
            self._mapped.pop()

    def close(self) -> None:
        try:
            self.clear()
        except DeviceError as error:
            log.warning("a range is not given back: %s", error)
            return
        self.drop_stand_in()
        undo_calls(self._driver, [("cuMemAddressFree", self.address, self._reserved_bytes)])

    def _map(self, address: int, size_bytes: int, memory: Any) -> None:
        self._driver("cuMemMap", address, size_bytes, 0, memory, 0)
        self._mapped.append((address, size_bytes))
