"""Reads past the page cache (O_DIRECT), which leaves the cache as it was and suits a disk best.

Address, offset and length of such a read are multiples of a block, so a range is widened to whole
blocks; only the end of the file may cut a read short. Several processes that load one model each
read the disk for themselves this way: where they are on one host, ``page_cache = keep`` is right,
since then the first one's reads are the others' cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence

from remote_agent.errors import LoadError
from remote_agent.loader.files import READ_LIMIT_BYTES, describe
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.headers import Header
from remote_agent.loader.plan import Segment
from remote_agent.loader.shards import OpenShards

BLOCK_BYTES = 4096
"""What offsets and lengths are multiples of: at least the block of every disk and filesystem in use."""

REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT)


class DirectRefused(Exception):
    """A filesystem does not read past its cache; the text names it and what it said."""


class DirectShards:
    """The shards of a load, opened once more for reads past the page cache; closed by `close`.

    ``refusal`` says why the first shard that refused did; other shards may still be read.
    """

    def __init__(self, headers: Sequence[Header], shards: OpenShards) -> None:
        self._headers, self._shards = headers, shards
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        self._refusals: dict[int, DirectRefused] = {}

    @property
    def refusal(self) -> str | None:
        return next((str(refusal) for refusal in self._refusals.values()), None)

    def read(self, segment: Segment, view: memoryview) -> int:
        """Read a segment into ``view``, which begins on a block, and return where in it the segment begins.

        ``view`` must hold the segment widened to whole blocks. May be called from any thread.
        Raises: DirectRefused; LoadError naming the file and the place.
        """
        start = self._headers[segment.shard].data_start + segment.offset
        first = start // BLOCK_BYTES * BLOCK_BYTES
        end = start + segment.length
        widened = -(-(end - first) // BLOCK_BYTES) * BLOCK_BYTES
        if widened > len(view):
            raise self._refuse(segment.shard, f"{widened} bytes of whole blocks do not fit a buffer of {len(view)}")
        descriptor = self._open(segment.shard)
        try:
            got = _read_blocks(descriptor, first, view[:widened], end - first)
        except OSError as error:
            if error.errno in REFUSALS:
                raise self._refuse(segment.shard, describe(error)) from error
            raise self._shards.unreadable(segment.shard, first, error) from error
        if got < end - first:
            raise self._shards.ended_early(segment.shard, first + got)
        return start - first

    def close(self) -> None:
        descriptors, self._descriptors = self._descriptors, {}
        for descriptor in descriptors.values():
            os.close(descriptor)

    def _open(self, shard: int) -> int:
        """Return a descriptor of the very file that was checked, whatever its name leads to now."""
        with self._lock:
            if shard in self._refusals:
                raise self._refusals[shard]
            if shard not in self._descriptors:
                name = f"/proc/self/fd/{self._shards.descriptors[shard]}"
                try:
                    self._descriptors[shard] = os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                except OSError as error:
                    raise self._refuse_locked(shard, describe(error)) from error
            return self._descriptors[shard]

    def _refuse(self, shard: int, why: str) -> DirectRefused:
        with self._lock:
            return self._refuse_locked(shard, why)

    def _refuse_locked(self, shard: int, why: str) -> DirectRefused:
        where = filesystem_of(self._headers[shard].path)
        return self._refusals.setdefault(shard, DirectRefused(f"O_DIRECT refused on {where}: {why}"))


def _read_blocks(descriptor: int, offset: int, view: memoryview, wanted: int) -> int:
    """Fill ``view`` from ``offset`` until ``wanted`` bytes are there and return how many came. Raises: OSError."""
    limit = READ_LIMIT_BYTES // BLOCK_BYTES * BLOCK_BYTES
    done = 0
    while done < wanted:
        # a read that came up short inside a block is done again from that block on
        done = done // BLOCK_BYTES * BLOCK_BYTES
        got = os.preadv(descriptor, [view[done : done + limit]], offset + done)
        if done + got >= wanted or got < BLOCK_BYTES:
            return done + got
        done += got
    return done


def aligned_memory(size_bytes: int) -> memoryview:
    """Return memory that begins on a page and is given back with its last view. Raises: LoadError if there is none."""
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE)
    except OSError as error:
        raise LoadError(f"{size_bytes} bytes of memory to read into could not be had: {describe(error)}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages; a disk gets fewer, larger requests with them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def copy_out(source: memoryview, address: int) -> None:
    """Copy writable ``source`` to ``address``; other threads run Python meanwhile."""
    ctypes.memmove(address, ctypes.addressof(ctypes.c_ubyte.from_buffer(source)), len(source))
