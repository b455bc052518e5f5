"""Runs the stages of one job after another; what an earlier job left warm is not made again.

This module imports no torch, so that a fresh worker reports ``init`` before it imports.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from remote_agent.errors import AgentError, DeviceError, KeeperError, ResidentLostError
from remote_agent.pipeline.failures import describe_failure, fail, one_line
from remote_agent.pipeline.host import HostShards
from remote_agent.pipeline.imports import import_model_code
from remote_agent.pipeline.timing import Stages
from remote_agent.protocol.internal import (
    InternalMessage,
    ShardIdentity,
    WorkerFailed,
    WorkerFinding,
    WorkerGo,
    WorkerJob,
    WorkerLostResident,
    WorkerReady,
    WorkerRelease,
)
from remote_agent.protocol.messages import Finding
from remote_agent.recipe import recipe_hash

if TYPE_CHECKING:
    from remote_agent.devices import Device
    from remote_agent.pipeline.assign import Warm
    from remote_agent.pipeline.keeping import Backing, Keeping
    from remote_agent.pipeline.timing import Measure
    from remote_agent.pipeline.weights import Weights

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
    backing: Backing


class Runner:
    """Keeps one device and at most one warm model between jobs."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._device: Device | None = None
        self._has_context = False
        self._held: Held | None = None
        self._settle: Callable[[], int] | None = None
        self._host = HostShards()

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
        if self._held is None and job.recipe.builds_model:
            # Time that preflight takes anyway.
            import_model_code(Path(job.recipe.model.path).expanduser())
        go = self._line.receive()
        if isinstance(go, WorkerRelease):
            return False
        if not isinstance(go, WorkerGo):
            raise fail("protocol", f"a worker waits to be told to go on, not for a {type(go).__name__}")
        self._open_context(device, stages)
        if job.recipe.target_tier == "host":
            self._line.send(self._host.keep(job.recipe, go, device, stages, self._tell))
            return True
        from remote_agent.pipeline import first_request, hold, keeping

        keeper = keeping.Keeping(job, go)
        held = self._reuse_model(job, go, stages) or self._warm_model(job, go, keeper, device, stages)
        self._held = held
        with stages.measure("first_request", device) as measure:
            answer = first_request.answer_first_request(held.warm, job.recipe.request, measure)
        with stages.measure("hold", device) as measure:
            settle, self._settle = self._settle, None
            if settle is not None:
                measure.extra["settle_ns"] = settle()
            kept = hold.hold_model(job.recipe, held.warm, held.backing, keeper, device, measure)
        self._held = replace(held, backing=kept.backing)
        if kept.problem is not None:
            self._tell(Finding("not_kept", "warning", kept.problem))
        self._line.send(WorkerReady(answer.first_output_mono_ns, answer.text, kept.tier, kept.bytes, kept.resident))
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

    def _reuse_model(self, job: WorkerJob, go: WorkerGo, stages: Stages) -> Held | None:
        """Return the held model if it is what the job asks for; let go of it otherwise."""
        held = self._held
        if held is None:
            return None
        if held.recipe_hash == recipe_hash(job.recipe) and held.shards == go.shards:
            for stage in ("weights", "assign", "compile"):
                stages.reuse(stage, STANDBY)
            return replace(held, backing=replace(held.backing, is_kept=go.is_resident))
        changed = "recipe" if held.recipe_hash != recipe_hash(job.recipe) else "checkpoint's files"
        self._tell(Finding("standby_replaced", "info", f"the {changed} changed: the warm model is loaded again"))
        self._held = None
        del held
        gc.collect()
        return None

    def _warm_model(self, job: WorkerJob, go: WorkerGo, keeper: Keeping, device: Device, stages: Stages) -> Held:
        from remote_agent.pipeline import assign, compilation

        recipe = job.recipe
        with stages.measure("weights", device) as measure:
            found = self._find_weights(job, go, keeper, device, stages, measure)
        for note in found.notes:
            self._tell(Finding("plain_bytes", "info", note))
        backing = found.backing
        with stages.measure("assign", device) as measure:
            warm, findings = assign.assign_module(recipe, found.folder, found.tensors, device.torch_device, measure)
            settle = self._host.let_go(device, found.settle)
            del found
        for finding in findings:
            self._tell(finding)
        with stages.measure("compile", device) as measure:
            report = _progress(stages, "compile", "shapes", measure.start_mono_ns)
            compiled = compilation.warm_kernels(
                warm, recipe.request, recipe.compile, Path(job.cache_directory), measure, report
            )
        if compiled.fallback is not None:
            self._tell(Finding("compile_fallback", "warning", compiled.fallback))
        self._settle = settle
        return Held(recipe_hash(recipe), go.shards, warm, backing)

    def _find_weights(
        self, job: WorkerJob, go: WorkerGo, keeper: Keeping, device: Device, stages: Stages, measure: Measure
    ) -> Weights:
        """Return the keeper's weights where it has them; what can't be used there is dropped and loaded again."""
        from remote_agent.pipeline import weights

        if keeper.has_weights:
            try:
                return weights.attach_weights(job.recipe, device, keeper, measure)
            except (KeeperError, ResidentLostError, DeviceError) as error:
                self._give_up_resident(keeper, error, measure)
        report = _progress(stages, "weights", "bytes", measure.start_mono_ns)
        registered = self._host.of(go.shards, self._tell)
        return weights.load_weights(job.recipe, device, go.shards, measure, report, registered)

    def _give_up_resident(self, keeper: Keeping, error: AgentError, measure: Measure) -> None:
        """Say that the weights are loaded again; memory that can't be used is dropped, for nobody else can use it."""
        text = one_line(f"lost: reload: {error}")
        self._tell(Finding("resident_lost", "warning", text))
        measure.extra["resident_lost"] = text[:500]
        if isinstance(error, ResidentLostError) and keeper.name is not None:
            keeper.drop()
            self._line.send(WorkerLostResident(keeper.name, text))

    def _tell(self, finding: Finding) -> None:
        self._line.send(WorkerFinding(finding))


def _progress(stages: Stages, stage: str, unit: str, start_mono_ns: int) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        stages.progress(stage, done, total, start_mono_ns=start_mono_ns, unit=unit)

    return report
