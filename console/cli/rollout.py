"""``glowplug rollout``"""

from __future__ import annotations

from collections.abc import Sequence

import click

import db.errors
from console.cli.common import Context, emit, json_option
from console.config import Node
from console.errors import HistoryError
from console.rollout.plan import Candidate, make_plan
from console.rollout.plan_text import plan_document, plan_lines
from db.queries import History
from db.records import RunFilter
from remote_agent.protocol.messages import RunState, Tier
from remote_agent.recipe import recipe_hash


@click.group("rollout")
def command() -> None:
    """Look at what a rollout of fleet.toml would do, batch by batch."""


@command.command("plan")
@click.argument("name")
@json_option
@click.pass_obj
def plan(context: Context, name: str, as_json: bool) -> int:
    """Show what rollout NAME would do: batches, nodes in order, gates, and what each is expected to take.

    From fleet.toml and this machine's history alone: no node is asked. A node's tier is the one that its last ready
    run of the recipe left; its time is the median of its ready runs from there, or "no history".

    Exit codes: 0 shown, 2 no such rollout, a selector that names no node, or a mistake in fleet.toml.
    """
    config = context.load_config()
    rollout = config.rollout(name)
    nodes = config.select(rollout.selectors)
    candidates = _candidates(context, nodes, rollout.recipe, recipe_hash(config.recipe(rollout.recipe)))
    planned = make_plan(rollout, candidates, config.defaults.parallel)
    if as_json:
        emit(plan_document(planned))
    else:
        for line in plan_lines(planned):
            click.echo(line)
    return 0


def _candidates(context: Context, nodes: Sequence[Node], recipe: str, hashed: str) -> list[Candidate]:
    """Return the nodes with what the history knows of them; nothing where nothing was ever recorded."""
    try:
        with History(context.locations.history_file) as history:
            return [_candidate(history, node, recipe, hashed) for node in nodes]
    except db.errors.NoHistoryError:
        return [Candidate(node.name, node.tags) for node in nodes]
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error


def _candidate(history: History, node: Node, recipe: str, hashed: str) -> Candidate:
    tier = Tier.COLD
    for run in history.runs(RunFilter(node.name, recipe, RunState.READY.value, limit=1)):
        if run.recipe_hash == hashed and run.tier_to in [one.value for one in Tier]:
            tier = Tier(run.tier_to)
    median = history.baseline(node.name, hashed, tier.value)
    if median is None:
        return Candidate(node.name, node.tags, tier)
    return Candidate(node.name, node.tags, tier, median.wall_ns, median.count)
