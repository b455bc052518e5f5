"""Stage ``hold``: the warm model stays, and what it holds is accounted for."""

from __future__ import annotations

from remote_agent.devices import Device
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import Tier


def hold_model(warm: Warm, device: Device, measure: Measure) -> Tier:
    """Keep the model in this process, which waits as a standby, and say what memory that takes."""
    measure.bytes = warm.bytes
    measure.extra["holder"] = "worker"
    free, total = device.memory()
    measure.extra["memory_free_bytes"] = free
    measure.extra["memory_total_bytes"] = total
    return Tier.STANDBY
