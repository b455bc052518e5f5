"""Stage ``init``: everything imported, threads set, the driver initialised; no context yet."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from remote_agent.devices import Device, open_device
from remote_agent.pipeline.imports import import_everything
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.internal import WorkerJob

CPU_LIMIT_FILE = Path("/sys/fs/cgroup/cpu.max")


def initialise_device(job: WorkerJob, measure: Measure) -> Device:
    """Return the job's device, initialised; in a worker forked from a zygote the imports cost nothing.

    Raises: DeviceError if the driver does not initialise, ImportError if a package is not installed.
    """
    begun = time.monotonic_ns()
    measure.extra["start_ns"] = begun - measure.start_mono_ns
    if job.zygote_reason is not None:
        measure.reason = f"spawned fresh: {job.zygote_reason}"
    os.environ.update(job.recipe.environment)
    device = open_device(job.device)
    import_everything()
    imported = time.monotonic_ns()
    measure.extra["import_ns"] = imported - begun
    measure.extra["forked"] = job.zygote_reason is None
    measure.extra["threads"] = set_threads()
    measure.extra.update(device.initialise())
    measure.extra["driver_ns"] = time.monotonic_ns() - imported
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
