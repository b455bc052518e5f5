"""A process armed for a model: all that its weights do not decide is made over a reserved range, before they are there.

Module, kernels, compiled layers and the prompt's graph are built over a stand-in at the places where a load would put
each tensor. When the weights are mapped there, nothing is built anew.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from remote_agent.devices import Device
from remote_agent.errors import DeviceError, NotArmableError, ResidentLostError
from remote_agent.loader.checkpoint import inspect
from remote_agent.loader.views import views_in
from remote_agent.pipeline.assign import Warm, assign_module, choose_dtype, read_tokenizer
from remote_agent.pipeline.keeping import Backing, Keepable, Keeping
from remote_agent.pipeline.layout import Layout, plan_layout
from remote_agent.pipeline.prompt_graph import PromptGraph
from remote_agent.pipeline.timing import Measure
from remote_agent.pipeline.weights import Weights
from remote_agent.protocol.internal import ShardIdentity
from remote_agent.protocol.messages import Finding, Recipe, StageStatus
from remote_agent.resident.checksum import Samples
from remote_agent.resident.manifest import write_table
from remote_agent.resident.reserved import RangeState, ReservedRange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NAMES_SHOWN = 3
DEVIATION = 0.02
"""Of the stand-in's numbers: outputs that are all zeros would agree whatever a compiled layer did."""


@dataclass(frozen=True)
class Armed:
    """A range, what lies where in it, the samples to compare, and the prompt's graph where there is one."""

    range: ReservedRange
    layout: Layout
    folder: Path
    samples: Samples
    graph: PromptGraph | None = None

    @property
    def has_weights(self) -> bool:
        return self.range.state is RangeState.WEIGHTS


def arm_module(
    recipe: Recipe, shards: tuple[ShardIdentity, ...], device: Device, measure: Measure
) -> tuple[Armed, Warm, tuple[Finding, ...]]:
    """Return the recipe's model built over a reserved range, none of its weights read.

    Raises: NotArmableError if it does not lie there whole, StageError as `assign_module` does, CheckpointError
    """
    found = inspect(Path(recipe.model.path).expanduser(), recipe.model.revision)
    if shards and found.identities != shards:
        raise NotArmableError("the checkpoint's files changed since preflight")
    layout = plan_layout(found)
    begun = time.monotonic_ns()
    try:
        reserved = device.reserve(layout.size_bytes)
    except DeviceError as error:
        raise NotArmableError(str(error)) from error
    measure.extra["reserve_ns"] = time.monotonic_ns() - begun
    measure.extra["reserved_bytes"] = reserved.size_bytes
    measure.extra["stand_in_bytes"] = reserved.stand_in_bytes
    tensors = views_in(reserved.tensor, [(entry, entry.start) for entry in layout.entries])
    fill_stand_in(reserved, choose_dtype(recipe.dtype, tensors))
    warm, findings = assign_module(recipe, found.root, tensors, device.torch_device, measure)
    measure.bytes = reserved.stand_in_bytes
    refuse_copies(warm.model, tensors, reserved)
    samples = Samples(reserved.tensor, reserved.size_bytes)
    return Armed(reserved, layout, found.root, samples), warm, findings


def fill_stand_in(reserved: ReservedRange, dtype: torch.dtype) -> None:
    """Write small random numbers to the stand-in: as it lies under the whole range, once is everywhere."""
    whole = reserved.stand_in_bytes // dtype.itemsize * dtype.itemsize
    reserved.tensor[:whole].view(dtype).normal_(0, DEVIATION)


def refuse_copies(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], reserved: ReservedRange) -> None:
    """Raise NotArmableError if any of the model's tensors that come from the checkpoint is not in the range.

    A tensor that was converted (another dtype, a transposed or merged weight) is a copy of the stand-in.
    """
    first = reserved.tensor.data_ptr()
    outside = [
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.nbytes and not first <= tensor.data_ptr() < first + reserved.size_bytes
    ]
    if outside:
        names = ", ".join(outside[:NAMES_SHOWN]) + (" and more" if len(outside) > NAMES_SHOWN else "")
        text = f"{len(outside)} of {len(tensors)} tensors can't be used where a load puts them: {names}"
        raise NotArmableError(text)


def attach_under(armed: Armed, keeping: Keeping, measure: Measure, use: Callable[[], None]) -> Weights:
    """Map the keeper's weights under what is armed; none of their bytes moves.

    ``use`` may queue work on the device as soon as they lie there: if this raises, that is worth nothing.
    Raises: NotArmableError if they are laid out otherwise; KeeperError, ResidentLostError, DeviceError. After each the
    stand-in lies there again.
    """
    manifest, steps = keeping.attach_under(armed.range, armed.layout.table, armed.samples, use)
    measure.status = StageStatus.REUSED
    measure.path = "attached"
    measure.reason = f"the keeper has it as {manifest.name}: mapped under the armed process"
    measure.extra.update({f"{step}_ns": value for step, value in steps.items()})
    measure.extra["attached_bytes"] = manifest.tensor_bytes
    backing = Backing(None, True, manifest.size_bytes, range=armed.range, checksum=manifest.checksum)
    return Weights({}, armed.folder, manifest.notes, backing)


def put_under(armed: Armed, found: Weights, measure: Measure) -> None:
    """Map what was loaded under what is armed, unless it lies there. Raises: NotArmableError, nothing is lost then"""
    if armed.has_weights:
        return
    keepable = found.backing.keepable
    if keepable is None:
        raise NotArmableError(f"what was loaded can't be mapped: {found.backing.problem}")
    if write_table(keepable.entries) != armed.layout.table:
        raise NotArmableError("what was loaded is laid out otherwise")
    try:
        steps = map_keepable(armed.range, keepable)
    except (DeviceError, ResidentLostError) as error:
        raise NotArmableError(f"what was loaded can't be mapped: {error}") from error
    measure.extra.update({f"{step}_ns": value for step, value in steps.items()})


def map_keepable(reserved: ReservedRange, keepable: Keepable) -> dict[str, int]:
    """Map sealed memory of this process at the range, and return nanoseconds by step."""
    descriptor = keepable.memory.export()
    try:
        return reserved.map(descriptor, keepable.memory.size_bytes)
    finally:
        os.close(descriptor)


def for_request(warm: Warm, armed: Armed, recipe: Recipe) -> Warm:
    """Return ``warm`` with the tokenizer that the recipe's request needs, or none: it may be another than was armed."""
    if recipe.request.prompt is None:
        return replace(warm, tokenizer=None)
    if warm.tokenizer is not None:
        return warm
    return replace(warm, tokenizer=read_tokenizer(armed.folder, recipe.trust_remote_code))


def taken_bytes(armed: Armed, device: Device) -> int:
    """Return what an armed process takes of its device beside the context: the stand-in, and what torch has."""
    return armed.range.stand_in_bytes + device.pool_bytes()


def rehearse(armed: Armed) -> None:
    """Do once what an attach does, over the stand-in: a first time takes longer than all others."""
    with armed.range.or_stand_in():
        armed.range.unmap(stand_in=True)
        armed.samples.queue()
        armed.samples.checksum()


def settle_down() -> None:
    """Take everything that was made out of Python's garbage collection: one in a first request takes longer than it."""
    gc.collect()
    gc.freeze()


def let_go() -> None:
    """Collect what is no longer referred to, also what `settle_down` took out."""
    gc.unfreeze()
    gc.collect()
