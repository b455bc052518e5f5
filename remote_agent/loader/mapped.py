"""The CPU's ``mapped`` path: tensors are views over the files themselves.

Maps are private and copy on write, so nothing can reach the file. Every page that is not in the page
cache is brought in during the load (the kernel reports a page that can't be read, where touching it
would kill the process), so a file cut short fails the load by name. Pages that are there enter the page
tables as they are used, many at once, which takes less than to have the kernel walk them beforehand.
A file cut after the load is beyond help either way.
"""

from __future__ import annotations

import errno
import mmap
import os
import time

from remote_agent.errors import LoadError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.filemap import MADV_POPULATE_READ
from remote_agent.loader.headers import Header
from remote_agent.loader.problems import shown
from remote_agent.loader.progress import Announce, Progress
from remote_agent.loader.residency import measure_ranges
from remote_agent.loader.shards import OpenShards

BLOCK_BYTES = 32 << 20
AHEAD_BLOCKS = 4
"""How far the disk is asked to work ahead of the page tables."""

CEILING_BYTES = 256 << 20


class MapRefused(Exception):
    """A filesystem does not map files; ``error`` is what it said."""

    def __init__(self, header: Header, error: OSError) -> None:
        super().__init__(str(error))
        self.header = header
        self.error = error


def map_shards(
    checkpoint: Checkpoint, shards: OpenShards, progress: Progress, announce: Announce
) -> tuple[list[mmap.mmap], int]:
    """Return one map for each shard with every page of it in memory, and how many bytes were brought in for that.

    Raises: MapRefused, LoadError, or what ``progress`` raised.
    """
    total = sum(header.data_bytes for header in checkpoint.shards)
    brought_in = 0
    maps = [_map(header, descriptor) for header, descriptor in zip(checkpoint.shards, shards.descriptors, strict=True)]
    before = 0
    for shard, (header, content) in enumerate(zip(checkpoint.shards, maps, strict=True)):
        announce(header.path)
        cached = measure_ranges(header, shards.descriptors[shard])
        for offset in range(0, header.size_bytes, BLOCK_BYTES):
            length = min(BLOCK_BYTES, header.size_bytes - offset)
            if not cached.has_every_page(offset, length):
                _bring_in(content, shards, shard, header, offset, length)
                brought_in += length
            progress(before + max(0, offset + length - header.data_start), total)
        before += header.data_bytes
    return maps, brought_in


def measure_map_ceiling(checkpoint: Checkpoint, shards: OpenShards) -> float | None:
    """Return the bytes a second at which this path brings in pages that are cached already: what no disk is part of.

    At most `CEILING_BYTES` are brought in. None where that can't be done once more: the load itself is over.
    """
    headers = [(header, shard) for shard, header in enumerate(checkpoint.shards) if header.data_bytes]
    if not headers:
        return None
    header, shard = max(headers, key=lambda item: item[0].data_bytes)
    length = min(header.size_bytes, CEILING_BYTES)
    try:
        with _map(header, shards.descriptors[shard]) as content:
            begun = time.perf_counter_ns()
            _bring_in(content, shards, shard, header, 0, length)
            taken_ns = time.perf_counter_ns() - begun
    except (MapRefused, LoadError):
        return None
    return length / max(taken_ns, 1) * 1e9


def _map(header: Header, descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, header.size_bytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise LoadError(
                f"{_name(header)}: no address space for {header.size_bytes} bytes", "out_of_memory"
            ) from error
        raise MapRefused(header, error) from error
    except ValueError as error:  # the file is shorter than the map would be
        raise LoadError(f"{_name(header)}: is shorter than the {header.size_bytes} bytes it had", "changed") from error


def _bring_in(content: mmap.mmap, shards: OpenShards, shard: int, header: Header, offset: int, length: int) -> None:
    ahead = offset + length
    if ahead < header.size_bytes:
        os.posix_fadvise(shards.descriptors[shard], ahead, AHEAD_BLOCKS * BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
    try:
        content.madvise(MADV_POPULATE_READ, offset, length)
    except OSError as error:
        # Either the file is cut short or the disk fails, and reading it says which; or the kernel
        # is older than 5.14, where reading is as good; or this filesystem can only be read.
        _read_through(shards, shard, header, offset, length)
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise MapRefused(header, error) from error


def _read_through(shards: OpenShards, shard: int, header: Header, offset: int, length: int) -> None:
    """Read a block and drop it; a file cut short or a failing disk is named by whoever reads."""
    first = max(offset, header.data_start)
    view = memoryview(bytearray(min(4 << 20, length)))
    while first < offset + length:
        part = view[: min(len(view), offset + length - first)]
        shards.read(shard, first - header.data_start, part)
        first += len(part)


def _name(header: Header) -> str:
    return shown(str(header.path), 400)
