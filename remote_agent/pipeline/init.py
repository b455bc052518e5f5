"""Stage ``init``: everything imported, threads set, the driver initialised; no context yet."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from remote_agent.devices import Device, Fact, open_device
from remote_agent.pipeline.imports import import_everything
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.internal import WorkerJob
from remote_agent.protocol.messages import StageStatus

CPU_LIMIT_FILE = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Prepared:
    """A device initialised when no job was there yet, and what that took."""

    device: Device
    begun_mono_ns: int
    ended_mono_ns: int
    facts: Mapping[str, Fact]

    def tell(self, measure: Measure) -> None:
        """Say of the first job's ``init`` how much of it was done before that was asked for: all of it, or a part."""
        beforehand_ns = max(0, min(self.ended_mono_ns, measure.start_mono_ns) - self.begun_mono_ns)
        is_whole = self.ended_mono_ns <= measure.start_mono_ns
        measure.status = StageStatus.REUSED if is_whole else StageStatus.DONE
        measure.reason = "done by a spare worker before the run" if is_whole else "begun by a spare worker"
        measure.extra.update(self.facts)
        measure.extra.update({"forked": True, "beforehand_ns": beforehand_ns})


def prepare_device(name: str) -> Prepared:
    """Return a device that is initialised before any job asks for it, in a worker forked from a zygote.

    Raises: as `initialise_device`.
    """
    begun_mono_ns, facts = time.monotonic_ns(), dict[str, Fact]()
    device = _initialise(name, begun_mono_ns, facts)
    return Prepared(device, begun_mono_ns, time.monotonic_ns(), facts)


def initialise_device(job: WorkerJob, measure: Measure) -> Device:
    """Return the job's device, initialised; in a worker forked from a zygote the imports cost nothing.

    Raises: DeviceError if the driver does not initialise, ImportError if a package is not installed.
    """
    begun_mono_ns = time.monotonic_ns()
    measure.extra["start_ns"] = begun_mono_ns - measure.start_mono_ns
    if job.zygote_reason is not None:
        measure.reason = f"spawned fresh: {job.zygote_reason}"
    measure.extra["forked"] = job.zygote_reason is None
    os.environ.update(job.recipe.environment)
    return _initialise(job.device, begun_mono_ns, measure.extra)


def _initialise(name: str, begun_mono_ns: int, facts: dict[str, Fact]) -> Device:
    device = open_device(name)
    import_everything()
    imported_mono_ns = time.monotonic_ns()
    facts["import_ns"] = imported_mono_ns - begun_mono_ns
    facts["threads"] = set_threads()
    facts.update(device.initialise())
    facts["driver_ns"] = time.monotonic_ns() - imported_mono_ns
    return device


def set_threads() -> int:
    """Let torch use the processors of this process again, which the zygote's one thread does not; return how many."""
    import torch

    asked = os.environ.get("OMP_NUM_THREADS", "")
    count = int(asked) if asked.isdigit() and int(asked) > 0 else usable_processors()
    torch.set_num_threads(count)
    return count


def usable_processors(limit_file: Path = CPU_LIMIT_FILE) -> int:
    """Return how many processors this process may use: its affinity, or its container's quota if that is less."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = limit_file.read_text(encoding="ascii").split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return allowed
