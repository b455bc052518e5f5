"""Carries out one intent at a time per node on a real fleet, and says what came of it as an event for the machine.

What goes wrong is never raised: it is the event. Everything may be cancelled, and is over when the cancel returns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from console.errors import GlowplugError, LinkError, RequestRefused
from console.fleet import Fleet
from console.rollout.events import (
    BackedOut,
    BackOutNode,
    Event,
    GateSampled,
    HookEnded,
    Intent,
    NodeReached,
    ReadNode,
    RunHook,
    StartNode,
    StopEnded,
    StopNode,
    TakeSample,
)
from console.rollout.hooks import Ended, environment, run_program
from console.rollout.measure import is_still_warm
from console.rollout.samples import Warm, sample_gate
from console.rollout.saved import Settings, run_uid
from console.rollout.settings import Hook
from console.rollout.states import NodeState, RolloutState, Verdict
from console.state import LinkStatus, RunView
from remote_agent.protocol.messages import RunRecord, RunState

CANCEL_S = 10.0
AGAIN_S = 1.0
NO_RUN = "no_such_run"

Data = Mapping[str, object]
Tell = Callable[[Event, Data], None]
"""Takes what happened on the way, before the intent is carried out to its end."""


@dataclass(frozen=True)
class Outcome:
    """What came of an intent: ``event`` for the machine, ``data`` for the timeline."""

    event: Event | None = None
    data: Data = field(default_factory=dict)


class Effects(Protocol):
    """What a controller needs to act on the world."""

    async def carry_out(self, intent: Intent, state: RolloutState, tell: Tell) -> Outcome:
        """Do what is wanted, as it is in ``state``. Does not raise, but when it is cancelled."""

    def down(self) -> Mapping[str, str | None]:
        """Return, for each node of which that is known, why it can't be reached; None where it can."""

    def said(self) -> Mapping[str, str]:
        """Return, for each node of which a hook runs now, the last line that it printed."""


class FleetEffects:
    """The real ones. ``environ``: what hooks and commands get beside their own variables."""

    def __init__(self, fleet: Fleet, rollout_uid: str, settings: Settings, environ: Mapping[str, str]) -> None:
        self._fleet = fleet
        self._uid = rollout_uid
        self._settings = settings
        self._environ = environ
        self._said: dict[str, str] = {}

    def said(self) -> Mapping[str, str]:
        return self._said

    def down(self) -> Mapping[str, str | None]:
        known: dict[str, str | None] = {}
        for name in self._fleet.nodes:
            link = self._fleet.state(name).link
            if link.status is LinkStatus.CONNECTED:
                known[name] = None
            elif link.status is LinkStatus.DISCONNECTED:
                known[name] = link.reason or link.status.value
        return known

    async def carry_out(self, intent: Intent, state: RolloutState, tell: Tell) -> Outcome:
        match intent:
            case StartNode():
                return await self._start(intent, state, tell)
            case StopNode():
                return await self._stop(intent)
            case RunHook():
                return await self._run_hook(intent, state)
            case BackOutNode():
                return await self._back_out(intent, state)
            case TakeSample():
                return await self._sample(intent, state)
            case ReadNode():
                return await self._read(intent, state, tell)
        return Outcome()

    # --- an attempt -------------------------------------------------------------

    async def _start(self, intent: StartNode, state: RolloutState, tell: Tell) -> Outcome:
        data: Data = {}
        if "before_shift" in intent.steps:
            ended = await self._hook("before_shift", intent.node, intent.attempt, state)
            data = _hook_data(ended)
            if not ended.succeeded:
                return _failed(intent, f"hook before_shift {ended.reason}", data)
            tell(NodeReached(intent.node, intent.attempt, NodeState.WARMING), data)
        uid = run_uid(self._uid, intent.node, intent.attempt)
        recipe = self._settings.recipe
        try:
            await self._fleet.warm(intent.node, recipe.name, run_uid=uid, recipe=recipe)
        except GlowplugError as error:
            return _failed(intent, str(error), unreachable=isinstance(error, LinkError))
        return await self._follow(intent, uid)

    async def _follow(self, intent: StartNode | ReadNode, uid: str) -> Outcome:
        """Wait for the end of an attempt's run; a lost link is waited out."""
        try:
            run = await self._fleet.wait(intent.node, uid)
        except GlowplugError as error:
            return _failed(intent, str(error), unreachable=isinstance(error, LinkError))
        if run.state is RunState.READY:
            return Outcome(NodeReached(intent.node, intent.attempt, NodeState.VERIFYING), _run_data(run))
        unreachable = run.failure is not None and run.failure.code == "unreachable"
        return _failed(intent, _failure(run), _run_data(run), unreachable)

    async def _stop(self, intent: StopNode) -> Outcome:
        uid = run_uid(self._uid, intent.node, intent.attempt)
        try:
            async with asyncio.timeout(CANCEL_S):
                await self._fleet.cancel(intent.node, uid)
        except (GlowplugError, TimeoutError) as error:
            if isinstance(error, RequestRefused) and error.code == NO_RUN:
                return Outcome(StopEnded(intent.node, intent.attempt, True, str(error)))
            reason = str(error) or f"no answer within {CANCEL_S:g} s"
            return Outcome(StopEnded(intent.node, intent.attempt, False, reason))
        return Outcome(StopEnded(intent.node, intent.attempt, True))

    async def _read(self, intent: ReadNode, state: RolloutState, tell: Tell) -> Outcome:
        """Ask the node what became of an attempt, for as long as it takes to reach it."""
        uid = run_uid(self._uid, intent.node, intent.attempt)
        while True:
            try:
                run = await self._fleet.find_run(intent.node, uid)
                residents = (await self._fleet.status(intent.node)).residents
                break
            except RequestRefused as error:
                if error.code != NO_RUN:
                    return _failed(intent, str(error))
                return Outcome(NodeReached(intent.node, intent.attempt, NodeState.PENDING, "its run was never begun"))
            except GlowplugError as error:
                if self._fleet.state(intent.node).link.final:
                    return _failed(intent, str(error), unreachable=True)
            await asyncio.sleep(AGAIN_S)
        if not run.state.is_terminal:
            tell(NodeReached(intent.node, intent.attempt, NodeState.WARMING), {"run_uid": uid})
            return await self._follow(intent, uid)
        if run.state is not RunState.READY:
            return _failed(intent, _failure(run), _run_data(run))
        if not is_still_warm(run, residents):
            return _failed(intent, f"was {run.tier_to.value if run.tier_to else 'ready'}, and is not warm any more")
        row = state.node(intent.node)
        # Of a shift that was cut off nobody knows how far it came: it is run again.
        reached = NodeState.SHIFTING if row is not None and row.is_shifted else NodeState.VERIFYING
        return Outcome(NodeReached(intent.node, intent.attempt, reached), _run_data(run))

    # --- traffic ------------------------------------------------------------------

    async def _run_hook(self, intent: RunHook, state: RolloutState) -> Outcome:
        ended = await self._hook(intent.hook, intent.node, intent.attempt, state)
        event = HookEnded(intent.node, intent.attempt, intent.hook, ended.succeeded, ended.reason)
        return Outcome(event, _hook_data(ended))

    async def _back_out(self, intent: BackOutNode, state: RolloutState) -> Outcome:
        ended = await self._hook("on_abort", intent.node, intent.attempt, state)
        reason = f"hook on_abort {ended.reason}" if ended.reason else ""
        return Outcome(BackedOut(intent.node, ended.succeeded, reason), _hook_data(ended))

    async def _hook(self, name: str, node: str, attempt: int, state: RolloutState) -> Ended:
        hook: Hook | None = getattr(self._settings.rollout.hooks, name)
        row = state.node(node)
        if hook is None or row is None:
            return Ended(0, "", (), 0, 0)
        environ = environment(self._environ, self._uid, name, [(node, row.batch, attempt)])
        try:
            return await run_program(
                hook.argv, environ, hook.timeout_s, said=lambda line: self._said.update({node: line})
            )
        finally:
            self._said.pop(node, None)

    # --- gates ----------------------------------------------------------------------

    async def _sample(self, intent: TakeSample, state: RolloutState) -> Outcome:
        gate = self._settings.rollout.gates[intent.gate]
        rows = [row for row in state.nodes if row.name in intent.nodes]
        warm = [Warm(row.name, run_uid(self._uid, row.name, row.attempt)) for row in rows]
        environ = environment(self._environ, self._uid, "gate", [(row.name, row.batch, row.attempt) for row in rows])
        counts = [one for one in state.analysis.gates if one.gate == intent.gate] if state.analysis else []
        is_first = not any(one.taken for one in counts)
        sample = await sample_gate(self._fleet, gate, self._settings.recipe, warm, environ, is_first)
        event = GateSampled(intent.analysis, intent.gate, sample.verdict, sample.reason)
        return Outcome(event, {"nodes": sample.values} if sample.values else {})


