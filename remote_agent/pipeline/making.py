"""Makes the model of one job: with its weights, without them, or from one that waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.errors import (
    AgentError,
    DeviceError,
    KeeperError,
    NotArmableError,
    ResidentLostError,
    StageError,
)
from remote_agent.pipeline import arming, assign, compilation, prompt_graph, weights
from remote_agent.pipeline.arming import Armed
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.failures import one_line
from remote_agent.pipeline.host import HostShards
from remote_agent.pipeline.keeping import Backing, Keeping
from remote_agent.pipeline.prompt_graph import PromptGraph, Queued
from remote_agent.pipeline.timing import Measure, Stages
from remote_agent.pipeline.weights import Weights
from remote_agent.protocol.internal import (
    InternalMessage,
    ShardIdentity,
    WorkerFinding,
    WorkerGo,
    WorkerJob,
    WorkerLostResident,
)
from remote_agent.protocol.messages import Finding, Recipe
from remote_agent.recipe import armed_hash, warm_hash

if TYPE_CHECKING:
    from remote_agent.devices import Device
    from remote_agent.loader.cleanup import Settling

ARMED = "the armed process has it"


@dataclass(frozen=True)
class Held:
    """A warm model and what it was made from; ``armed``: the range that it lies in, which may wait for weights.

    ``is_compared``: the logits of the prompt's graph were those of an ordinary pass, within what compiled layers may
    differ.
    """

    recipe: Recipe
    shards: tuple[ShardIdentity, ...]
    warm: Warm
    backing: Backing
    armed: Armed | None = None
    is_compared: bool = False

    @property
    def waits(self) -> bool:
        """Whether its weights are not there yet."""
        return self.armed is not None and not self.armed.has_weights

    @property
    def graph(self) -> PromptGraph | None:
        return None if self.armed is None else self.armed.graph

    def serves(self, recipe: Recipe) -> bool:
        """Whether it is what ``recipe`` asks for. While it waits for weights, it serves other requests too."""
        is_same = warm_hash(self.recipe) == warm_hash(recipe)
        return is_same or (self.waits and armed_hash(self.recipe) == armed_hash(recipe))


class Making:
    """One job's; what it is about is open to whoever goes on. ``leftovers``: what a load left behind.

    ``queued``: the job's request, where the device does it already.
    """

    def __init__(
        self,
        send: Callable[[InternalMessage], None],
        job: WorkerJob,
        go: WorkerGo,
        keeper: Keeping,
        device: Device,
        stages: Stages,
        host: HostShards,
    ) -> None:
        self._send, self.job, self._recipe, self._go = send, job, job.recipe, go
        self.keeper, self.device, self.stages = keeper, device, stages
        self._host = host
        self.leftovers: tuple[Settling, ...] = ()
        self.queued: Queued | None = None

    def warm(self) -> Held:
        """Return the recipe's model with its weights, loaded or found at the keeper."""
        with self.stages.measure("weights", self.device) as measure:
            found = self._find_weights(measure)
        return self._finish(found)

    def arm(self) -> Held:
        """Return the recipe's model without its weights; where that can't be, with them, and a finding says why."""
        armed, backing, problem = None, Backing(), ""
        with self.stages.measure("assign", self.device) as measure:
            try:
                armed, warm, findings = arming.arm_module(self._recipe, self._go.shards, self.device, measure)
                self._tell(findings)
            except NotArmableError as error:
                problem = measure.reason = one_line(f"not armed: {error}")
            if armed is None:
                self._tell([Finding("not_armed", "warning", f"{problem}; its weights are loaded, for a standby")])
                arming.let_go()
                with self.stages.measure("weights", self.device) as loading:
                    found = self._find_weights(loading)
                warm, backing = self._assign(found, measure)
                del found
        with self.stages.measure("compile", self.device) as measure:
            self._compile(warm, measure)
            if armed is not None:
                recipe, root = self._recipe, Path(self.job.cache_directory).expanduser()
                graph = prompt_graph.capture_prompt(warm, recipe.request, recipe.compile, root, self.device, measure)
                armed = replace(armed, graph=graph)
                arming.rehearse(armed)
                arming.settle_down()
        return Held(self._recipe, self._go.shards, warm, backing, armed)

    def fill(self, waiting: list[Held]) -> Held:
        """Return what waits with its weights mapped under it; where they can't be, a model made anew.

        ``waiting`` has the one that waits and is emptied: nobody else may keep what is not used.
        """
        held = waiting.pop()
        assert held.armed is not None
        found, problem = None, ""
        warm = arming.for_request(held.warm, held.armed, self._recipe)
        with self.stages.measure("weights") as measure:
            try:
                found = self._find_weights(measure, held.armed, partial(self._ask, warm, held.graph))
                arming.put_under(held.armed, found, measure)
            except NotArmableError as error:
                problem = one_line(f"the armed process is not used: {error}")
            if problem:
                self._tell([Finding("armed_not_used", "warning", problem)])
                del held, warm
                arming.let_go()
                found = found or self._find_weights(measure)
                measure.reason = "; ".join(filter(None, (problem, measure.reason)))
            if self.queued is None:  # else the device answers already, over weights that were looked at
                self.device.synchronise()
        assert found is not None
        if problem or held.armed is None:
            return self._finish(found)
        self.leftovers = (*found.leftovers, *self._host.let_go(self.device))
        for stage in ("assign", "compile"):
            self.stages.reuse(stage, ARMED)
        backing = replace(found.backing, range=held.armed.range)
        return replace(held, recipe=self._recipe, warm=warm, backing=backing)

    def begin_to_settle(self) -> None:
        """Have leftovers given back from now on, which holds locks of the driver that a first token waits for."""
        for leftover in self.leftovers:
            leftover.begin()

    def settle(self) -> int:
        """Wait until nothing is left over, and return the nanoseconds of the longest. Raises: DeviceError, OSError"""
        return max([leftover.finish() for leftover in self.leftovers], default=0)

    def _finish(self, found: Weights) -> Held:
        is_rehearsed = found.is_rehearsed
        with self.stages.measure("assign", self.device) as measure:
            warm, backing = self._assign(found, measure)
            del found
        with self.stages.measure("compile", self.device) as measure:
            self._compile(warm, measure, is_rehearsed)
        return Held(self._recipe, self._go.shards, warm, backing)

    def _assign(self, found: Weights, measure: Measure) -> tuple[Warm, Backing]:
        self._tell(Finding("plain_bytes", "info", note) for note in found.notes)
        warm, findings = assign.assign_module(
            self._recipe, found.folder, found.tensors, self.device.torch_device, measure
        )
        self._tell(findings)
        self.leftovers = (*found.leftovers, *self._host.let_go(self.device))
        return warm, found.backing

    def _compile(self, warm: Warm, measure: Measure, is_rehearsed: bool = False) -> None:
        """Warm the kernels, and compile them where the recipe asks for it."""
        report = self._progress("compile", "shapes", measure)
        recipe, cache = self._recipe, Path(self.job.cache_directory)
        compiled = compilation.warm_kernels(
            warm, recipe.request, recipe.compile, cache, measure, report, is_rehearsed=is_rehearsed
        )
        if compiled.fallback is not None:
            self._tell([Finding("compile_fallback", "warning", compiled.fallback)])

    def _ask(self, warm: Warm, graph: PromptGraph | None) -> None:
        """Queue the request where it is a replay; what is wrong with it is for its own stage to say."""
        if graph is not None:
            with contextlib.suppress(StageError):
                self.queued = prompt_graph.queue_request(warm, self._recipe.request, graph)

    def _find_weights(
        self, measure: Measure, armed: Armed | None = None, use: Callable[[], None] = lambda: None
    ) -> Weights:
        """Return the keeper's weights where it has them; what can't be used there is dropped and loaded again.

        With ``armed`` they are mapped under it, and ``use`` may queue work over them; or loaded so that they can be.
        Raises: NotArmableError
        """
        if self.keeper.has_weights:
            try:
                if armed is not None:
                    return arming.attach_under(armed, self.keeper, measure, use)
                return weights.attach_weights(self._recipe, self.device, self.keeper, measure)
            except (KeeperError, ResidentLostError, DeviceError) as error:
                self.queued = None
                self._give_up_resident(error, measure)
            except NotArmableError:
                self.queued = None
                raise
        report = self._progress("weights", "bytes", measure)
        under = None if armed is None else armed.range
        registered = self._host.of(self._go.shards, self._tell_one)
        return weights.load_weights(self._recipe, self.device, self._go.shards, measure, report, registered, under)

    def _give_up_resident(self, error: AgentError, measure: Measure) -> None:
        """Say that the weights are loaded again; memory that can't be used is dropped, for nobody else can use it."""
        text = one_line(f"lost: reload: {error}")
        self._tell([Finding("resident_lost", "warning", text)])
        measure.extra["resident_lost"] = text[:500]
        if isinstance(error, ResidentLostError) and self.keeper.name is not None:
            self.keeper.drop()
            self._send(WorkerLostResident(self.keeper.name, text))

    def _tell(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._send(WorkerFinding(finding))

    def _tell_one(self, finding: Finding) -> None:
        self._tell([finding])

    def _progress(self, stage: str, unit: str, measure: Measure) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            self.stages.progress(stage, done, total, start_mono_ns=measure.start_mono_ns, unit=unit)

        return report
