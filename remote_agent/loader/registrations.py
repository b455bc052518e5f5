"""Pieces of shards that a GPU may read where they lie: mapped read-only, registered, and given back by `close`.

No page is touched: one that can't be brought in is an error of the kernel's, not a signal. Pieces never overlap.
A load keeps its own until its copies are over; a process that waits keeps them for loads to come.

Several processes that register one file at once hang in some drivers or run out of memory, so a
shard is registered under an exclusive ``flock`` of the shard itself: that is one lock for every
user and container that sees the file, needs no write permission, and ends with its process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.loader.cleanup import finally_do, on_failure
from remote_agent.loader.filemap import PAGE_BYTES, FileMap
from remote_agent.loader.files import describe
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.headers import Header
from remote_agent.loader.plan import round_up
from remote_agent.loader.problems import shown
from remote_agent.loader.progress import Announce, Progress
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

LOCK_WAIT_S, LOCK_POLL_S = 30.0, 0.01


class RegistrationRefused(Exception):
    """A piece of a shard can't be registered, and readers can move it instead; the text says why."""


class Piece(NamedTuple):
    """Bytes ``first..end`` of a file, whole pages."""

    first: int
    end: int


class Registrations:
    """Registered pieces of one checkpoint's shards, which have ``headers``; used by one thread at a time.

    ``ceiling_bytes_s``: what the link gave to pinned copies before any load from here; None where nobody measured.
    """

    def __init__(self, headers: Sequence[Header], runtime: Calls, announce: Announce) -> None:
        self.headers, self._runtime, self._announce = headers, runtime, announce
        self._maps: dict[int, FileMap] = {}
        self._locks: dict[int, int] = {}
        self._pieces: dict[int, list[Piece]] = {}
        self.identities = tuple(header.identity for header in headers)
        self.ceiling_bytes_s: float | None = None

    @property
    def count(self) -> int:
        return sum(len(pieces) for pieces in self._pieces.values())

    @property
    def size_bytes(self) -> int:
        """Return how much of the host's memory can't be reclaimed for as long as this lives."""
        return sum(piece.end - piece.first for pieces in self._pieces.values() for piece in pieces)

    def lock(self, shards: OpenShards, shard: int) -> bool:
        """Return whether this process has the shard to itself; False, at once, where another one registers it.

        Raises: RegistrationRefused.
        """
        if shard in self._locks:
            return True
        duplicate = os.dup(shards.descriptors[shard])  # the lock outlives the load's own descriptors
        try:
            fcntl.flock(duplicate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(duplicate)
            if isinstance(error, BlockingIOError):
                return False
            where = filesystem_of(self.headers[shard].path)
            raise RegistrationRefused(f"flock refused on {where}: {describe(error)}") from error
        self._locks[shard] = duplicate
        return True

    def unlock(self, shard: int) -> None:
        """Let others register the shard; what is registered here stays."""
        lock = self._locks.pop(shard, None)
        if lock is not None:
            with finally_do(partial(fcntl.flock, lock, fcntl.LOCK_UN), partial(os.close, lock)):
                pass

    def missing(self, shard: int, wanted: Piece) -> list[Piece]:
        """Return what of ``wanted`` is not registered."""
        gaps, place = [], wanted.first
        pieces = self._pieces.get(shard, [])
        for piece in islice(pieces, bisect_right(pieces, place, key=attrgetter("end")), None):
            if piece.first >= wanted.end:
                break
            if piece.first > place:
                gaps.append(Piece(place, piece.first))
            place = piece.end
        return [*gaps, Piece(place, wanted.end)] if place < wanted.end else gaps

    def register(self, shards: OpenShards, shard: int, piece: Piece, is_cached: bool) -> None:
        """Register a piece of a locked shard that nothing registered overlaps.

        Raises: RegistrationRefused; DeviceError; LoadError (``changed``) naming the file.
        """
        content = self._map(shards, shard)
        length = piece.end - piece.first
        if not is_cached:
            self._populate(content, shards, shard, piece)
        code = self._runtime.attempt("cudaHostRegister", content.address + piece.first, length, READ_ONLY)[0]
        if int(code) == 0:
            insort(self._pieces.setdefault(shard, []), piece)
            return
        if int(code) not in REFUSALS:
            self._runtime.check("cudaHostRegister", code)
        self._runtime.attempt("cudaGetLastError")  # or the next call that asks is told of this one
        shards.check(shard)
        name = getattr(code, "name", str(int(code)))
        raise RegistrationRefused(f"registration refused: {name} ({int(code)}) for {length} bytes")

    def sources(self, shard: int, place: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield ``(address, length)`` of what covers registered bytes of a file, none across two registrations."""
        pieces, end = self._pieces[shard], place + length
        position = bisect_right(pieces, place, key=attrgetter("end"))
        while place < end:
            last = min(end, pieces[position].end)
            yield self._maps[shard].address + place, last - place
            place, position = last, position + 1

    def give_back(self, shard: int, piece: Piece) -> None:
        """Unregister one piece; no copy out of it may be under way."""
        self._pieces[shard].remove(piece)
        self._runtime("cudaHostUnregister", self._maps[shard].address + piece.first)

    def close(self) -> None:
        """Unregister, unmap and unlock everything, even when a call fails; every copy must be over.

        Raises: the first DeviceError or OSError.
        """
        left, self._pieces = self._pieces, {}
        maps, self._maps = self._maps, {}
        addresses = [maps[shard].address + piece.first for shard, pieces in left.items() for piece in pieces]
        with finally_do(
            *(partial(self._runtime, "cudaHostUnregister", address) for address in addresses),
            *(content.close for content in maps.values()),
            *(partial(self.unlock, shard) for shard in list(self._locks)),
        ):
            pass

    def _map(self, shards: OpenShards, shard: int) -> FileMap:
        if shard not in self._maps:
            header = self.headers[shard]
            self._announce(header.path)
            try:
                self._maps[shard] = FileMap(shards.descriptors[shard], header.size_bytes)
            except OSError as error:
                raise RegistrationRefused(f"mmap refused on {filesystem_of(header.path)}: {describe(error)}") from error
        return self._maps[shard]

    def _populate(self, content: FileMap, shards: OpenShards, shard: int, piece: Piece) -> None:
        """Bring in what is not cached; what is, registering finds, and says as well where a page is gone."""
        try:
            content.populate(piece.first, piece.end - piece.first)
        except OSError as error:
            shards.check(shard)
            if error.errno not in UNPOPULATED:
                text = f"{shown(self.headers[shard].path.name)}: pages can't be brought in: {describe(error)}"
                raise RegistrationRefused(text) from error


def pages_of(header: Header, offset: int, length: int) -> Piece:
    """Return the whole pages of the file around bytes ``offset..offset+length`` of its data section."""
    first, end = header.data_start + offset, header.data_start + offset + length
    return Piece(first // PAGE_BYTES * PAGE_BYTES, round_up(end, PAGE_BYTES))


def register_all(
    headers: Sequence[Header],
    shards: OpenShards,
    runtime: Calls,
    step_bytes: int,
    progress: Progress,
    announce: Announce,
) -> Registrations:
    """Return every data section registered, in steps; other processes may register the same files afterwards.

    Waits while another process registers a shard. Nothing stays registered when this raises.
    Raises: RegistrationRefused; DeviceError; LoadError (``changed``) naming the file.
    """
    found = Registrations(headers, runtime, announce)
    total = sum(header.data_bytes for header in headers)
    done = 0
    with on_failure(found.close):
        for shard, header in enumerate(headers):
            if not header.data_bytes:
                continue
            _wait_for_lock(found, shards, shard, header)
            whole = pages_of(header, 0, header.data_bytes)
            for start in range(whole.first // step_bytes * step_bytes, whole.end, step_bytes):
                piece = Piece(max(start, whole.first), min(start + step_bytes, whole.end))
                found.register(shards, shard, piece, is_cached=True)
                done += piece.end - piece.first
                progress(min(done, total), total)
            found.unlock(shard)
    return found


def _wait_for_lock(found: Registrations, shards: OpenShards, shard: int, header: Header) -> None:
    give_up = time.monotonic() + LOCK_WAIT_S
    while not found.lock(shards, shard):
        if time.monotonic() > give_up:
            name = shown(header.path.name)
            raise RegistrationRefused(
                f"registration refused: {name} is registered by another load for {LOCK_WAIT_S:g} s"
            )
        time.sleep(LOCK_POLL_S)
