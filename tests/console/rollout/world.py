"""Plays what surrounds the rollout's machine: keeps its intents, answers them, and checks the rules at every turn."""

from __future__ import annotations

import json
from collections.abc import Sequence

from console.rollout import events as e
from console.rollout.advance import waiting_for
from console.rollout.machine import step
from console.rollout.states import (
    GateRule,
    NodeRow,
    NodeState,
    Phase,
    RolloutState,
    Rules,
    Verdict,
    begin,
)
from remote_agent.protocol.codec import Unknown, decode, encode

_WARM = (NodeState.VERIFYING, NodeState.READY, NodeState.SHIFTING)
HOOKS = ("before_shift", "shift", "after_shift", "on_abort")


class World:
    """One rollout with all that it ever asked for; every state passes through JSON on its way."""

    def __init__(
        self,
        rules: Rules,
        batches: Sequence[Sequence[str]] = (("a",),),
        down: Sequence[str] = (),
        begun: bool = True,
        ends: bool = True,
    ) -> None:
        self.state: RolloutState = begin(rules, batches, down)
        self.asked: list[e.Intent] = []
        self.last: tuple[e.Intent, ...] = ()
        self.allowed: set[tuple[str, int]] = set()
        self.failures = 0
        self.unended: set[tuple[str, int]] = set()
        self.ends = ends
        if begun:
            self.do(e.Begin())

    def do(self, *events: e.Event) -> tuple[e.Intent, ...]:
        """Let these events happen; return what the last one made the rollout want.

        With ``ends`` each node says at once that what was to be ended is.
        """
        for event in events:
            self._happen(event)
            if self.ends:
                self._answer_stops()
        return self.last

    def _happen(self, event: e.Event) -> None:
        before = self.state
        after, self.last = step(before, event)
        self._note_verified(before, event)
        self.state = decode(RolloutState, json.loads(json.dumps(encode(after))), Unknown.REFUSE)
        assert self.state == after
        self.asked += self.last
        if isinstance(event, e.StopEnded) and event.succeeded and not before.phase.is_over:
            self.unended.discard((event.node, event.attempt))
        self.unended |= {(one.node, one.attempt) for one in self.last if isinstance(one, e.StopNode)}
        self._check(before)

    def _answer_stops(self) -> None:
        wanted = self.last
        for stop in [one for one in wanted if isinstance(one, e.StopNode)]:
            self._happen(e.StopEnded(stop.node, stop.attempt, True))
            wanted = (*wanted, *self.last)
        self.last = wanted

    def row(self, name: str) -> NodeRow:
        row = self.state.node(name)
        assert row is not None
        return row

    def wanted(self, kind: type) -> list[e.Intent]:
        return [intent for intent in self.asked if isinstance(intent, kind)]

    def warm(self, *names: str) -> None:
        """Let each node's attempt come as far as it comes by itself."""
        for name in names:
            self.do(e.NodeReached(name, self.row(name).attempt, NodeState.VERIFYING))

    def fail(self, name: str, reason: str = "out of memory", unreachable: bool = False) -> None:
        self.do(e.NodeReached(name, self.row(name).attempt, NodeState.FAILED, reason, unreachable))

    def sample(self, verdict: Verdict, gate: int = 0) -> None:
        analysis = self.state.analysis
        assert analysis is not None
        self.do(e.GateSampled(analysis.number, gate, verdict, "as told"))

    def end_hook(self, name: str, succeeded: bool = True) -> None:
        row = self.row(name)
        assert row.hook is not None
        self.do(e.HookEnded(name, row.attempt, row.hook, succeeded, "exit 1"))

    def tick(self, seconds: float) -> None:
        self.do(e.Tick(self.state.now_s + seconds))

    def cooperate(self) -> None:
        """Answer all that is waited for, as well as can be, once."""
        state = self.state
        for row in state.nodes:
            if row.back_out.value == "asked":
                self.do(e.BackedOut(row.name, True))
            elif row.back_out.value == "failed":
                self.do(e.Skip(row.name, "put back by hand"))
            for ending in row.endings:
                if ending.is_asked:
                    self.do(e.StopEnded(row.name, ending.attempt, True))
            row = self.row(row.name)
            if row.state is NodeState.UNKNOWN or row.state.is_under_way:
                self.warm(row.name)
            if self.row(row.name).hook is not None:
                self.end_hook(row.name)
        analysis = self.state.analysis
        for gate in analysis.gates if analysis is not None else ():
            if self.state.analysis == analysis and gate.is_asked:
                self.do(e.GateSampled(analysis.number, gate.gate, Verdict.PASS))
        self.tick(6)
        if self.state.phase is Phase.PAUSED:
            at_gate = any(row.failed_at_gate for row in self.state.nodes)
            self.do(e.Promote() if at_gate else e.Resume())

    def _note_verified(self, before: RolloutState, event: e.Event) -> None:
        """A node may be shifted after its analysis passed in that very attempt, or a person took it as passed."""
        for row in before.nodes:
            gated = any(rule.applies_to(row.batch) for rule in before.rules.gates)
            is_warm = isinstance(event, e.NodeReached) and event.state in _WARM
            if is_warm and event.node == row.name and not gated:
                self.allowed.add((row.name, event.attempt))
        analysis = before.analysis
        if analysis is None:
            return
        passes = isinstance(event, e.GateSampled) and event.verdict is Verdict.PASS
        if passes or (isinstance(event, e.Promote) and analysis.verdict is Verdict.INCONCLUSIVE):
            self.allowed |= {(row.name, row.attempt) for row in before.nodes if row.name in analysis.nodes}

    def _check(self, before: RolloutState) -> None:
        after = self.state
        started = [intent.node for intent in self.last if isinstance(intent, e.StartNode)]
        for name in started:
            row = before.node(name)
            assert row is not None
            was_unavailable = row.is_unavailable or self.row(name).is_down
            assert was_unavailable or after.unavailable <= after.rules.max_unavailable
            assert before.phase not in (Phase.ABORTING, Phase.ABORTED)
        if after.phase not in (Phase.RUNNING, Phase.DONE, Phase.PAUSED):
            assert not started
        for intent in self.last:
            if isinstance(intent, e.RunHook):
                assert (intent.node, intent.attempt) in self.allowed
            if isinstance(intent, e.BackOutNode):
                row = before.node(intent.node)
                assert row is not None
                assert row.state is not NodeState.READY
        for row in after.nodes:
            if row.state is NodeState.READY:
                assert (row.name, row.attempt) in self.allowed
                assert not row.is_out
                shift = e.RunHook(row.name, row.attempt, "shift")
                assert shift in self.asked or "shift" not in after.rules.hooks
            if row.state is NodeState.SKIPPED:
                assert row.skip_reason
        for row in before.nodes:
            now = self.row(row.name)
            self.failures += now.state is NodeState.FAILED and not row.has_failed
            assert now.has_failed or not row.has_failed
        assert after.failures == self.failures
        if after.failures >= after.rules.max_failures:
            assert after.phase in (Phase.ABORTING, Phase.ABORTED)
        if after.phase is Phase.RUNNING:
            assert not any(row.failed_at_gate for row in after.nodes)
        assert {(row.name, one.attempt) for row in after.nodes for one in row.endings} == self.unended
        if after.phase.is_over:
            assert not any(row.is_being_ended for row in after.nodes)
            assert not any(row.is_out or row.state.is_under_way for row in after.nodes)
            assert waiting_for(after) == ()
        else:
            assert waiting_for(after)


def rules(**changes: object) -> Rules:
    """Return rules with every hook and nothing else."""
    return Rules(**{"hooks": HOOKS, **changes})  # type: ignore[arg-type]


def gate(**changes: object) -> GateRule:
    return GateRule(**changes)  # type: ignore[arg-type]


THREE = (("a",), ("b", "c"))


def ready(world: World, *names: str) -> None:
    """Bring nodes that have been started to the end of their attempt."""
    world.warm(*names)
    for name in names:
        while world.row(name).hook is not None:
            world.end_hook(name)


def gated(*gates: GateRule, **changes: object) -> World:
    """Return a rollout whose first node is warm, and looked at."""
    world = World(rules(gates=gates or (gate(),), **changes), THREE)
    world.warm("a")
    return world
