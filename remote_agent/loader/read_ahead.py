"""Brings ranges of files into the page cache, in folios as large as the filesystem has them.

Reads that wait in line for a disk leave single pages behind them, whichever call asks for them. Through a map that
wants huge pages the kernel asks for 2 MiB at once and caches them as one folio: copying out of those, and registering
them, takes about half the time, for this load and for every one after it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence

from remote_agent.loader.cleanup import finally_do
from remote_agent.loader.filemap import PAGE_BYTES, FileMap

BLOCK_BYTES = 8 << 20
THREADS = 8
"""As many blocks are on their way at once; these threads only wait."""


class ReadAhead:
    """The page cache of a load's open files, addressed by shard. Tells of no error: whoever reads a range is told."""

    def __init__(self, descriptors: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        self._descriptors, self._sizes = descriptors, sizes_bytes
        self._lock = threading.Lock()
        self._maps: dict[tuple[int, int], FileMap | None] = {}
        self._asked_bytes = dict.fromkeys(range(len(sizes_bytes)), 0)
        self._blocks: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def bring_in(self, shard: int, place: int, length: int) -> bool:
        """Wait until ``length`` bytes from byte ``place`` of the file are cached; may be called from any thread.

        Return whether they are for sure; else they are only asked for, and reading them tells what is the matter.
        """
        end = min(place + length, self._sizes[shard])
        first = place // PAGE_BYTES * PAGE_BYTES
        if first >= end:
            return True
        content = self._map(shard)
        if content is not None:
            try:
                content.populate(first, end - first)
                return True
            except OSError:  # cut short, unreadable, or a kernel older than 5.14
                pass
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptors[shard], first, end - first, os.POSIX_FADV_WILLNEED)
        return False

    def keep_ahead(self, shard: int, place: int, length: int) -> None:
        """Have ``length`` bytes from byte ``place`` on brought in, each asked for once; does not wait.

        For one thread that goes through a file from its beginning.
        """
        end = min(place + length, self._sizes[shard])
        first = max(place, self._asked_bytes[shard])
        self._asked_bytes[shard] = max(end, first)
        for block in range(first, end, BLOCK_BYTES):
            self._start_threads()
            self._blocks.put((shard, block, min(BLOCK_BYTES, end - block)))

    def close(self) -> None:
        """Give up what is not yet under way, wait for what is, and unmap. Raises: OSError"""
        threads, self._threads = self._threads, []
        while not self._blocks.empty():
            try:
                self._blocks.get_nowait()
            except queue.Empty:  # a thread was quicker
                break
        for _ in threads:
            self._blocks.put(None)
        for thread in threads:
            thread.join()
        maps, self._maps = self._maps, {}
        with finally_do(*(content.close for content in maps.values() if content is not None)):
            pass

    def _start_threads(self) -> None:
        while len(self._threads) < THREADS:
            thread = threading.Thread(target=self._work, name=f"read-ahead-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # fewer will do, or none: whoever reads waits a little longer
                return
            self._threads.append(thread)

    def _work(self) -> None:
        while (block := self._blocks.get()) is not None:
            self.bring_in(*block)

    def _map(self, shard: int) -> FileMap | None:
        """Return this thread's map of a shard; None where it can't be mapped."""
        key = (threading.get_ident(), shard)
        if key not in self._maps:
            content: FileMap | None
            try:
                content = self._open(shard)
                content.expect_random_reads()  # what lies ahead is another thread's
            except OSError:  # a filesystem without maps, or no address space
                content = None
            with self._lock:
                self._maps[key] = content
        return self._maps[key]

    def _open(self, shard: int) -> FileMap:
        try:
            descriptor = os.open(f"/proc/self/fd/{self._descriptors[shard]}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no ``/proc``, or no descriptor left: sharing is slower and no fault
            return FileMap(self._descriptors[shard], self._sizes[shard])
        try:
            return FileMap(descriptor, self._sizes[shard])
        finally:
            os.close(descriptor)
