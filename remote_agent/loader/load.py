"""Brings a checkpoint onto a device: chooses the path, times it beside its ceiling, gives tensors back."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from remote_agent.devices import Device
from remote_agent.errors import LoadError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.mapped import (
    MapRefused,
    map_shards,
    measure_map_ceiling,
    measure_read_ceiling,
    read_shards,
)
from remote_agent.loader.plan import Plan, plan_placement
from remote_agent.loader.problems import counted
from remote_agent.loader.progress import Progress
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.staged import copy_staged
from remote_agent.loader.views import torch_dtype, view_of
from remote_agent.protocol.internal import ShardIdentity
from remote_agent.protocol.messages import WeightsPolicy

if TYPE_CHECKING:
    from remote_agent.devices.cuda import CudaDevice


@dataclass(frozen=True)
class Loaded:
    """Every tensor of a checkpoint on its device, and what that took.

    ``bytes`` are the tensors' own. ``path`` is the one taken (``staged``, ``mapped``, ``read``),
    ``reason`` why it is not the one asked for. ``ceiling_bytes_s`` was measured beside the load.
    ``steps`` are nanoseconds by name, summed over threads; ``counters`` are counts;
    ``notes`` say in a line each what a caller may not expect of a tensor.
    Rates are None where no byte moved.
    """

    tensors: dict[str, torch.Tensor]
    bytes: int
    path: str
    reason: str | None
    duration_ns: int
    rate_bytes_s: float | None
    ceiling_bytes_s: float | None
    steps: dict[str, int]
    counters: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class _Result:
    """What a path hands back."""

    tensors: dict[str, torch.Tensor]
    path: str
    reasons: list[str]
    steps: dict[str, int]
    odd_tensors: int
    odd_bytes: int
    begun_ns: int
    ended_ns: int
    ceiling_bytes_s: float | None


def load(
    checkpoint: Checkpoint,
    device: Device,
    policy: WeightsPolicy,
    *,
    progress: Progress,
    identities: Sequence[ShardIdentity] = (),
) -> Loaded:
    """Return every tensor of ``checkpoint`` on ``device``, byte for byte what the files hold.

    ``progress`` gets (bytes done, bytes in all) from the calling thread. ``identities`` is what an
    earlier check saw of the shards. Each shard must be the same before its first and after its last
    byte. When this raises, nothing is left on the device, open or running.
    Raises: LoadError naming the file, DeviceError, or what ``progress`` raised.
    """
    with OpenShards(checkpoint.shards, identities) as shards:
        if device.kind == "cuda":
            result = _load_staged(checkpoint, device, policy, shards, progress)  # type: ignore[arg-type]
        else:
            result = _load_on_cpu(checkpoint, policy, shards, progress)
    if policy.page_cache == "bypass":
        result.reasons.append("page_cache=bypass is not built yet: the page cache was used")
    duration_ns = max(result.ended_ns - result.begun_ns, 1)
    moved = checkpoint.bytes > 0
    counters = {
        "odd_tensors": result.odd_tensors,
        "odd_bytes": result.odd_bytes,
        "raw_tensors": sum(1 for _, entry in checkpoint.entries() if torch_dtype(entry) is None),
    }
    return Loaded(
        tensors=result.tensors,
        bytes=checkpoint.bytes,
        path=result.path,
        reason="; ".join(result.reasons) or None,
        duration_ns=duration_ns,
        rate_bytes_s=checkpoint.bytes / duration_ns * 1e9 if moved else None,
        ceiling_bytes_s=result.ceiling_bytes_s if moved else None,
        steps=result.steps,
        counters=counters,
        notes=_notes(checkpoint),
    )


def _load_staged(
    checkpoint: Checkpoint, device: CudaDevice, policy: WeightsPolicy, shards: OpenShards, progress: Progress
) -> _Result:
    reasons = []
    if policy.path in ("mapped", "direct"):
        reasons.append(f"{policy.path} is not built for a GPU yet: staged instead")
    begun = time.monotonic_ns()
    plan = plan_placement(checkpoint)
    base = _allocate(device, plan)
    allocated = time.monotonic_ns()
    steps = {"allocate": allocated - begun}
    steps.update(copy_staged(checkpoint, plan, base.data_ptr(), device, shards, progress))
    moved = time.monotonic_ns()
    shards.check_unchanged()
    tensors = _tensors(checkpoint, plan, base)
    ended = time.monotonic_ns()
    steps["views"] = ended - moved
    ceiling = _staged_ceiling(device, checkpoint)
    return _Result(tensors, "staged", reasons, steps, plan.odd_tensors, plan.odd_bytes, begun, ended, ceiling)


def _load_on_cpu(checkpoint: Checkpoint, policy: WeightsPolicy, shards: OpenShards, progress: Progress) -> _Result:
    reasons = []
    if policy.path in ("staged", "direct"):
        reasons.append(f"{policy.path} is for GPUs: mapped instead")
    begun = time.monotonic_ns()
    try:
        maps = map_shards(checkpoint, shards, progress)
    except MapRefused as refusal:
        name = refusal.error.strerror or str(refusal.error)
        where = filesystem_of(refusal.header.path)
        reasons.append(f"read: mmap refused on {where}: {name} (errno {refusal.error.errno})")
        return _load_by_reading(checkpoint, reasons, shards, progress, begun)
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
    ceiling = measure_map_ceiling(checkpoint, shards)
    return _Result(tensors, "mapped", reasons, steps, odd_tensors, odd_bytes, begun, ended, ceiling)


def _load_by_reading(
    checkpoint: Checkpoint, reasons: list[str], shards: OpenShards, progress: Progress, begun: int
) -> _Result:
    plan = plan_placement(checkpoint)
    try:
        base = torch.empty(plan.size_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise LoadError(f"{plan.size_bytes} bytes of host memory can't be had", "out_of_memory") from error
    allocated = time.monotonic_ns()
    read_shards(checkpoint, plan, base, shards, progress)
    moved = time.monotonic_ns()
    shards.check_unchanged()
    tensors = _tensors(checkpoint, plan, base)
    ended = time.monotonic_ns()
    steps = {"allocate": allocated - begun, "read": moved - allocated, "views": ended - moved}
    ceiling = measure_read_ceiling(checkpoint, shards)
    return _Result(tensors, "read", reasons, steps, plan.odd_tensors, plan.odd_bytes, begun, ended, ceiling)


def _allocate(device: CudaDevice, plan: Plan) -> torch.Tensor:
    try:
        return device.allocate(plan.size_bytes)
    except torch.OutOfMemoryError as error:
        free, total = device.memory()
        text = f"{device.name}: {plan.size_bytes} bytes are needed, {free} of {total} are free"
        raise LoadError(text, "out_of_memory") from error


def _tensors(checkpoint: Checkpoint, plan: Plan, base: torch.Tensor) -> dict[str, torch.Tensor]:
    empty = base.new_empty(0)
    tensors = {entry.name: view_of(empty, entry) for _, entry in checkpoint.entries() if not entry.nbytes}
    for placement in plan.placements:
        content = base[placement.target : placement.target + placement.entry.nbytes]
        tensors[placement.entry.name] = view_of(content, placement.entry)
    return tensors


def _staged_ceiling(device: CudaDevice, checkpoint: Checkpoint) -> float | None:
    """Measure the link into memory of its own, so that no weight is touched; None where there is no room for that."""
    if not checkpoint.bytes:
        return None
    size_bytes = device.ring.buffer_bytes
    try:
        scratch = device.allocate(size_bytes)
    except torch.OutOfMemoryError:
        return None
    device.synchronise()
    return device.ring.measure_ceiling(scratch.data_ptr(), size_bytes)


def _notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    raw: dict[str, int] = defaultdict(int)
    for _, entry in checkpoint.entries():
        if torch_dtype(entry) is None:
            raw[entry.dtype] += 1
    return tuple(
        f"{counted(number, f'{dtype} tensor')} given as plain bytes: torch {torch.__version__} has no dtype that fits"
        for dtype, number in raw.items()
    )
