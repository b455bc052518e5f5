"""Brings the shards of a checkpoint into the page cache, several ranges at once, as a cold load does."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from remote_agent.errors import LoadError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.plan import Segment, cut_segments
from remote_agent.loader.progress import Progress, Tally
from remote_agent.loader.read_ahead import BLOCK_BYTES, THREADS
from remote_agent.loader.residency import RangeResidency, measure_ranges
from remote_agent.loader.shards import OpenShards

PART_BYTES = 1 << 20
"""What could not be brought in is read in such parts, into memory that is used again: reading tells why."""


@dataclass(frozen=True)
class BroughtIn:
    """Bytes of the data sections: ``cached_bytes`` lay in the page cache before, ``read_bytes`` were read into it."""

    cached_bytes: int
    read_bytes: int
    duration_ns: int

    @property
    def rate_bytes_s(self) -> float | None:
        """Return how fast was read; None where nothing had to be."""
        return self.read_bytes / max(self.duration_ns, 1) * 1e9 if self.read_bytes else None


def bring_in(checkpoint: Checkpoint, shards: OpenShards, progress: Progress) -> BroughtIn:
    """Read every data section that the page cache does not hold; what it holds is left alone.

    Raises: LoadError naming the file, or what ``progress`` raised.
    """
    begun = time.monotonic_ns()
    found = [
        measure_ranges(header, descriptor)
        for header, descriptor in zip(checkpoint.shards, shards.descriptors, strict=True)
    ]
    segments = cut_segments(checkpoint, BLOCK_BYTES)
    missing = [segment for segment in segments if not _is_cached(segment, checkpoint, found)]
    total = sum(segment.length for segment in segments)
    read_bytes = sum(segment.length for segment in missing)
    tally = Tally(total)
    tally.add(total - read_bytes)
    _read_all(checkpoint, shards, missing, tally, progress)
    return BroughtIn(total - read_bytes, read_bytes, time.monotonic_ns() - begun)


def _is_cached(segment: Segment, checkpoint: Checkpoint, found: Sequence[RangeResidency]) -> bool:
    residency = found[segment.shard]
    start = checkpoint.shards[segment.shard].data_start + segment.offset
    return residency.is_whole or residency.is_cached(start, segment.length)


def _read_all(
    checkpoint: Checkpoint, shards: OpenShards, segments: Sequence[Segment], tally: Tally, progress: Progress
) -> None:
    """Read ``segments`` in threads that are all over when this returns or raises."""
    left = deque(segments)
    starts = [header.data_start for header in checkpoint.shards]

    def read() -> None:
        buffer = memoryview(bytearray(PART_BYTES))
        try:
            while not tally.stop.is_set():
                try:
                    segment = left.popleft()
                except IndexError:
                    return
                place = starts[segment.shard] + segment.offset
                is_there = shards.ahead.bring_in(segment.shard, place, segment.length)
                for done in range(0, 0 if is_there else segment.length, PART_BYTES):
                    part = buffer[: min(PART_BYTES, segment.length - done)]
                    shards.read(segment.shard, segment.offset + done, part)
                tally.add(segment.length)
        except BaseException as error:
            tally.fail(error)

    threads: list[threading.Thread] = []
    try:
        for number in range(min(THREADS, len(segments))):
            thread = threading.Thread(target=read, name=f"cache-reader-{number}", daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        if not threads:
            raise LoadError(f"no thread could be started to read: {error}") from error
    try:
        tally.watch(threads, progress)
    finally:
        tally.stop.set()
        for thread in threads:
            thread.join()
