"""Makes real residents at a real keeper, without an agent: what a worker does, in this process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from remote_agent.agentd.paths import StateDir
from remote_agent.devices.base import Device
from remote_agent.devices.cpu import CpuDevice
from remote_agent.loader.checkpoint import inspect
from remote_agent.pipeline.keeping import Keepable, Keeping
from remote_agent.pipeline.timing import Measure
from remote_agent.pipeline.weights import load_weights
from remote_agent.protocol.internal import WorkerGo, WorkerJob
from remote_agent.protocol.messages import Hold, ModelSource, Recipe
from remote_agent.resident.names import resident_name


def keeping_for(
    state: StateDir, folder: Path, *, recipe: str = "tiny", device: str = "cpu", is_resident: bool = False, **hold: Any
) -> Keeping:
    """Return one job's dealings with the keeper."""
    wanted = Recipe(recipe, ModelSource(str(folder)), devices=(device,), target_tier="resident", hold=Hold(**hold))
    job = WorkerJob("run-00000001", wanted, device, time.monotonic_ns(), "", None, str(state.root), "ann@laptop")
    shards = inspect(folder).identities
    return Keeping(job, WorkerGo(shards, resident_name(str(folder), shards, device), is_resident))


def load_shared(folder: Path, device: Device) -> Keepable:
    """Return a checkpoint's weights in sealed memory."""
    recipe = Recipe("tiny", ModelSource(str(folder)), devices=(device.name,), target_tier="resident")
    keepable = load_weights(recipe, device, (), Measure(0), lambda done, total: None).backing.keepable
    assert keepable is not None
    return keepable


def make_resident(
    state: StateDir, folder: Path, *, at: Device | None = None, device: str = "cpu", recipe: str = "tiny"
) -> str:
    """Load a checkpoint, give it to the keeper and return its name; this process has nothing of it afterwards."""
    keeping = keeping_for(state, folder, recipe=recipe, device=device)
    keepable = load_shared(folder, at or CpuDevice())
    keeping.keep(keepable)
    keepable.memory.close()
    assert keeping.name is not None
    return keeping.name
