"""Loads a checkpoint onto the CPU: views over the files, or bytes read into memory of its own."""

from __future__ import annotations

import time

import torch

from remote_agent.errors import LoadError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.cleanup import finally_do
from remote_agent.loader.direct import DirectShards
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.mapped import MapRefused, map_shards, measure_map_ceiling
from remote_agent.loader.outcome import Memory, Outcome, odd_counters, tensors_in
from remote_agent.loader.plan import Segment, plan_placement
from remote_agent.loader.progress import Announce, Progress
from remote_agent.loader.read import measure_read_ceiling, read_shards
from remote_agent.loader.residency import measure_ranges
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.views import torch_dtype, view_of
from remote_agent.protocol.messages import WeightsPolicy


def load_onto_cpu(
    checkpoint: Checkpoint,
    policy: WeightsPolicy,
    shards: OpenShards,
    progress: Progress,
    announce: Announce,
    memory: Memory | None,
) -> Outcome:
    """Return every tensor of ``checkpoint``: views over the files, unless memory is given or the page cache bypassed.

    Raises: LoadError naming the file, or what ``progress`` raised.
    """
    begun = time.monotonic_ns()
    bypasses = policy.page_cache == "bypass" and policy.path == "auto"
    if memory is not None or bypasses or policy.path == "direct":
        reasons = _reasons(policy, "read")
        return _load_by_reading(checkpoint, policy, reasons, shards, progress, memory or _host_memory, begun)
    reasons = _reasons(policy, "mapped")
    try:
        return _load_by_mapping(checkpoint, reasons, shards, progress, announce, begun)
    except MapRefused as refusal:
        name = refusal.error.strerror or str(refusal.error)
        where = filesystem_of(refusal.header.path)
        reasons.append(f"read: mmap refused on {where}: {name} (errno {refusal.error.errno})")
    return _load_by_reading(checkpoint, policy, reasons, shards, progress, _host_memory, begun)


def _reasons(policy: WeightsPolicy, instead: str) -> list[str]:
    reasons = []
    if policy.path == "staged":
        reasons.append(f"staged is for GPUs: {instead} instead")
    if policy.path == "mapped" and instead == "read":
        reasons.append("read: mapped tensors can't lie in memory that was given")
    if policy.page_cache == "bypass" and policy.path in ("mapped", "staged"):
        reasons.append(f"page_cache=bypass: what is {instead} goes through the page cache")
    return reasons


def _load_by_mapping(
    checkpoint: Checkpoint, reasons: list[str], shards: OpenShards, progress: Progress, announce: Announce, begun: int
) -> Outcome:
    maps, brought_in_bytes = map_shards(checkpoint, shards, progress, announce)
    brought_in = time.monotonic_ns()
    shards.check_unchanged()
    odd_tensors = odd_bytes = 0
    tensors = {}
    files = [torch.frombuffer(content, dtype=torch.uint8) for content in maps]
    for shard, header in enumerate(checkpoint.shards):
        for entry in header.tensors:
            if (shard, entry.name) in checkpoint.shadowed:
                continue
            start = header.data_start + entry.start
            content = files[shard][start : start + entry.nbytes]
            if entry.nbytes and torch_dtype(entry) is not None and start % DTYPES[entry.dtype].item_bytes:
                content = content.clone()
                odd_tensors += 1
                odd_bytes += entry.nbytes
            tensors[entry.name] = view_of(content, entry)
    ended = time.monotonic_ns()
    steps = {"map": brought_in - begun, "views": ended - brought_in}
    counters = {
        "mapped_bytes": checkpoint.bytes,
        "brought_in_bytes": brought_in_bytes,
        "odd_tensors": odd_tensors,
        "odd_bytes": odd_bytes,
    }
    ceiling = measure_map_ceiling(checkpoint, shards) if brought_in_bytes else None
    return Outcome(tensors, "mapped", reasons, steps, begun, ended, ceiling, counters)


def _load_by_reading(
    checkpoint: Checkpoint,
    policy: WeightsPolicy,
    reasons: list[str],
    shards: OpenShards,
    progress: Progress,
    memory: Memory,
    begun: int,
) -> Outcome:
    plan = plan_placement(checkpoint)
    base = memory(plan.size_bytes)
    allocated = time.monotonic_ns()
    bypasses = policy.page_cache == "bypass" and policy.path == "auto"
    direct = DirectShards(checkpoint.shards, shards) if bypasses or policy.path == "direct" else None
    found = list(map(measure_ranges, checkpoint.shards, shards.descriptors)) if bypasses else []

    def is_direct(segment: Segment) -> bool:
        start = checkpoint.shards[segment.shard].data_start + segment.offset
        return not found or not found[segment.shard].is_cached(start, segment.length)

    with finally_do(*([direct.close] if direct is not None else [])):
        read = read_shards(checkpoint, plan, base, shards, progress, direct, is_direct)
    arrived = time.monotonic_ns()
    shards.check_unchanged()
    tensors = tensors_in(base, checkpoint, plan)
    ended = time.monotonic_ns()
    if direct is not None and direct.refusal is not None:
        reasons.append(f"{direct.refusal}; read through the page cache")
    steps = {"allocate": allocated - begun, "read": arrived - allocated, "views": ended - arrived}
    counters = {**{f"{way}_bytes": count for way, count in read.items()}, **odd_counters(plan)}
    path = "+".join(way for way, count in read.items() if count) or "read"
    ceiling = None if read["direct"] else measure_read_ceiling(checkpoint, shards)
    return Outcome(tensors, path, reasons, steps, begun, ended, ceiling, counters, base, plan)


def _host_memory(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise LoadError(f"{size_bytes} bytes of host memory can't be had", "out_of_memory") from error
