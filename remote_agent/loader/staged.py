"""Readers: threads that bring segments into pinned buffers, for another thread to send on.

Through the page cache (``staged``) or past it (``direct``), then by way of a reader's own memory: a disk wants more
bytes on their way than are pinned. None of them makes a CUDA call: a driver has locks
that a registration holds for a millisecond, and a reader that waited for one would read nothing meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.errors import LoadError
from remote_agent.loader.direct import BLOCK_BYTES, DirectRefused, DirectShards, aligned_memory, copy_out
from remote_agent.loader.numa import bind_thread
from remote_agent.loader.plan import round_up

if TYPE_CHECKING:
    from remote_agent.loader.headers import Header
    from remote_agent.loader.plan import Segment
    from remote_agent.loader.progress import Tally
    from remote_agent.loader.ring import Buffer
    from remote_agent.loader.schedule import Chunk, SegmentQueue
    from remote_agent.loader.shards import OpenShards


FIRST_READ_BYTES = 1 << 20
"""The most that a reader's first read into its own memory asks for: the kernel clears that memory before it, and until
then the disk has nothing to do."""


class Full(NamedTuple):
    """A buffer that begins with ``segment``; ``way`` is how it came there."""

    buffer: Buffer
    segment: Segment
    way: str


class Readers:
    """The reader threads of one load. They take buffers out of ``free``, and put them into ``full``; None there says
    that a reader has ended. Whoever sends them puts them into ``free`` again.

    ``direct`` is None where every read goes through the page cache; with ``all_direct`` cached
    segments are read past it too.
    """

    def __init__(
        self,
        headers: tuple[Header, ...],
        shards: OpenShards,
        queue: SegmentQueue,
        tally: Tally,
        direct: DirectShards | None,
        all_direct: bool,
        processors: frozenset[int] | None,
    ) -> None:
        self._headers, self._shards, self._queue, self._tally = headers, shards, queue, tally
        self._direct, self._all_direct, self._processors = direct, all_direct, processors
        self._threads: list[threading.Thread] = []
        self._times: list[dict[str, int]] = []
        self._begin = threading.Event()
        self.free: SimpleQueue[Buffer | None] = SimpleQueue()
        self.full: SimpleQueue[Full | None] = SimpleQueue()

    def start(self, buffers: Sequence[Buffer], count: int, cached_first: int) -> int:
        """Start ``count`` threads that share ``buffers``, and return how many there are.

        The first ``cached_first`` prefer what is cached. Raises: LoadError if a thread or its memory can't be had.
        """
        size = len(buffers[0].view)
        stride = round_up(size, BLOCK_BYTES)
        memory = None if self._direct is None else aligned_memory(count * stride)
        for buffer in buffers:
            self.free.put(buffer)
        for number in range(count):
            own = None if memory is None else memory[number * stride : number * stride + size]
            body = threading.Thread(
                target=self._run, args=(number < cached_first, own), name=f"load-reader-{number}", daemon=True
            )
            try:
                body.start()
            except RuntimeError as error:
                raise LoadError(f"thread {number + 1} of {count} could not be started: {error}") from error
            self._threads.append(body)
        self._begin.set()
        return count

    def stop(self) -> None:
        """Have no more read, and wait until every thread has ended."""
        self._tally.stop.set()
        self._queue.stop()
        self._begin.set()
        for _ in self._threads:
            self.free.put(None)
        for thread in self._threads:
            thread.join()

    def steps(self) -> dict[str, int]:
        """Return the nanoseconds of each step, summed over the threads, once they have ended."""
        return {step: sum(times[step] for times in self._times) for step in ("wait", "read")}

    def _run(self, prefers_cached: bool, own: memoryview | None) -> None:
        """Fill buffers until no segment is left; a thread's body, so it never raises. ``own``: its memory.

        None reads before the last one is there: to start a thread takes the address space's lock, which reads hold.
        """
        times = {"wait": 0, "read": 0}
        self._times.append(times)
        try:
            bind_thread(self._processors)
            self._begin.wait()
            self._fill(prefers_cached, own, times)
        except BaseException as error:
            self._tally.fail(error)
        finally:
            self.full.put(None)

    def _fill(self, prefers_cached: bool, own: memoryview | None, times: dict[str, int]) -> None:
        stop, now_ns = self._tally.stop.is_set, time.monotonic_ns
        max_bytes = FIRST_READ_BYTES if own is not None else None
        while (chunk := self._queue.take(prefers_cached, max_bytes)) is not None:
            begun = now_ns()
            found = self._bring_in(chunk, own)
            if found is not None or not chunk.is_cached:
                max_bytes = None
            brought = now_ns()
            buffer = self.free.get()
            if buffer is None or stop():
                return
            free = now_ns()
            self.full.put(Full(buffer, chunk.segment, self._put(chunk.segment, found, buffer)))
            times["wait"] += free - brought
            times["read"] += now_ns() - free + brought - begun

    def _bring_in(self, chunk: Chunk, own: memoryview | None) -> memoryview | None:
        """Wait for the disk, which takes no buffer: more bytes can be on their way from it than fit those.

        Return the segment in ``own``, this thread's memory, where it was read past the page cache, which else has it.
        """
        segment = chunk.segment
        if self._direct is not None and own is not None and (self._all_direct or not chunk.is_cached):
            try:
                start = self._direct.read(segment, own)
                return own[start : start + segment.length]
            except DirectRefused:  # `DirectShards.refusal` tells
                pass
        if not chunk.is_cached:
            place = self._headers[segment.shard].data_start + segment.offset
            self._shards.ahead.bring_in(segment.shard, place, segment.length)  # the kernel alone stays little ahead
        return None

    def _put(self, segment: Segment, found: memoryview | None, buffer: Buffer) -> str:
        """Fill a buffer from where the segment is, and return the way it came."""
        if found is None:
            self._shards.read(segment.shard, segment.offset, buffer.view[: segment.length])
            return "staged"
        copy_out(found, buffer.address)
        return "direct"
