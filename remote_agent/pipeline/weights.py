"""Stage ``weights``: every byte of the checkpoint on the device, loaded or found at the keeper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.devices import Device
from remote_agent.errors import DeviceError
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.cleanup import Settling
from remote_agent.loader.load import Loaded, load
from remote_agent.pipeline.keeping import Backing, Keepable, Keeping
from remote_agent.pipeline.layout import placed_entries
from remote_agent.pipeline.rehearsal import Rehearsal, plan_rehearsal
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.internal import ShardIdentity
from remote_agent.protocol.messages import Recipe, StageStatus
from remote_agent.resident.checksum import sampled_checksum

if TYPE_CHECKING:
    import torch

    from remote_agent.loader.registrations import Registrations
    from remote_agent.resident.memory import SharedMemory
    from remote_agent.resident.reserved import ReservedRange


@dataclass(frozen=True)
class Weights:
    """Tensors on the device, the folder they came from, and what can outlive this process.

    ``leftovers``: what else the load left, to be given back beside what comes later.
    ``is_rehearsed``: one layer ran beside the load, at the shapes that the request will have.
    """

    tensors: dict[str, torch.Tensor]
    folder: Path
    notes: tuple[str, ...]
    backing: Backing
    leftovers: tuple[Settling, ...] = ()
    is_rehearsed: bool = False

    def settle(self) -> None:
        """Wait until nothing else of the load is left."""
        for leftover in self.leftovers:
            leftover.finish()


class _CannotShare(Exception):
    """Memory that outlives this process is not to be had; nothing was loaded yet."""


def attach_weights(recipe: Recipe, device: Device, keeping: Keeping, measure: Measure) -> Weights:
    """Return the tensors that the keeper has, mapped to read; none of their bytes moves.

    Raises: KeeperError, ResidentLostError, DeviceError
    """
    found, reserved = keeping.attach(device)
    measure.status = StageStatus.REUSED
    measure.path = "attached"
    measure.reason = f"the keeper has it as {found.manifest.name}"
    measure.extra.update({f"{step}_ns": value for step, value in found.steps.items()})
    measure.extra["attached_bytes"] = found.manifest.tensor_bytes
    measure.extra["tensors"] = len(found.tensors)
    folder = inspect(Path(recipe.model.path).expanduser(), recipe.model.revision).root
    manifest = found.manifest
    backing = Backing(None, True, manifest.size_bytes, range=reserved, checksum=manifest.checksum)
    return Weights(found.tensors, folder, manifest.notes, backing)


def load_weights(
    recipe: Recipe,
    device: Device,
    shards: tuple[ShardIdentity, ...],
    measure: Measure,
    progress: Callable[[int, int], None],
    registered: Registrations | None = None,
    under: ReservedRange | None = None,
) -> Weights:
    """Return the checkpoint's tensors on ``device``; the shards must still be the same.

    ``registered`` are these very shards, where this process keeps them so. Where the recipe wants them to
    outlive this process they lie in sealed memory, which nothing can write any more. So they do where they are
    to be mapped ``under`` what a process has warmed; nothing is rehearsed then.
    Raises: CheckpointError or LoadError naming the file.
    """
    known = registered.headers if registered is not None else ()
    found = inspect(Path(recipe.model.path).expanduser(), recipe.model.revision, known)
    identities = shards or found.identities
    rehearsal = plan_rehearsal(recipe, found, device) if under is None else None
    bring = partial(
        load,
        found,
        device,
        recipe.weights,
        progress=progress if rehearsal is None else rehearsal.watch(progress),
        identities=identities,
        announce=measure.announce,
        settles_later=True,
        meanwhile=None if rehearsal is None else rehearsal.run,
        registered=registered,
    )
    shared: list[SharedMemory] = []
    problem = None
    memory = partial(_share, device, shared) if under is not None or is_to_be_shared(recipe, device) else None
    try:
        loaded = bring(memory=memory)
    except _CannotShare as error:
        problem = str(error)
        loaded = bring()
    finally:
        _describe_rehearsal(rehearsal, measure)
    _describe(loaded, found, measure)
    if problem is not None:
        measure.reason = "; ".join(filter(None, (f"not shared: {problem}", measure.reason)))
    backing = _back(loaded, found, shared[0], device, identities) if shared else Backing(problem=problem)
    leftovers = () if loaded.settling is None else (loaded.settling,)
    is_rehearsed = rehearsal is not None and rehearsal.is_of_request
    return Weights(loaded.tensors, found.root, loaded.notes, backing, leftovers, is_rehearsed)


def _describe_rehearsal(rehearsal: Rehearsal | None, measure: Measure) -> None:
    if rehearsal is None or rehearsal.result is None:
        return
    measure.extra["rehearsal_ns"] = rehearsal.result.duration_ns
    if rehearsal.result.reason is not None:
        measure.extra["rehearsal_reason"] = rehearsal.result.reason[:500]


def is_to_be_shared(recipe: Recipe, device: Device) -> bool:
    """Whether the weights are to lie in memory that outlives this process.

    A standby's on a CPU are not, unless it is to be served: its tensors are views of the files themselves, which the
    page cache keeps.
    """
    return recipe.is_for_others or (recipe.target_tier == "standby" and device.kind == "cuda")


def _describe(loaded: Loaded, found: Checkpoint, measure: Measure) -> None:
    measure.bytes = loaded.bytes
    measure.rate_bytes_s = loaded.rate_bytes_s
    measure.ceiling_bytes_s = loaded.ceiling_bytes_s
    measure.path = loaded.path
    measure.reason = loaded.reason
    measure.extra.update({f"{step}_ns": value for step, value in loaded.steps.items()})
    measure.extra.update(loaded.counters)
    measure.extra["shards"] = len(found.shards)
    measure.extra["tensors"] = len(loaded.tensors)
    measure.extra["load_ns"] = loaded.duration_ns


def _share(device: Device, shared: list[SharedMemory], size_bytes: int) -> torch.Tensor:
    """Return memory that can outlive this process, which is ``shared``'s from then on. Raises: _CannotShare"""
    try:
        shared.append(device.share(size_bytes))
    except DeviceError as error:
        raise _CannotShare(str(error)) from error
    return shared[0].tensor


def _back(
    loaded: Loaded, found: Checkpoint, memory: SharedMemory, device: Device, identities: tuple[ShardIdentity, ...]
) -> Backing:
    """Return what lies behind loaded weights, sealed; where that fails they are nobody else's, and it says why."""
    try:
        keepable = _seal(loaded, found, memory, device, identities)
    except DeviceError as error:
        return Backing(problem=str(error), range=memory.range)
    return Backing(keepable, False, memory.size_bytes, None, memory.range, keepable.checksum)


def _seal(
    loaded: Loaded, found: Checkpoint, memory: SharedMemory, device: Device, identities: tuple[ShardIdentity, ...]
) -> Keepable:
    """Make the memory read-only at once: what a stage after this one wrote there would be everybody's."""
    assert loaded.plan is not None
    entries = tuple(placed_entries(found, loaded.plan))
    device.synchronise()
    checksum = sampled_checksum(memory.tensor, memory.size_bytes)
    memory.seal()
    return Keepable(memory, entries, checksum, loaded.bytes, tuple(identities), loaded.notes)
