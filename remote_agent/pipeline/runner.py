"""Runs the stages of one job after another; what an earlier job left warm is not made again.

This module imports no torch, so that a fresh worker reports ``init`` before it imports.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from remote_agent.pipeline.failures import describe_failure, fail
from remote_agent.pipeline.imports import import_model_code
from remote_agent.pipeline.timing import Stages
from remote_agent.protocol.internal import (
    InternalMessage,
    ShardIdentity,
    WorkerFailed,
    WorkerFinding,
    WorkerGo,
    WorkerJob,
    WorkerReady,
    WorkerRelease,
)
from remote_agent.protocol.messages import Finding
from remote_agent.recipe import recipe_hash

if TYPE_CHECKING:
    from remote_agent.devices import Device
    from remote_agent.pipeline.assign import Warm

STANDBY = "the standby has it"


class Line(Protocol):
    """The two directions to agentd; `channel.Channel` is one."""

    def send(self, message: InternalMessage) -> None: ...

    def receive(self) -> InternalMessage: ...


@dataclass(frozen=True)
class Held:
    """A warm model and what it was made from."""

    recipe_hash: str
    shards: tuple[ShardIdentity, ...]
    warm: Warm


class Runner:
    """Keeps one device and at most one warm model between jobs."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._device: Device | None = None
        self._has_context = False
        self._held: Held | None = None

    def run(self, job: WorkerJob) -> bool:
        """Do one job and report how it went; False if it failed, or was called off before it could go.

        Never raises: what goes wrong is one `WorkerFailed`, with the traceback in the log.
        """
        stages = Stages(self._line.send)
        try:
            return self._run_stages(job, stages)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._line.send(WorkerFailed(describe_failure(error, stages.current)))
            return False

    def _run_stages(self, job: WorkerJob, stages: Stages) -> bool:
        device = self._initialise(job, stages)
        if self._held is None:
            # Time that preflight takes anyway.
            import_model_code(Path(job.recipe.model.path).expanduser())
        go = self._line.receive()
        if isinstance(go, WorkerRelease):
            return False
        if not isinstance(go, WorkerGo):
            raise fail("protocol", f"a worker waits to be told to go on, not for a {type(go).__name__}")
        self._open_context(device, stages)
        warm = self._reuse_model(job, go, stages) or self._warm_model(job, go, device, stages)
        self._held = Held(recipe_hash(job.recipe), go.shards, warm)

        from remote_agent.pipeline import first_request, hold

        with stages.measure("first_request", device) as measure:
            answer = first_request.answer_first_request(warm, job.recipe.request, measure)
        with stages.measure("hold", device) as measure:
            tier = hold.hold_model(warm, device, measure)
        self._line.send(WorkerReady(answer.first_output_mono_ns, answer.text, tier, warm.bytes))
        return True

    def _initialise(self, job: WorkerJob, stages: Stages) -> Device:
        if self._device is not None:
            if job.device != self._device.name:
                raise fail("wrong_device", f"this worker has {self._device.name} and the job is for {job.device}")
            stages.reuse("init", STANDBY, job.init_mono_ns)
            return self._device
        with stages.measure("init", start_mono_ns=job.init_mono_ns) as measure:
            from remote_agent.pipeline import init

            self._device = init.initialise_device(job, measure)
        return self._device

    def _open_context(self, device: Device, stages: Stages) -> None:
        if self._has_context:
            stages.reuse("context", STANDBY)
            return
        from remote_agent.pipeline import context

        with stages.measure("context", device) as measure:
            context.open_context(device, measure)
        self._has_context = True

    def _reuse_model(self, job: WorkerJob, go: WorkerGo, stages: Stages) -> Warm | None:
        """Return the held model if it is what the job asks for; let go of it otherwise."""
        held = self._held
        if held is None:
            return None
        if held.recipe_hash == recipe_hash(job.recipe) and held.shards == go.shards:
            for stage in ("weights", "assign", "compile"):
                stages.reuse(stage, STANDBY)
            return held.warm
        changed = "recipe" if held.recipe_hash != recipe_hash(job.recipe) else "checkpoint's files"
        self._tell(Finding("standby_replaced", "info", f"the {changed} changed: the warm model is loaded again"))
        self._held = None
        del held
        gc.collect()
        return None

    def _warm_model(self, job: WorkerJob, go: WorkerGo, device: Device, stages: Stages) -> Warm:
        from remote_agent.pipeline import assign, compilation, weights

        recipe = job.recipe
        with stages.measure("weights", device) as measure:
            report = _progress(stages, "weights", "bytes", measure.start_mono_ns)
            loaded, folder = weights.load_weights(recipe, device, go.shards, measure, report)
        for note in loaded.notes:
            self._tell(Finding("plain_bytes", "info", note))
        with stages.measure("assign", device) as measure:
            warm, findings = assign.assign_module(recipe, folder, loaded.tensors, device.torch_device, measure)
            del loaded
        for finding in findings:
            self._tell(finding)
        with stages.measure("compile", device) as measure:
            report = _progress(stages, "compile", "shapes", measure.start_mono_ns)
            compiled = compilation.warm_kernels(
                warm, recipe.request, recipe.compile, Path(job.cache_directory), measure, report
            )
        if compiled.fallback is not None:
            self._tell(Finding("compile_fallback", "warning", compiled.fallback))
        return warm

    def _tell(self, finding: Finding) -> None:
        self._line.send(WorkerFinding(finding))


def _progress(stages: Stages, stage: str, unit: str, start_mono_ns: int) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        stages.progress(stage, done, total, start_mono_ns=start_mono_ns, unit=unit)

    return report
