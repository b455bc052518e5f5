"""Decides how each part of a checkpoint gets to a GPU, before a byte moves: by policy, page cache and host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.errors import DeviceError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.filemap import PAGE_BYTES
from remote_agent.loader.filesystem import LOCAL, filesystem_of
from remote_agent.loader.limits import Cut, LoaderLimits
from remote_agent.loader.plan import Segment, cut_shard
from remote_agent.loader.residency import RangeResidency, measure_ranges
from remote_agent.loader.schedule import Chunk
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.spread import spread
from remote_agent.protocol.messages import WeightsPolicy

if TYPE_CHECKING:
    from remote_agent.devices.calls import Calls

DRIVER_WITHOUT_DIRTYING = 570
"""Older drivers mark the pages of a read-only registration as written when it is given back."""

RUNTIME_WITHOUT_DIRTYING = 12080
DRIVER_VERSION = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Route:
    """``cached`` and ``uncached`` are all bytes, in stretches of any length; readers take as much as ``cut`` has in a
    buffer.

    ``maps``: one thread registers; with ``maps_alone`` readers leave everything to it unless it is refused.
    ``reads_direct``: uncached segments, with ``reads_all_direct`` all of them, are read past the page cache.
    ``reasons`` name what was asked for and can't be had.
    """

    cut: Cut
    cached: tuple[Chunk, ...]
    uncached: tuple[Chunk, ...]
    maps: bool = False
    maps_alone: bool = False
    reads_direct: bool = False
    reads_all_direct: bool = False
    reasons: tuple[str, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)


def choose_route(
    checkpoint: Checkpoint,
    shards: OpenShards,
    policy: WeightsPolicy,
    runtime: Calls,
    ordinal: int,
    limits: LoaderLimits,
) -> Route:
    """Return the route for ``checkpoint``; reads no byte of it where the kernel can say what is cached."""
    reasons: list[str] = []
    open_files = tuple(zip(checkpoint.shards, shards.descriptors, strict=True))
    found = spread(lambda pair: measure_ranges(*pair), open_files, "residency")
    maps = policy.path in ("auto", "mapped") and any(header.data_bytes for header in checkpoint.shards)
    if maps:
        refusal = find_map_refusal(checkpoint, runtime, ordinal, limits)
        maps = refusal is None
        reasons += [refusal] if refusal is not None else []
    maps_alone = maps and policy.path == "mapped"
    bypasses = policy.page_cache == "bypass"
    if bypasses and policy.path in ("mapped", "staged"):
        reasons.append(f"page_cache=bypass: what is {policy.path} goes through the page cache")
    is_warm = maps_alone or (policy.path != "direct" and all(one.is_whole for one in found))
    cut = limits.cold if not is_warm else limits.mixed if maps else limits.staged
    chunks = [chunk for shard in range(len(found)) for chunk in _stretches(checkpoint, shard, found[shard], cut)]
    from_cache = {chunk for chunk in chunks if maps_alone or (chunk.is_cached and policy.path != "direct")}
    return Route(
        cut,
        tuple(chunk for chunk in chunks if chunk in from_cache),
        tuple(chunk for chunk in chunks if chunk not in from_cache),
        maps,
        maps_alone,
        policy.path == "direct" or (bypasses and policy.path == "auto"),
        policy.path == "direct",
        tuple(reasons),
        _counters(chunks, cut),
    )


def route_registered(checkpoint: Checkpoint, limits: LoaderLimits) -> Route:
    """Return the route where every shard is registered already: one thread sends all of it."""
    headers = enumerate(checkpoint.shards)
    chunks = tuple(Chunk(Segment(shard, 0, header.data_bytes), True) for shard, header in headers if header.data_bytes)
    counters = _counters(chunks, limits.mixed)
    return Route(limits.mixed, chunks, (), maps=True, maps_alone=True, counters=counters)


def find_map_refusal(checkpoint: Checkpoint, runtime: Calls, ordinal: int, limits: LoaderLimits) -> str | None:
    """Return why no shard can be registered for a device to read, or None if nothing is known against it."""
    try:
        attribute = runtime.module.cudaDeviceAttr.cudaDevAttrHostRegisterReadOnlySupported
        if not runtime("cudaDeviceGetAttribute", attribute, ordinal):
            return "registration refused: this device and driver register no read-only memory"
        version = int(runtime("cudaDriverGetVersion"))
    except (AttributeError, DeviceError) as error:
        return f"registration refused: {error}"
    loaded = _loaded_driver()
    if loaded is not None and loaded < DRIVER_WITHOUT_DIRTYING:
        return f"registration refused: driver {loaded} marks pages as written; {DRIVER_WITHOUT_DIRTYING} does not"
    if version < RUNTIME_WITHOUT_DIRTYING:
        return f"registration refused: the driver is of CUDA {version // 1000}.{version % 1000 // 10}, older than 12.8"
    if any(cut.buffer_bytes % PAGE_BYTES for cut in limits.cuts):
        return f"registration refused: buffers are no multiple of a page of {PAGE_BYTES} bytes"
    for folder in {header.path.resolve().parent for header in checkpoint.shards}:
        where = filesystem_of(folder)
        if where not in LOCAL:
            return f"registration refused: {where} is not a filesystem known to be local"
    return None


def _loaded_driver() -> int | None:
    """Return the branch of the kernel's driver, which a compatibility package in user space does not change."""
    try:
        text = DRIVER_VERSION.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d{3,4})\.\d", text)
    return int(found[1]) if found else None


def _counters(chunks: Sequence[Chunk], cut: Cut) -> dict[str, int]:
    return {
        "cached_bytes": sum(chunk.segment.length for chunk in chunks if chunk.is_cached),
        "segments": sum(-(-chunk.segment.length // cut.buffer_bytes) for chunk in chunks),
    }


def _stretches(checkpoint: Checkpoint, shard: int, found: RangeResidency, cut: Cut) -> Iterator[Chunk]:
    """Yield the data section of a shard in stretches of whole segments that are cached, or are not."""
    header = checkpoint.shards[shard]
    if found.is_whole and header.data_bytes:
        yield Chunk(Segment(shard, 0, header.data_bytes), True)
        return
    segments = cut_shard(shard, header, cut.buffer_bytes)
    for is_cached, same in groupby(
        segments, lambda segment: found.is_cached(header.data_start + segment.offset, segment.length)
    ):
        first, *others = same
        last = others[-1] if others else first
        yield Chunk(Segment(shard, first.offset, last.offset + last.length - first.offset), is_cached)
