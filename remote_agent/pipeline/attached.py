"""A model built around weights that the keeper has, in a process of no run: it serves, or is asked now and then.

The keeper's lease stays open for as long as the process has the weights, so that nobody lets them go.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from remote_agent.devices import Device
from remote_agent.errors import StageError
from remote_agent.pipeline import assign, context, init, weights
from remote_agent.pipeline.keeping import Keeping
from remote_agent.pipeline.making import Held
from remote_agent.pipeline.timing import Stages
from remote_agent.protocol.internal import InternalMessage, WorkerAttach, WorkerStage
from remote_agent.protocol.messages import Recipe


def attach_model(message: WorkerAttach, serves: bool) -> tuple[Held, Device, dict[str, int]]:
    """Return the job's model, its device, and nanoseconds by step; with the tokenizer that the checkpoint has, if any.

    Raises: KeeperError, ResidentLostError, DeviceError, StageError
    """
    steps: dict[str, int] = {}

    def note(said: InternalMessage) -> None:
        if isinstance(said, WorkerStage) and said.end_mono_ns is not None:
            steps[f"{said.stage}_ns"] = said.end_mono_ns - said.start_mono_ns

    job, recipe, stages = message.job, message.job.recipe, Stages(note)
    with stages.measure("init", start_mono_ns=job.init_mono_ns) as measure:
        device = init.initialise_device(job, measure)
    with stages.measure("context", device) as measure:
        context.open_context(device, measure)
    with stages.measure("attach", device) as measure:
        found = weights.attach_weights(recipe, device, Keeping(job, message.go), measure)
    with stages.measure("assign", device) as measure:
        warm, _ = assign.assign_module(recipe, found.folder, found.tensors, device.torch_device, measure)
        if serves and warm.tokenizer is None:
            warm = replace(warm, tokenizer=find_tokenizer(recipe, found))
    return Held(recipe, message.go.shards, warm, found.backing), device, steps


def find_tokenizer(recipe: Recipe, found: weights.Weights) -> Any:
    """Return the checkpoint's tokenizer, or None where it has none that loads: not every model is asked by text."""
    try:
        return assign.read_tokenizer(found.folder, recipe.trust_remote_code)
    except StageError:
        return None
