"""What the disk and the page cache give to readers that do nothing else."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path

from remote_agent.loader.direct import aligned_memory
from remote_agent.loader.read_ahead import ReadAhead
from remote_agent.loader.staged import FIRST_READ_BYTES

THREADS = 128
READ_BYTES = 8 << 20
"""What gave the most of those tried: 16 threads of 4 MiB in small pages had a quarter less of the same disk."""

FILL_THREADS = 16
FILL_BYTES = 4 << 20
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def time_raw_read(shards: Sequence[Path], is_direct: bool) -> float:
    """Return the seconds that `THREADS` threads take to read every byte, past the page cache or through it.

    Reads are of `READ_BYTES`, into memory in huge pages; past the page cache the first `THREADS` are of
    `FIRST_READ_BYTES`, while that is cleared. None begins before all threads are there. Raises: OSError of the first
    thread that fails.
    """
    work: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
    flags = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
    descriptors = [os.open(shard, flags) for shard in shards]
    lengths = chain(repeat(FIRST_READ_BYTES, THREADS if is_direct else 0), repeat(READ_BYTES))
    for descriptor in descriptors:
        offset, size = 0, os.fstat(descriptor).st_size
        while offset < size:
            length = next(lengths)
            work.put((descriptor, offset, length))
            offset += length
    errors: list[OSError] = []
    memory, go = aligned_memory(THREADS * READ_BYTES), threading.Event()
    parts = [memory[start : start + READ_BYTES] for start in range(0, len(memory), READ_BYTES)]
    threads = [threading.Thread(target=_read, args=(work, is_direct, part, go, errors)) for part in parts]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - begun
    for descriptor in descriptors:
        os.close(descriptor)
    if errors:
        raise errors[0]
    return taken


def drop_page_cache(shards: Sequence[Path]) -> str:
    """Have the kernel forget the shards, with everything else where that is allowed; return which way was taken."""
    for shard in shards:
        descriptor = os.open(shard, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    try:
        DROP_CACHES.write_text("1")
    except OSError:
        return "fadvise"
    return "drop_caches"


def refill_page_cache(shards: Sequence[Path]) -> dict[str, object]:
    """Have every byte of the shards cached as a load leaves it, whatever brought it in before; return what it took."""
    dropped = drop_page_cache(shards)
    begun = time.perf_counter()
    fill_page_cache(shards)
    return {"dropped": dropped, "read_s": round(time.perf_counter() - begun, 3)}


def fill_page_cache(shards: Sequence[Path]) -> None:
    """Bring every byte of the shards into the page cache, in folios as large as a load leaves: see `bench.folios`."""
    descriptors = [os.open(shard, os.O_RDONLY) for shard in shards]
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
    bring_in(descriptors, sizes, FILL_THREADS)
    for descriptor in descriptors:
        os.close(descriptor)


def _read(
    work: queue.SimpleQueue[tuple[int, int, int]],
    is_direct: bool,
    buffer: memoryview,
    go: threading.Event,
    errors: list[OSError],
) -> None:
    go.wait()
    while not errors:
        try:
            descriptor, offset, length = work.get_nowait()
        except queue.Empty:
            return
        try:
            if not is_direct:
                os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)
            os.preadv(descriptor, [buffer[:length]], offset)
        except OSError as error:
            errors.append(error)


def bring_in(descriptors: Sequence[int], sizes_bytes: Sequence[int], threads: int) -> None:
    """Have the page cache hold every byte of open files, brought in by ``threads`` at once as a load does it."""
    ahead = ReadAhead(descriptors, sizes_bytes)
    blocks = [(n, place, FILL_BYTES) for n, size in enumerate(sizes_bytes) for place in range(0, size, FILL_BYTES)]
    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda block: ahead.bring_in(*block), blocks):
                pass
    finally:
        ahead.close()
