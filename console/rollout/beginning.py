"""How a rollout of ``fleet.toml`` begins: its plan from the history, and the row that it has from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import db.errors
from console.config import Config
from console.config_nodes import Node
from console.errors import HistoryError, UsageError
from console.rollout.gate_address import needs_host
from console.rollout.plan import Candidate, Plan, make_plan
from console.rollout.saved import Settings, node_rows, settings_json, state_json
from console.rollout.settings import Rollout
from console.rollout.states import begin
from db.queries import History
from db.records import RunFilter
from db.rollout_records import RolloutRow
from db.rollout_store import RolloutStore
from remote_agent.protocol.messages import Actor, RunState, Tier
from remote_agent.recipe import recipe_hash


def planned(config: Config, name: str, history_file: Path, parallel: int | None = None) -> Plan:
    """Return what the rollout of that name would do, with so many runs at one time; the configuration's by default.

    Raises: UsageError, HistoryError.
    """
    rollout = config.rollout(name)
    nodes = config.select(rollout.selectors)
    _refuse_hostless(rollout, nodes)
    candidates = _candidates(history_file, nodes, rollout.recipe, recipe_hash(config.recipe(rollout.recipe)))
    return make_plan(rollout, candidates, parallel or config.defaults.parallel, config.storage_groups)


def create(
    store: RolloutStore, uid: str, plan: Plan, settings: Settings, actor: Actor, down: Sequence[str]
) -> RolloutRow:
    """Store a new rollout of which nothing is done, and return it; ``down`` names nodes that serve nobody now.

    Raises: db's HistoryError, as `RolloutStore.create`.
    """
    batches = [[node.name for node in batch.nodes] for batch in plan.batches]
    state = begin(plan.rules, batches, down)
    row = RolloutRow(
        rollout_uid=uid,
        name=plan.rollout.name,
        recipe=plan.rollout.recipe,
        actor_user=actor.user,
        actor_host=actor.host,
        settings_json=settings_json(settings),
        state_json=state_json(state),
        phase=state.phase.value,
        reason=state.reason,
        created_ns=0,
        updated_ns=0,
    )
    store.create(row, node_rows(state))
    return store.take(uid)


def _refuse_hostless(rollout: Rollout, nodes: Sequence[Node]) -> None:
    """Raises: UsageError where a gate asks for the host of a node that has none in the configuration."""
    for number, gate in enumerate(rollout.gates, 1):
        without = [node.name for node in nodes if node.host is None]
        if gate.http is not None and needs_host(gate.http) and without:
            more = f" and {len(without) - 1} more" if len(without) > 1 else ""
            raise UsageError(
                f"rollout {rollout.name}: gate {number} asks {gate.http}, and node {without[0]}{more} has no host"
                " in fleet.toml"
            )


def _candidates(history_file: Path, nodes: Sequence[Node], recipe: str, hashed: str) -> list[Candidate]:
    """Return the nodes with what the history knows of them; nothing where nothing was ever recorded."""
    try:
        with History(history_file) as history:
            return [_candidate(history, node, recipe, hashed) for node in nodes]
    except db.errors.NoHistoryError:
        return [Candidate(node.name, node.tags, storage_group=node.storage_group) for node in nodes]
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error


def _candidate(history: History, node: Node, recipe: str, hashed: str) -> Candidate:
    tier = Tier.COLD
    for run in history.runs(RunFilter(node.name, recipe, RunState.READY.value, limit=1)):
        if run.recipe_hash == hashed and run.tier_to in [one.value for one in Tier]:
            tier = Tier(run.tier_to)
    median = history.baseline(node.name, hashed, tier.value)
    known = Candidate(node.name, node.tags, tier, storage_group=node.storage_group)
    return known if median is None else replace(known, wall_ns=median.wall_ns, runs=median.count)
