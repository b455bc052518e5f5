"""Brings a checkpoint onto a device: chooses the path, times it beside its ceiling, gives tensors back."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
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
from remote_agent.loader.plan import SECTION_ALIGNMENT_BYTES, Plan, plan_placement
from remote_agent.loader.problems import counted
from remote_agent.loader.progress import Progress
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.staged import copy_staged
from remote_agent.loader.views import torch_dtype, view_of
from remote_agent.protocol.internal import ShardIdentity
from remote_agent.protocol.messages import WeightsPolicy

if TYPE_CHECKING:
    from remote_agent.devices.cuda import CudaDevice

Memory = Callable[[int], torch.Tensor]
"""Gives a uint8 tensor of at least that many bytes on the device, at a multiple of 512; may raise OutOfMemoryError."""


@dataclass(frozen=True)
class Loaded:
    """Every tensor of a checkpoint on its device, and what that took.

    ``bytes`` are the tensors' own. ``path`` is the one taken (``staged``, ``mapped``, ``read``),
    ``reason`` why it is not the one asked for. ``ceiling_bytes_s`` was measured beside the load.
    ``steps`` are nanoseconds by name, summed over threads; ``counters`` are counts;
    ``notes`` say in a line each what a caller may not expect of a tensor.
    Rates are None where no byte moved. ``base`` is the one allocation and ``plan`` says where in it
    each tensor lies; both are None where the tensors are views of the files.
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
    base: torch.Tensor | None = None
    plan: Plan | None = None


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
    base: torch.Tensor | None = None
    plan: Plan | None = None


def load(
    checkpoint: Checkpoint,
    device: Device,
    policy: WeightsPolicy,
    *,
    progress: Progress,
    identities: Sequence[ShardIdentity] = (),
    memory: Memory | None = None,
) -> Loaded:
    """Return every tensor of ``checkpoint`` on ``device``, byte for byte what the files hold.

    ``progress`` gets (bytes done, bytes in all) from the calling thread. ``identities`` is what an
    earlier check saw of the shards. Each shard must be the same before its first and after its last
    byte. ``memory`` gives the allocation that the tensors will be views of; without it torch's
    allocator does, or on a CPU the files themselves. When this raises, nothing is left on the device
    (but what ``memory`` gave), open or running.
    Raises: LoadError naming the file, DeviceError, or what ``progress`` raised.
    """
    memory = None if memory is None else _checked(memory)
    with OpenShards(checkpoint.shards, identities) as shards:
        if device.kind == "cuda":
            result = _load_staged(checkpoint, device, policy, shards, progress, memory)  # type: ignore[arg-type]
        elif memory is not None:
            result = _load_by_reading(checkpoint, _cpu_reasons(policy, "read"), shards, progress, memory)
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
        base=result.base,
        plan=result.plan,
    )


def _load_staged(
    checkpoint: Checkpoint,
    device: CudaDevice,
    policy: WeightsPolicy,
    shards: OpenShards,
    progress: Progress,
    memory: Memory | None,
) -> _Result:
    reasons = []
    if policy.path in ("mapped", "direct"):
        reasons.append(f"{policy.path} is not built for a GPU yet: staged instead")
    begun = time.monotonic_ns()
    plan = plan_placement(checkpoint)
    base = _allocate(device, plan, memory or device.allocate)
    allocated = time.monotonic_ns()
    steps = {"allocate": allocated - begun}
    steps.update(copy_staged(checkpoint, plan, base.data_ptr(), device, shards, progress))
    moved = time.monotonic_ns()
    shards.check_unchanged()
    tensors = _tensors(checkpoint, plan, base)
    ended = time.monotonic_ns()
    steps["views"] = ended - moved
    ceiling = _staged_ceiling(device, checkpoint)
    odd = plan.odd_tensors, plan.odd_bytes
    return _Result(tensors, "staged", reasons, steps, *odd, begun, ended, ceiling, base, plan)


def _load_on_cpu(checkpoint: Checkpoint, policy: WeightsPolicy, shards: OpenShards, progress: Progress) -> _Result:
    reasons = _cpu_reasons(policy, "mapped")
    begun = time.monotonic_ns()
    try:
        maps = map_shards(checkpoint, shards, progress)
    except MapRefused as refusal:
        name = refusal.error.strerror or str(refusal.error)
        where = filesystem_of(refusal.header.path)
        reasons.append(f"read: mmap refused on {where}: {name} (errno {refusal.error.errno})")
        return _load_by_reading(checkpoint, reasons, shards, progress, _host_memory, begun)
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


def _cpu_reasons(policy: WeightsPolicy, instead: str) -> list[str]:
    if policy.path in ("staged", "direct"):
        return [f"{policy.path} is for GPUs: {instead} instead"]
    if policy.path == "mapped" and instead == "read":
        return ["read: mapped tensors can't lie in memory that was given"]
    return []


def _load_by_reading(
    checkpoint: Checkpoint,
    reasons: list[str],
    shards: OpenShards,
    progress: Progress,
    memory: Memory,
    begun: int | None = None,
) -> _Result:
    """``begun``: when an attempt began that this one stands in for."""
    begun = time.monotonic_ns() if begun is None else begun
    plan = plan_placement(checkpoint)
    base = memory(plan.size_bytes)
    allocated = time.monotonic_ns()
    read_shards(checkpoint, plan, base, shards, progress)
    moved = time.monotonic_ns()
    shards.check_unchanged()
    tensors = _tensors(checkpoint, plan, base)
    ended = time.monotonic_ns()
    steps = {"allocate": allocated - begun, "read": moved - allocated, "views": ended - moved}
    ceiling = measure_read_ceiling(checkpoint, shards)
    odd = plan.odd_tensors, plan.odd_bytes
    return _Result(tensors, "read", reasons, steps, *odd, begun, ended, ceiling, base, plan)


def _host_memory(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise LoadError(f"{size_bytes} bytes of host memory can't be had", "out_of_memory") from error


def _checked(memory: Memory) -> Memory:
    """Return ``memory`` held to what a plan needs. Raises, when it is called: LoadError."""

    def give(size_bytes: int) -> torch.Tensor:
        base = memory(size_bytes)
        if base.dtype is not torch.uint8 or base.dim() != 1 or not base.is_contiguous() or len(base) < size_bytes:
            found = f"{base.dtype} {list(base.shape)}"
            raise LoadError(f"the memory given is {found}; {size_bytes} contiguous bytes of uint8 are needed")
        if size_bytes and base.data_ptr() % SECTION_ALIGNMENT_BYTES:
            where = f"{base.data_ptr():#x}, no multiple of {SECTION_ALIGNMENT_BYTES}"
            raise LoadError(f"the memory given begins at {where}")
        return base

    return give


def _allocate(device: CudaDevice, plan: Plan, memory: Memory) -> torch.Tensor:
    try:
        return memory(plan.size_bytes)
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
