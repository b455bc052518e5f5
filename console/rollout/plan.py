"""What a rollout would do, from its configuration and from history; pure, and nothing is asked of any node."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from console.rollout.settings import Gate, Rollout
from console.rollout.sizes import cut
from console.rollout.states import Rules
from remote_agent.protocol.messages import Tier

NS_PER_S = 1_000_000_000
_TIERS = list(Tier)


@dataclass(frozen=True)
class Candidate:
    """A node that the selector names. ``tier``: as its last run of the recipe left it; ``wall_ns``: the median of
    ``runs`` runs of it from there, None without any."""

    name: str
    tags: tuple[str, ...] = ()
    tier: Tier = Tier.COLD
    wall_ns: int | None = None
    runs: int = 0


@dataclass(frozen=True)
class PlannedBatch:
    """``gates``: those of the rollout that apply, by their number from 1. ``expected_ns``: warm-ups in waves, and the
    gates' samples; nodes without history are left out of it."""

    number: int
    is_canary: bool
    nodes: tuple[Candidate, ...]
    gates: Mapping[int, Gate]
    pauses_after: bool
    expected_ns: int

    @property
    def without_history(self) -> int:
        return sum(node.wall_ns is None for node in self.nodes)


@dataclass(frozen=True)
class Plan:
    """``rules`` has every size as a number of nodes. ``expected_ns`` is without hooks, pauses and what fails."""

    rollout: Rollout
    batches: tuple[PlannedBatch, ...]
    rules: Rules
    parallel: int

    @property
    def nodes(self) -> tuple[Candidate, ...]:
        return tuple(node for batch in self.batches for node in batch.nodes)

    @property
    def expected_ns(self) -> int:
        return sum(batch.expected_ns for batch in self.batches)

    @property
    def without_history(self) -> int:
        return sum(batch.without_history for batch in self.batches)


def make_plan(rollout: Rollout, candidates: Sequence[Candidate], parallel: int) -> Plan:
    """Return what would happen to the candidates, of which there is at least one; ``parallel`` runs at one time."""
    nodes = {node.name: node for node in _ordered(rollout, candidates)}
    rules = rollout.rules(len(nodes))
    batches = cut(list(nodes), rollout.canary, rollout.serial)
    planned = []
    for index, names in enumerate(batches):
        gates = {number: gate for number, gate in enumerate(rollout.gates, 1) if gate.rule.applies_to(index)}
        members = tuple(nodes[name] for name in names)
        is_last = index == len(batches) - 1
        planned.append(
            PlannedBatch(
                number=index + 1,
                is_canary=index == 0 and rollout.canary is not None,
                nodes=members,
                gates=gates,
                pauses_after=index + 1 in rollout.pause_after and not is_last,
                expected_ns=_expected_ns(members, gates, rules.max_unavailable, parallel),
            )
        )
    return Plan(rollout, tuple(planned), rules, parallel)


def _ordered(rollout: Rollout, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort as the rollout says; what it does not tell apart stays in the file's order."""
    if rollout.order == "coldest_first":
        return sorted(candidates, key=lambda node: _TIERS.index(node.tier))
    tags = rollout.first_tags

    def place(node: Candidate) -> int:
        return next((index for index, tag in enumerate(tags) if tag in node.tags), len(tags))

    return sorted(candidates, key=place)


def _expected_ns(nodes: Sequence[Candidate], gates: Mapping[int, Gate], max_unavailable: int, parallel: int) -> int:
    """Return the time of all waves: each is warmed ``parallel`` at a time, then sampled, and only then shifted."""
    sampling_ns = round(max((gate.shortest_s for gate in gates.values()), default=0.0) * NS_PER_S)
    total_ns = 0
    for at in range(0, len(nodes), max_unavailable):
        wave = nodes[at : at + max_unavailable]
        free_at_ns = [0] * min(parallel, len(wave))
        for node in wave:
            heapq.heappush(free_at_ns, heapq.heappop(free_at_ns) + (node.wall_ns or 0))
        total_ns += max(free_at_ns) + sampling_ns
    return total_ns
