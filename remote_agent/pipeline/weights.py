"""Stage ``weights``: every byte of the checkpoint on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from remote_agent.devices import Device
from remote_agent.loader.checkpoint import inspect
from remote_agent.loader.load import Loaded, load
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.internal import ShardIdentity
from remote_agent.protocol.messages import Recipe


def load_weights(
    recipe: Recipe,
    device: Device,
    shards: tuple[ShardIdentity, ...],
    measure: Measure,
    progress: Callable[[int, int], None],
) -> tuple[Loaded, Path]:
    """Return the checkpoint's tensors on ``device`` and the folder they came from; the shards must still be the same.

    Raises: CheckpointError or LoadError naming the file.
    """
    found = inspect(Path(recipe.model.path).expanduser(), recipe.model.revision)
    identities = shards or found.identities
    loaded = load(found, device, recipe.weights, progress=progress, identities=identities, announce=measure.announce)
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
    return loaded, found.root
