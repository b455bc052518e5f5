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
    storage_group: str = ""


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
    """``rules`` has every size as a number of nodes. ``expected_ns`` is without hooks, pauses and what fails.

    ``storage_groups``: how many runs at one time, for each storage that nodes of it share.
    """

    rollout: Rollout
    batches: tuple[PlannedBatch, ...]
    rules: Rules
    parallel: int
    storage_groups: Mapping[str, int]

    @property
    def nodes(self) -> tuple[Candidate, ...]:
        return tuple(node for batch in self.batches for node in batch.nodes)

    @property
    def expected_ns(self) -> int:
        return sum(batch.expected_ns for batch in self.batches)

    @property
    def without_history(self) -> int:
        return sum(batch.without_history for batch in self.batches)


def make_plan(
    rollout: Rollout, candidates: Sequence[Candidate], parallel: int, storage_groups: Mapping[str, int] | None = None
) -> Plan:
    """Return what would happen to the candidates, of which there is at least one; ``parallel`` runs at one time."""
    shared = {node.storage_group for node in candidates}
    groups = {name: limit for name, limit in (storage_groups or {}).items() if name in shared}
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
                expected_ns=_expected_ns(members, gates, rules.max_unavailable, parallel, groups),
            )
        )
    return Plan(rollout, tuple(planned), rules, parallel, groups)


def _ordered(rollout: Rollout, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort as the rollout says; what it does not tell apart stays in the file's order."""
    if rollout.order == "coldest_first":
        return sorted(candidates, key=lambda node: _TIERS.index(node.tier))
    tags = rollout.first_tags

    def place(node: Candidate) -> int:
        return next((index for index, tag in enumerate(tags) if tag in node.tags), len(tags))

    return sorted(candidates, key=place)


def _expected_ns(
    nodes: Sequence[Candidate],
    gates: Mapping[int, Gate],
    max_unavailable: int,
    parallel: int,
    groups: Mapping[str, int],
) -> int:
    """Return the time of all waves: each is warmed ``parallel`` at a time, then sampled, and only then shifted."""
    sampling_ns = round(max((gate.shortest_s for gate in gates.values()), default=0.0) * NS_PER_S)
    waves = [nodes[at : at + max_unavailable] for at in range(0, len(nodes), max_unavailable)]
    return sum(_warming_ns(wave, parallel, groups) + sampling_ns for wave in waves)


def _warming_ns(wave: Sequence[Candidate], parallel: int, groups: Mapping[str, int]) -> int:
    """Return when the last node of a wave is warm: each begins once it has a place, and one at its storage."""
    places = [0] * min(parallel, len(wave))
    at_storage = {name: [0] * limit for name, limit in groups.items()}
    end_ns = 0
    for node in wave:
        free_at_ns = [places, *filter(None, [at_storage.get(node.storage_group)])]
        over_ns = max(heapq.heappop(each) for each in free_at_ns) + (node.wall_ns or 0)
        for each in free_at_ns:
            heapq.heappush(each, over_ns)
        end_ns = max(end_ns, over_ns)
    return end_ns
