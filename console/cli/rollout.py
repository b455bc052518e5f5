"""``glowplug rollout``"""

from __future__ import annotations

from collections.abc import Sequence

import click

import db.errors
from console.cli import rollout_verbs as verbs
from console.cli.ahead import ahead_options, read_schedule
from console.cli.common import Context, emit, json_option
from console.config import Config, Node
from console.errors import HistoryError
from console.rollout.plan import Candidate, Plan, make_plan
from console.rollout.plan_text import plan_document, plan_lines
from db.queries import History
from db.records import RunFilter
from remote_agent.protocol.messages import RunState, Tier
from remote_agent.recipe import recipe_hash


@click.group("rollout")
def command() -> None:
    """Bring a recipe to many nodes batch by batch, as a [[rollout]] of fleet.toml says."""


for verb in (verbs.status, verbs.pause, verbs.resume, verbs.promote, verbs.retry, verbs.skip, verbs.abort):
    command.add_command(verb)


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
    planned = _planned(context, context.load_config(), name)
    if as_json:
        emit(plan_document(planned))
    else:
        for line in plan_lines(planned):
            click.echo(line)
    return 0


@command.command("start")
@click.argument("name")
@ahead_options
@json_option
@click.pass_obj
def start(context: Context, name: str, at: str | None, every: str | None, as_json: bool) -> int:
    """Carry out rollout NAME in this terminal, to its end; progress is told on stderr.

    While it waits for you, the other verbs reach it from another terminal. Ctrl-C pauses it and ends this: what runs
    on nodes goes on there, hooks that move traffic are waited for (once more, and they are killed), and
    `glowplug rollout resume NAME` takes it up again.

    With --at or --every it is planned and begun when it is time, as `glowplug warm --help` says of these; fleet.toml is
    that of now. One that is not over when the next is due is not begun twice.

    Exit codes: 0 all ready or skipped, 1 a node failed, 2 usage, configuration, or a rollout of that name or with one
    of these nodes is not over, 4 aborted, 130 interrupted.
    """
    schedule = read_schedule(at, every)
    config = context.load_config()
    if schedule is not None:
        return verbs.start_ahead(context, config, lambda: _planned(context, config, name), schedule, as_json)
    return verbs.start_planned(context, config, _planned(context, config, name), as_json)


def _planned(context: Context, config: Config, name: str) -> Plan:
    rollout = config.rollout(name)
    nodes = config.select(rollout.selectors)
    candidates = _candidates(context, nodes, rollout.recipe, recipe_hash(config.recipe(rollout.recipe)))
    return make_plan(rollout, candidates, config.defaults.parallel)


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
