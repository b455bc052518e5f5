"""Runs the stages of one job after another; what an earlier job left warm is not made again.

This module imports no torch, so that a fresh worker reports ``init`` before it imports.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from remote_agent.errors import AgentError
from remote_agent.pipeline.failures import describe_failure, fail, one_line
from remote_agent.pipeline.host import HostShards
from remote_agent.pipeline.imports import import_model_code
from remote_agent.pipeline.timing import Stages
from remote_agent.protocol.internal import (
    InternalMessage,
    WorkerAnswer,
    WorkerAttach,
    WorkerAttached,
    WorkerFailed,
    WorkerFinding,
    WorkerGo,
    WorkerJob,
    WorkerMap,
    WorkerMapped,
    WorkerPrepare,
    WorkerPrepared,
    WorkerReady,
    WorkerRelease,
    WorkerUnmap,
    WorkerUnmapped,
)
from remote_agent.protocol.messages import Finding, Recipe, Tier

if TYPE_CHECKING:
    from remote_agent.devices import Device
    from remote_agent.pipeline.first_request import Answer
    from remote_agent.pipeline.init import Prepared
    from remote_agent.pipeline.keeping import Keeping
    from remote_agent.pipeline.making import Held, Making
    from remote_agent.pipeline.serving import ServeContext
    from remote_agent.pipeline.timing import Measure

STANDBY = "the standby has it"


class Line(Protocol):
    """The two directions to agentd; `channel.Channel` is one."""

    def send(self, message: InternalMessage) -> None: ...

    def receive(self) -> InternalMessage: ...


class Runner:
    """Keeps one device and at most one warm model between jobs."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._device: Device | None = None
        self._prepared: Prepared | None = None
        self._has_context = False
        self._held: Held | None = None
        self._keeper: Keeping | None = None
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

    def prepare(self, message: WorkerPrepare) -> None:
        """Do the first job's ``init`` before it comes, and report that. Never raises: the job does what failed here."""
        problem = None
        try:
            from remote_agent.pipeline import init

            self._prepared = init.prepare_device(message.device)
            self._device = self._prepared.device
            import_model_code(Path(message.model).expanduser())
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            problem = describe_failure(error, None).detail
        self._line.send(WorkerPrepared(problem))

    def attach(self, message: WorkerAttach) -> bool:
        """Attach to what the keeper has, and serve it where that is asked; False when there is nothing more to do.

        Never raises: what goes wrong is one `WorkerFailed`, with the traceback in the log.
        """
        try:
            return self._attach(message)
        except Exception as error:
            if not isinstance(error, AgentError):
                traceback.print_exc(file=sys.stderr)
            self._line.send(WorkerFailed(describe_failure(error, None)))
            return False

    def answer(self) -> None:
        """Send the held model its recipe's request, and report what came. Never raises."""
        from remote_agent.pipeline.first_request import answer_request

        try:
            held = self._held
            if held is None or held.waits:
                raise fail("not_ready", "this process has no model with weights")
            begun = time.monotonic_ns()
            found = answer_request(held.warm, held.recipe.request, held.graph)
            first_ns = found.first_output_mono_ns - begun
            self._line.send(WorkerAnswer(first_ns, time.monotonic_ns() - begun, found.text))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._line.send(WorkerFailed(describe_failure(error, None)))

    def move(self, message: WorkerUnmap | WorkerMap) -> None:
        """Unmap the held weights for a checkpoint of this process, or map them again, and report it. Never raises."""
        try:
            self._line.send(self._moved(message))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._line.send(WorkerFailed(describe_failure(error, None)))

    def _moved(self, message: WorkerUnmap | WorkerMap) -> WorkerUnmapped | WorkerMapped:
        held, keeper, device = self._held, self._keeper, self._device
        if held is None or keeper is None or device is None:
            raise fail("protocol", "a worker that holds no model was asked to move it")
        from remote_agent.pipeline import parking

        if isinstance(message, WorkerUnmap):
            return parking.unmap_weights(held.backing, keeper, device, message.host_room_bytes, self._host)
        backing, steps = parking.map_weights(held.backing, keeper)
        self._held = replace(held, backing=backing)
        return WorkerMapped(steps)

    def _attach(self, message: WorkerAttach) -> bool:
        from remote_agent.pipeline import serving
        from remote_agent.pipeline.attached import attach_model

        recipe = message.job.recipe
        serve = recipe.serve if message.serves else None
        if serve is not None:
            serving.refuse_used_port(serve)
        import_model_code(Path(recipe.model.path).expanduser())
        self._held, self._device, steps = attach_model(message, serves=serve is not None)
        if serve is None:
            self._line.send(WorkerAttached(steps))
            return True
        begun = time.monotonic_ns()
        function = serving.load_entry(serve)
        context = serving.ServeContext(serve, recipe.name, message.job.device)
        threading.Thread(target=self._wait_for_stop, args=(context,), name="stop", daemon=True).start()
        self._line.send(WorkerAttached({**steps, "import_ns": time.monotonic_ns() - begun}))
        serving.call_entry(function, serve.entry, self._held, context)
        return False

    def _wait_for_stop(self, context: ServeContext) -> None:
        while not isinstance(self._line.receive(), WorkerRelease):
            pass
        context.tell_to_stop()

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
        from remote_agent.pipeline.keeping import Keeping
        from remote_agent.pipeline.making import Making

        self._keeper = keeper = Keeping(job, go)
        making = Making(self._line.send, job, go, keeper, device, stages, self._host)
        held = self._find_model(making, job, go, stages)
        if held.waits:
            self._wait(held, making)
        else:
            self._answer(held, making)
        return True

    def _initialise(self, job: WorkerJob, stages: Stages) -> Device:
        if self._device is not None and job.device != self._device.name:
            raise fail("wrong_device", f"this worker has {self._device.name} and the job is for {job.device}")
        if self._device is not None and self._prepared is None:
            stages.reuse("init", STANDBY, job.init_mono_ns)
            return self._device
        with stages.measure("init", start_mono_ns=job.init_mono_ns) as measure:
            if self._prepared is not None:
                prepared, self._prepared = self._prepared, None
                prepared.tell(measure)
                return prepared.device
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

    def _find_model(self, making: Making, job: WorkerJob, go: WorkerGo, stages: Stages) -> Held:
        """Return the held model where it is what the job asks for, or one made now; it waits only if that is asked."""
        held, self._held = self._held, None
        if held is not None and (not held.serves(job.recipe) or held.shards != go.shards):
            from remote_agent.pipeline.arming import let_go

            changed = "checkpoint's files" if held.serves(job.recipe) else "recipe"
            self._tell(Finding("standby_replaced", "info", f"the {changed} changed: the warm model is loaded again"))
            held = None
            let_go()
        if held is None:
            return making.arm() if job.arm else making.warm()
        if held.waits and not job.arm:
            waiting = [held]
            del held
            return making.fill(waiting)
        for stage in ("assign", "compile") if held.waits else ("weights", "assign", "compile"):
            stages.reuse(stage, STANDBY)
        return replace(held, backing=replace(held.backing, is_kept=go.is_resident))

    def _answer(self, held: Held, making: Making) -> None:
        """Ask the model, keep it, and say what holds it."""
        from remote_agent.pipeline import first_request, hold

        recipe, device, stages = making.job.recipe, making.device, making.stages
        queued = making.queued
        with stages.measure("first_request", device, queued.mono_ns if queued is not None else None) as measure:
            answer = first_request.answer_first_request(
                held.warm, recipe.request, measure, held.graph, queued, making.begin_to_settle
            )
        with stages.measure("hold", device) as measure:
            if making.leftovers:
                measure.extra["settle_ns"] = making.settle()
            if held.armed is not None:
                held.armed.range.drop_stand_in()
            kept = hold.hold_model(recipe, held.warm, held.backing, making.keeper, device, measure)
            held, answer = self._compare_graph(held, recipe, answer, measure)
        self._held = replace(held, backing=kept.backing)
        if kept.problem is not None:
            self._tell(Finding("not_kept", "warning", kept.problem))
        self._line.send(WorkerReady(answer.first_output_mono_ns, answer.text, kept.tier, kept.bytes, kept.resident))

    def _compare_graph(self, held: Held, recipe: Recipe, answer: Answer, measure: Measure) -> tuple[Held, Answer]:
        """Compare a graph's first answer over real weights with an ordinary pass's; a graph that differs is not used.

        Another token may be a near tie: it counts where the logits are as near as compiled ones must be.
        """
        from remote_agent.pipeline.compile_attempt import TOLERANCE
        from remote_agent.pipeline.first_request import answer_request
        from remote_agent.pipeline.prompt_graph import largest_deviation

        if not answer.is_replayed or held.is_compared or held.graph is None:
            return held, answer
        deviation = largest_deviation(held.warm, recipe.request, held.graph)
        eager = answer_request(held.warm, recipe.request)
        measure.extra["graph_equal"] = eager.tokens == answer.tokens
        measure.extra["graph_difference"] = min(deviation, 1e30)
        tolerance = TOLERANCE[held.warm.dtype]
        if deviation <= tolerance:
            return replace(held, is_compared=True), answer
        text = (
            f"the graph's logits differ from an ordinary pass's by {deviation:.3g} of the largest, {tolerance:g} is "
            f"allowed: it gave {answer.tokens}, the pass {eager.tokens}; the graph is not used, the pass counts"
        )
        self._tell(Finding("graph_differs", "warning", one_line(text)))
        assert held.armed is not None
        return replace(held, armed=replace(held.armed, graph=None)), eager

    def _wait(self, held: Held, making: Making) -> None:
        """Wait for weights, and say what is held until then."""
        from remote_agent.pipeline import arming, hold

        assert held.armed is not None
        with making.stages.measure("hold", making.device) as measure:
            measure.bytes = arming.taken_bytes(held.armed, making.device)
            hold.describe_memory(making.device, measure)
        self._held = held
        self._line.send(WorkerReady(None, "", Tier.ARMED, measure.bytes))

    def _tell(self, finding: Finding) -> None:
        self._line.send(WorkerFinding(finding))
