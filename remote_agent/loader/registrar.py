"""The ``mapped`` path of a GPU: shards mapped read-only, registered piece by piece, copied from where they lie.

No byte is copied on the host, and no page is touched by it: a page that can't be brought in is an
error of the kernel's, not a signal. A copy never spans two registrations. Whatever was registered
is given back, unmapped and unlocked by `Registrar.close`, whatever happened.

Several processes that register one file at once hang in some drivers or run out of memory, so a
shard is registered under an exclusive ``flock`` of the shard itself: that is one lock for every
user and container that sees the file, needs no write permission, and ends with its process. Where
another process has it, readers move the shard: nobody waits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from remote_agent.errors import DeviceError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.cleanup import finally_do
from remote_agent.loader.filemap import PAGE_BYTES, FileMap
from remote_agent.loader.files import describe
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.plan import Plan
from remote_agent.loader.problems import shown
from remote_agent.loader.progress import Announce
from remote_agent.loader.ring import EVENT_DISABLE_TIMING, Lane, PinnedRing
from remote_agent.loader.schedule import Chunk
from remote_agent.loader.shards import OpenShards

if TYPE_CHECKING:
    from remote_agent.devices.calls import Calls

READ_ONLY = 0x08
"""``cudaHostRegisterReadOnly``."""

REFUSALS = (1, 2, 304, 712, 800, 801)
"""Codes of a registration that is refused and leaves the context whole: invalid value, memory allocation,
operating system, already registered, not permitted, not supported."""

UNPOPULATED = (errno.EINVAL, errno.ENOSYS)
"""A kernel older than 5.14: registering brings the pages in itself."""

AHEAD_BYTES = 256 << 20
"""How far a disk works ahead of registrations, where ``mapped`` is asked for and pages are not cached."""


class RegistrationRefused(Exception):
    """A piece of a shard can't be registered, and readers can move it instead; the text says why."""


@dataclass
class _Registration:
    address: int
    length: int
    event: Any


class Registrar:
    """Maps, registers and copies for one load; used by one thread, then closed by the one that started it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        target: int,
        shards: OpenShards,
        runtime: Calls,
        ring: PinnedRing,
        announce: Announce,
    ) -> None:
        self._headers = checkpoint.shards
        self._plan, self._target, self._shards = plan, target, shards
        self._runtime, self._ring, self._announce = runtime, ring, announce
        self._maps: dict[int, FileMap] = {}
        self._locks: dict[int, int] = {}
        self._registrations: deque[_Registration] = deque()
        self.times: dict[str, int] = {"register": 0, "unregister": 0}

    def lock(self, shard: int) -> bool:
        """Return whether this load has the shard to itself; False, at once, where another one registers it.

        Raises: RegistrationRefused.
        """
        if shard in self._locks:
            return True
        duplicate = os.dup(self._shards.descriptors[shard])  # the lock outlives the load's own descriptors
        try:
            fcntl.flock(duplicate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(duplicate)
            if isinstance(error, BlockingIOError):
                return False
            where = filesystem_of(self._headers[shard].path)
            raise RegistrationRefused(f"flock refused on {where}: {describe(error)}") from error
        self._locks[shard] = duplicate
        return True

    def send(self, lane: Lane, chunks: Sequence[Chunk]) -> None:
        """Register adjoining segments of a shard and queue their copies on a lane's stream.

        Raises: RegistrationRefused; DeviceError; LoadError (``changed``) naming the file.
        """
        shard = chunks[0].segment.shard
        pieces = [(chunk.segment, list(self._plan.pieces(chunk.segment))) for chunk in chunks]
        if not any(parts for _, parts in pieces):
            return
        begun = time.monotonic_ns()
        try:
            content = self._map(shard)
            start = self._headers[shard].data_start
            first = (start + chunks[0].segment.offset) // PAGE_BYTES * PAGE_BYTES
            end = start + chunks[-1].segment.offset + chunks[-1].segment.length
            length = -(-end // PAGE_BYTES) * PAGE_BYTES - first
            if not all(chunk.is_cached for chunk in chunks):
                self._shards.ahead.keep_ahead(shard, end, AHEAD_BYTES)
                self._populate(content, shard, first, length)
            self._register(content, shard, first, length)
            self.times["register"] += time.monotonic_ns() - begun
            for segment, parts in pieces:
                source = content.address + start + segment.offset
                for offset, length, target in parts:
                    self._ring.copy(lane, source + offset, self._target + target, length)
            self._runtime("cudaEventRecord", self._registrations[-1].event, lane.stream)
        except DeviceError as error:
            self._shards.check(shard)  # where the file changed that is the reason, and the device found out first
            raise error

    def give_back(self, limit_bytes: int) -> None:
        """Unregister the oldest, once their copies are done, until no more than ``limit_bytes`` are registered."""
        registered = sum(one.length for one in self._registrations)
        while registered > limit_bytes:
            oldest = self._registrations[0]
            self._runtime("cudaEventSynchronize", oldest.event)
            registered -= oldest.length
            self._unregister(self._registrations.popleft())

    def close(self) -> None:
        """Unregister, unmap and unlock everything, even when a call fails; every copy must be over.

        Raises: the first DeviceError or OSError.
        """
        registrations, self._registrations = list(self._registrations), deque()
        maps, self._maps = self._maps, {}
        locks, self._locks = self._locks, {}
        with finally_do(
            *(partial(self._unregister, one) for one in registrations),
            *(content.close for content in maps.values()),
            *(partial(fcntl.flock, lock, fcntl.LOCK_UN) for lock in locks.values()),
            *(partial(os.close, lock) for lock in locks.values()),
        ):
            pass

    def _map(self, shard: int) -> FileMap:
        if shard not in self._maps:
            header = self._headers[shard]
            self._announce(header.path)
            try:
                self._maps[shard] = FileMap(self._shards.descriptors[shard], header.size_bytes)
            except OSError as error:
                raise RegistrationRefused(f"mmap refused on {filesystem_of(header.path)}: {describe(error)}") from error
        return self._maps[shard]

    def _populate(self, content: FileMap, shard: int, offset: int, length: int) -> None:
        """Bring in what is not cached; what is, registering finds, and says as well where a page is gone."""
        try:
            content.populate(offset, length)
        except OSError as error:
            self._shards.check(shard)
            if error.errno not in UNPOPULATED:
                text = f"{shown(self._headers[shard].path.name)}: pages can't be brought in: {describe(error)}"
                raise RegistrationRefused(text) from error

    def _register(self, content: FileMap, shard: int, offset: int, length: int) -> None:
        event = self._runtime("cudaEventCreateWithFlags", EVENT_DISABLE_TIMING)
        address = content.address + offset
        code = self._runtime.attempt("cudaHostRegister", address, length, READ_ONLY)[0]
        if int(code) == 0:
            self._registrations.append(_Registration(address, length, event))
            return
        with finally_do(partial(self._runtime, "cudaEventDestroy", event)):
            if int(code) not in REFUSALS:
                self._runtime.check("cudaHostRegister", code)
            self._runtime.attempt("cudaGetLastError")  # or the next call that asks is told of this one
            self._shards.check(shard)
            name = getattr(code, "name", str(int(code)))
            raise RegistrationRefused(f"registration refused: {name} ({int(code)}) for {length} bytes")

    def _unregister(self, registration: _Registration) -> None:
        begun = time.monotonic_ns()
        with finally_do(partial(self._runtime, "cudaEventDestroy", registration.event)):
            self._runtime("cudaHostUnregister", registration.address)
        self.times["unregister"] += time.monotonic_ns() - begun
