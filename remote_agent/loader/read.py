"""The CPU's other paths: ``read``, through the page cache, and ``direct``, past it, into memory of its own."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from remote_agent.errors import LoadError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.direct import DirectRefused, DirectShards, aligned_memory
from remote_agent.loader.plan import Plan, Segment, cut_segments
from remote_agent.loader.progress import Progress
from remote_agent.loader.shards import OpenShards

if TYPE_CHECKING:
    import torch

READ_BYTES = 8 << 20
CEILING_BYTES = 32 << 20


def read_shards(
    checkpoint: Checkpoint,
    plan: Plan,
    target: torch.Tensor,
    shards: OpenShards,
    progress: Progress,
    direct: DirectShards | None = None,
    is_direct: Callable[[Segment], bool] = lambda segment: True,
) -> dict[str, int]:
    """Read every planned byte into ``target``, a uint8 tensor on the CPU, and return the bytes by way.

    With ``direct``, segments for which ``is_direct`` holds are read past the page cache, where the
    filesystem does that. Raises: LoadError, or what ``progress`` raised.
    """
    view = memoryview((ctypes.c_ubyte * target.nbytes).from_address(target.data_ptr())).cast("B")
    segments = cut_segments(checkpoint, READ_BYTES)
    total = sum(segment.length for segment in segments)
    moved = {"read": 0, "direct": 0}
    buffer = aligned_memory(READ_BYTES) if direct is not None else None
    for segment in segments:
        way = "read"
        if direct is not None and buffer is not None and is_direct(segment):
            way = "direct" if _read_direct(direct, segment, plan, view, buffer) else "read"
        if way == "read":
            for offset, length, place in plan.pieces(segment):
                shards.read(segment.shard, segment.offset + offset, view[place : place + length])
        moved[way] += segment.length
        progress(sum(moved.values()), total)
    return moved


def _read_direct(direct: DirectShards, segment: Segment, plan: Plan, view: memoryview, buffer: memoryview) -> bool:
    """Return whether a segment could be read past the page cache and was put in its places."""
    try:
        shift = direct.read(segment, buffer)
    except DirectRefused:
        return False
    for offset, length, place in plan.pieces(segment):
        view[place : place + length] = buffer[shift + offset : shift + offset + length]
    return True


def measure_read_ceiling(checkpoint: Checkpoint, shards: OpenShards) -> float | None:
    """Return the bytes a second at which bytes just read, and so cached, are read again into one small buffer.

    None where that can't be done once more: the load itself is over.
    """
    headers = [(header, shard) for shard, header in enumerate(checkpoint.shards) if header.data_bytes]
    if not headers:
        return None
    header, shard = max(headers, key=lambda item: item[0].data_bytes)
    length = min(header.data_bytes, CEILING_BYTES)
    view = memoryview(bytearray(length))
    try:
        shards.read(shard, 0, view)
        begun = time.perf_counter_ns()
        shards.read(shard, 0, view)
        taken_ns = time.perf_counter_ns() - begun
    except LoadError:
        return None
    return length / max(taken_ns, 1) * 1e9
