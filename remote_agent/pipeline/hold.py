"""Stage ``hold``: the warm model stays, its weights with the keeper where that can be, and what it holds is counted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from remote_agent.devices import Device
from remote_agent.errors import AgentError
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.failures import one_line
from remote_agent.pipeline.keeping import Backing, Keeping
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import Recipe, Tier


@dataclass(frozen=True)
class Kept:
    """How the model is held. ``problem``: why its weights do not outlive this process, though they were to."""

    tier: Tier
    bytes: int
    backing: Backing
    resident: str | None
    problem: str | None


def hold_model(
    recipe: Recipe, warm: Warm, backing: Backing, keeping: Keeping, device: Device, measure: Measure
) -> Kept:
    """Leave the weights with the keeper, unless it has them, and say what holds the model from now on.

    ``resident`` needs no process any more. Where the keeper does not have the weights this process
    waits as a standby, and the reason is named.
    """
    if backing.keepable is not None and not backing.is_kept:
        try:
            keeping.keep(backing.keepable)
            backing = replace(backing, is_kept=True)
        except AgentError as error:
            backing = replace(backing, problem=one_line(str(error)))
    if backing.is_kept and backing.keepable is not None and backing.keepable.memory.range is not backing.range:
        backing = replace(backing, keepable=None)  # the map that the load wrote through, beside the one in use
    keeping.detach()
    is_resident = recipe.target_tier == "resident" and backing.is_kept
    measure.bytes = backing.size_bytes if is_resident and backing.size_bytes else warm.bytes
    measure.extra["holder"] = "keeper" if is_resident else "worker"
    if backing.problem is not None and not backing.is_kept:
        measure.reason = f"standby: the weights do not outlive this process: {backing.problem}"
    describe_memory(device, measure)
    tier = Tier.RESIDENT if is_resident else Tier.STANDBY
    return Kept(tier, measure.bytes, backing, keeping.name if backing.is_kept else None, measure.reason)


def describe_memory(device: Device, measure: Measure) -> None:
    """Say in the span what is free on the device, and of how much."""
    free, total = device.memory()
    measure.extra["memory_free_bytes"] = free
    measure.extra["memory_total_bytes"] = total