async def until_reached_or_not(fleet: Fleet, nodes: Sequence[str]) -> None:
    """Wait until each node has answered, or can't be reached within its time-out: that one is down."""

    async def reach(name: str) -> None:
        with contextlib.suppress(GlowplugError):
            await fleet.status(name)

    await asyncio.gather(*(reach(name) for name in nodes))


def failure_of(intent: Intent, reason: str) -> Event | None:
    """Return what an intent has come to that could not be carried out at all."""
    match intent:
        case StartNode() | ReadNode():
            return NodeReached(intent.node, intent.attempt, NodeState.FAILED, reason)
        case RunHook():
            return HookEnded(intent.node, intent.attempt, intent.hook, False, reason)
        case BackOutNode():
            return BackedOut(intent.node, False, reason)
        case StopNode():
            return StopEnded(intent.node, intent.attempt, False, reason)
        case TakeSample():
            return GateSampled(intent.analysis, intent.gate, Verdict.INCONCLUSIVE, reason)
    return None


def _failed(intent: StartNode | ReadNode, reason: str, data: Data | None = None, unreachable: bool = False) -> Outcome:
    return Outcome(NodeReached(intent.node, intent.attempt, NodeState.FAILED, reason, unreachable), data or {})


def _failure(run: RunView | RunRecord) -> str:
    return run.failure.detail if run.failure is not None else f"its run was {run.state.value}"


def _run_data(run: RunView | RunRecord) -> Data:
    return {
        "run_uid": run.run_uid,
        "run_state": run.state.value,
        "wall_ns": run.wall_ns,
        "first_output_ns": run.first_output_ns,
        "tier_from": run.tier_from.value,
        "tier_to": run.tier_to.value if run.tier_to else None,
    }


def _hook_data(ended: Ended) -> Data:
    return {
        "code": ended.code,
        "reason": ended.reason,
        "tries": ended.tries,
        "duration_ns": ended.duration_ns,
        "output": ended.output,
    }
