"""Brings a checkpoint onto a device and gives tensors back, with what it took beside its ceiling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from remote_agent.devices import Device
from remote_agent.errors import LoadError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.onto_cpu import load_onto_cpu
from remote_agent.loader.onto_gpu import load_onto_gpu
from remote_agent.loader.outcome import Loaded, Memory, Outcome
from remote_agent.loader.plan import SECTION_ALIGNMENT_BYTES
from remote_agent.loader.problems import counted
from remote_agent.loader.progress import Announce, Progress
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.views import torch_dtype
from remote_agent.protocol.internal import ShardIdentity
from remote_agent.protocol.messages import WeightsPolicy

if TYPE_CHECKING:
    from remote_agent.devices.cuda import CudaDevice
    from remote_agent.loader.registrations import Registrations

__all__ = ["Loaded", "Memory", "load"]


def load(
    checkpoint: Checkpoint,
    device: Device,
    policy: WeightsPolicy,
    *,
    progress: Progress,
    identities: Sequence[ShardIdentity] = (),
    memory: Memory | None = None,
    announce: Announce = lambda path: None,
    settles_later: bool = False,
    meanwhile: Callable[[], None] | None = None,
    registered: Registrations | None = None,
) -> Loaded:
    """Return every tensor of ``checkpoint`` on ``device``, byte for byte what the files hold.

    ``progress`` gets (bytes done, bytes in all) from the calling thread. ``identities`` is what an
    earlier check saw of the shards. Each shard must be the same before its first and after its last
    byte. ``memory`` gives the allocation that the tensors will be views of; without it torch's
    allocator does, or on a CPU the files themselves. ``announce`` gets the path of each shard before
    any page of it is mapped, from any thread: who dies of a page then has told which file it was.
    With ``settles_later`` registrations stay until the caller has time for that; it must call `Loaded.settle`.
    On a GPU ``meanwhile`` is called in the calling thread while others move bytes, and its time is not the load's;
    ``progress`` is then called from one of those. ``registered``: these very files, which a GPU may read where they
    lie; they are copied from there unless the policy wants another path, and stay registered.
    When this raises, nothing is left on the device (but what ``memory`` gave), registered, open or running.
    Raises: LoadError naming the file, DeviceError, or what ``progress`` raised.
    """
    memory = None if memory is None else _checked(memory)
    with OpenShards(checkpoint.shards, identities) as shards:
        if device.kind == "cuda":
            gpu = cast("CudaDevice", device)
            result = load_onto_gpu(checkpoint, gpu, policy, shards, progress, announce, memory, meanwhile, registered)
        else:
            result = load_onto_cpu(checkpoint, policy, shards, progress, announce, memory)
    loaded = _loaded(checkpoint, result)
    if loaded.settling is not None and not settles_later:
        loaded.steps["settle"] = loaded.settle()
    return loaded


def _loaded(checkpoint: Checkpoint, result: Outcome) -> Loaded:
    duration_ns = max(result.ended_ns - result.begun_ns, 1)
    moved = checkpoint.bytes > 0
    raw = Counter(entry.dtype for _, entry in checkpoint.entries() if torch_dtype(entry) is None)
    return Loaded(
        tensors=result.tensors,
        bytes=checkpoint.bytes,
        path=result.path,
        reason="; ".join(result.reasons) or None,
        duration_ns=duration_ns,
        rate_bytes_s=checkpoint.bytes / duration_ns * 1e9 if moved else None,
        ceiling_bytes_s=result.ceiling_bytes_s if moved else None,
        steps=result.steps,
        counters={**result.counters, "raw_tensors": raw.total()},
        notes=_notes(raw),
        base=result.base,
        plan=result.plan,
        settling=result.settling,
    )


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


def _notes(raw: Counter[str]) -> tuple[str, ...]:
    return tuple(
        f"{counted(number, f'{dtype} tensor')} given as plain bytes: torch {torch.__version__} has no dtype that fits"
        for dtype, number in raw.items()
    )
