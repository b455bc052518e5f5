"""The CPU's ``mapped`` path: tensors are views over the files themselves.

Maps are private and copy on write, so nothing can reach the file. Every page that is not in the page
cache is brought in during the load (the kernel reports a page that can't be read, where touching it
would kill the process), so a file cut short fails the load by name. Pages that are there enter the page
tables as they are used, many at once, which takes less than to have the kernel walk them beforehand.
A file cut after the load is beyond help either way.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from remote_agent.errors import LoadError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.filemap import MADV_HUGEPAGE, address_of, populate
from remote_agent.loader.headers import Header
from remote_agent.loader.problems import shown
from remote_agent.loader.progress import Announce, Progress, Tally
from remote_agent.loader.residency import measure_ranges
from remote_agent.loader.shards import OpenShards

BLOCK_BYTES = 8 << 20
CACHED_BLOCK_BYTES = 64 << 20
"""What is cached takes some ten microseconds a megabyte: less at once would be spent on handing out blocks."""

THREADS = 8
"""As many blocks are brought in at once: of cached pages processors make the page tables, for others threads wait."""

CEILING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """``length`` bytes from ``offset`` of a shard's file, and whether the page cache held the whole file."""

    shard: int
    offset: int
    length: int
    is_cached: bool


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
    maps = []
    for header, descriptor in zip(checkpoint.shards, shards.descriptors, strict=True):
        announce(header.path)
        maps.append(_map(header, descriptor))
    blocks: list[Block] = []
    for shard, header in enumerate(checkpoint.shards):
        found = measure_ranges(header, shards.descriptors[shard])
        cut = _cut(shard, header.size_bytes, found.is_whole)
        blocks += [block for block in cut if not found.has_every_page(block.offset, block.length)]
    _bring_in_all(checkpoint.shards, shards, list(map(address_of, maps)), blocks, progress)
    for content in maps:
        content.madvise(mmap.MADV_NORMAL)  # for pages that the kernel drops and reads again
    return maps, sum(block.length for block in blocks)


def measure_map_ceiling(checkpoint: Checkpoint, shards: OpenShards) -> float | None:
    """Return the bytes a second at which this path brings in pages that are cached already: what no disk is part of.

    At most `CEILING_BYTES` are brought in. None where that can't be done once more: the load itself is over.
    """
    headers = [(header, shard) for shard, header in enumerate(checkpoint.shards) if header.data_bytes]
    if not headers:
        return None
    header, shard = max(headers, key=lambda item: item[0].data_bytes)
    length = min(header.size_bytes, CEILING_BYTES)
    blocks = _cut(shard, length, is_cached=True)
    try:
        with _map(header, shards.descriptors[shard]) as content:
            begun = time.perf_counter_ns()
            addresses = [address_of(content)] * len(checkpoint.shards)
            _bring_in_all(checkpoint.shards, shards, addresses, blocks, lambda done, total: None)
            taken_ns = time.perf_counter_ns() - begun
    except (MapRefused, LoadError):
        return None
    return length / max(taken_ns, 1) * 1e9


def _cut(shard: int, length: int, is_cached: bool) -> list[Block]:
    step = CACHED_BLOCK_BYTES if is_cached else BLOCK_BYTES
    return [Block(shard, offset, min(step, length - offset), is_cached) for offset in range(0, length, step)]


def _bring_in_all(
    headers: Sequence[Header],
    shards: OpenShards,
    addresses: Sequence[int],
    blocks: Sequence[Block],
    progress: Progress,
) -> None:
    """Bring in every block of the maps at ``addresses``, several at once.

    Raises: MapRefused, LoadError, or what ``progress`` raised.
    """

    def data_bytes_of(block: Block) -> int:
        return max(0, block.offset + block.length - max(block.offset, headers[block.shard].data_start))

    left = iter(blocks)
    lock = threading.Lock()
    tally = Tally(sum(header.data_bytes for header in headers))
    progress(0, tally.total)
    tally.add(tally.total - sum(data_bytes_of(block) for block in blocks))

    def work() -> None:
        try:
            while not tally.stop.is_set():
                with lock:
                    block = next(left, None)
                if block is None:
                    return
                _bring_in(addresses[block.shard], shards, headers[block.shard], block)
                tally.add(data_bytes_of(block))
        except BaseException as error:
            tally.fail(error)

    threads = []
    for number in range(min(THREADS, len(blocks))):
        thread = threading.Thread(target=work, name=f"load-map-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # fewer will do
            break
        threads.append(thread)
    if not threads:
        work()
    tally.watch(threads, progress)


def _map(header: Header, descriptor: int) -> mmap.mmap:
    try:
        content = mmap.mmap(descriptor, header.size_bytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise LoadError(
                f"{_name(header)}: no address space for {header.size_bytes} bytes", "out_of_memory"
            ) from error
        raise MapRefused(header, error) from error
    except ValueError as error:  # the file is shorter than the map would be
        raise LoadError(f"{_name(header)}: is shorter than the {header.size_bytes} bytes it had", "changed") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages brings in small ones
        content.madvise(MADV_HUGEPAGE)
    content.madvise(mmap.MADV_RANDOM)  # what lies ahead is another thread's
    return content


def _bring_in(address: int, shards: OpenShards, header: Header, block: Block) -> None:
    if not block.is_cached:
        shards.ahead.bring_in(block.shard, block.offset, block.length)
    try:
        populate(address + block.offset, block.length)
    except OSError as error:
        # Either the file is cut short or the disk fails, and reading it says which; or the kernel
        # is older than 5.14, where reading is as good; or this filesystem can only be read.
        _read_through(shards, header, block)
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise MapRefused(header, error) from error


def _read_through(shards: OpenShards, header: Header, block: Block) -> None:
    """Read a block and drop it; a file cut short or a failing disk is named by whoever reads."""
    first, end = max(block.offset, header.data_start), block.offset + block.length
    view = memoryview(bytearray(min(4 << 20, block.length)))
    while first < end:
        part = view[: min(len(view), end - first)]
        shards.read(block.shard, first - header.data_start, part)
        first += len(part)


def _name(header: Header) -> str:
    return shown(str(header.path), 400)
