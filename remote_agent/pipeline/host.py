"""Tier ``host``: a worker keeps a model's shards registered with its GPU, and the next run copies from them.

Registered memory can't be reclaimed, so what a run has used is given back when it goes on to a tier of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.cleanup import Settling, finally_do, on_failure
from remote_agent.loader.registrations import RegistrationRefused, Registrations, register_all
from remote_agent.loader.route import find_map_refusal
from remote_agent.loader.shards import OpenShards
from remote_agent.pagecache.locking import find_room_problem, pages_of
from remote_agent.pagecache.stage import check_stay, read_cached
from remote_agent.pipeline.failures import fail, one_line
from remote_agent.protocol.internal import ShardIdentity, WorkerGo, WorkerReady
from remote_agent.protocol.messages import Finding, Recipe, StageStatus, Tier

if TYPE_CHECKING:
    from remote_agent.devices import Device
    from remote_agent.devices.cuda import CudaDevice
    from remote_agent.pipeline.timing import Measure, Stages

Tell = Callable[[Finding], None]

HELD = "its shards are registered already"


class HostShards:
    """What one worker keeps registered between jobs."""

    def __init__(self) -> None:
        self._kept: Registrations | None = None

    def keep(self, recipe: Recipe, go: WorkerGo, device: Device, stages: Stages, tell: Tell) -> WorkerReady:
        """Register every shard and keep it so; where that is refused the shards are cached, and it is said why.

        Raises: CheckpointError, LoadError naming the file; DeviceError; StageError ``not_cached``, ``needs_gpu``
        """
        if device.kind != "cuda":
            raise fail("needs_gpu", f"target_tier host registers files with a GPU, and {device.name} is none")
        if self.of(go.shards, tell) is None:
            self._kept = self._register(recipe, go, device, stages, tell)  # type: ignore[arg-type]
        else:
            stages.reuse("weights", HELD)
        if self._kept is None:
            return WorkerReady(None, "", Tier.CACHED, sum(shard.size_bytes for shard in go.shards), is_held=False)
        with stages.measure("hold") as measure:
            measure.bytes = self._kept.size_bytes
            measure.extra["holder"] = "worker"
        return WorkerReady(None, "", Tier.HOST, self._kept.size_bytes)

    def of(self, shards: tuple[ShardIdentity, ...], tell: Tell) -> Registrations | None:
        """Return what is kept of exactly these files; what is kept of others is given back."""
        if self._kept is not None and self._kept.identities != shards:
            kept, self._kept = self._kept, None
            kept.close()
            tell(Finding("registrations_dropped", "warning", "its files changed since they were registered"))
        return self._kept

    def let_go(self, device: Device) -> tuple[Settling, ...]:
        """Forget what is kept; return what gives it back once it is begun."""
        kept, self._kept = self._kept, None
        if kept is None:
            return ()
        return (Settling(partial(_close_on, device, kept), "host-unregister", begins=False),)  # type: ignore[arg-type]

    def _register(
        self, recipe: Recipe, go: WorkerGo, device: CudaDevice, stages: Stages, tell: Tell
    ) -> Registrations | None:
        checkpoint = inspect(Path(recipe.model.path).expanduser(), recipe.model.revision)
        with stages.measure("weights", device) as measure, OpenShards(checkpoint.shards, go.shards) as shards:
            read_cached(checkpoint, shards, stages, measure)
            problem = find_room_problem(pages_of(checkpoint.shards), go.registered_bytes)
            problem = problem or find_map_refusal(checkpoint, device.runtime, device.ordinal, device.ring.limits)
            kept = None
            if problem is None:
                kept, problem = _try_to_register(checkpoint, shards, device, stages, measure)
            if kept is not None:
                return kept
            measure.reason = f"cached instead of host: {problem}"
            tell(Finding("not_registered", "warning", one_line(measure.reason)))
            finding = check_stay(checkpoint, measure)
        if finding is not None:
            tell(finding)
        return None


def _try_to_register(
    checkpoint: Checkpoint, shards: OpenShards, device: CudaDevice, stages: Stages, measure: Measure
) -> tuple[Registrations | None, str | None]:
    """Return the shards registered, or why they can't be. Raises: LoadError naming the file; DeviceError"""
    begun = time.monotonic_ns()
    progress = partial(stages.progress, "weights", start_mono_ns=measure.start_mono_ns)
    try:
        kept = register_all(
            checkpoint.shards, shards, device.runtime, device.ring.limits.registration_bytes, progress, measure.announce
        )
    except RegistrationRefused as refusal:
        return None, str(refusal)
    with on_failure(kept.close):
        shards.check_unchanged()
        kept.ceiling_bytes_s = device.ring.begin_ceiling().finish()
    ended = time.monotonic_ns()
    measure.extra.update(read_bytes=measure.bytes, register_ns=ended - begun, registrations=kept.count)
    measure.status, measure.path, measure.reason = StageStatus.DONE, "registered", None
    measure.bytes = kept.size_bytes
    measure.rate_bytes_s = kept.size_bytes / max(ended - measure.start_mono_ns, 1) * 1e9
    return kept, None


def _close_on(device: CudaDevice, kept: Registrations) -> None:
    """Close from any thread: each has a device of its own."""
    with finally_do(kept.close):
        device.runtime("cudaSetDevice", device.ordinal)
