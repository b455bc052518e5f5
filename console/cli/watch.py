"""``glowplug watch``"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import click

import db.errors
from console.clean import clean
from console.cli.common import Context, current_actor, emit, json_option, parallel_option, run_async, say, yes_option
from console.cli.nodes import Answer, ask, exit_code
from console.cli.warm import announce
from console.config import Config
from console.errors import HistoryError, LinkError, UsageError
from console.fleet import Fleet
from console.format import clock_text, short_uid
from console.leases import holder_name
from console.watch.leases import Leases
from console.watch.machine import Limits, Told
from console.watch.standing import Wanted, is_at, see
from console.watch.watch import Watch
from console.watch.words import document, line
from db.database import open_history
from db.watch_store import WatchStore
from remote_agent.protocol.messages import Recipe, Tier

TIERS = ("cached", "host", "resident", "standby")


@click.command("watch")
@click.argument("node", nargs=-1)
@click.option("--recipe", required=True, help="What to keep warm there.")
@click.option("--tier", type=click.Choice(TIERS), help="Keep this tier or a warmer one; the recipe's own by default.")
@parallel_option
@click.option("--tries", type=click.IntRange(1, 1000), default=Limits.tries, help="At most so many a node in an hour.")
@click.option("--once", is_flag=True, help="Look once, load nothing.")
@yes_option
@json_option
@click.pass_obj
def command(
    context: Context,
    node: tuple[str, ...],
    recipe: str,
    tier: str | None,
    parallel: int | None,
    tries: int,
    once: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Keep RECIPE warm on each NODE, on all of them by default, in the foreground until Ctrl-C.

    Says when a node fell below the tier and why (released, evicted, expired, its agent restarted, its host rebooted, a
    GPU error), warms it again, and says when it is back. A node that can't be reached has not fallen. After a failed
    try the next one waits longer each time. A node that a rollout is at, or where anybody else has a run, is left
    alone, and so told. One watch at a time has a node for a recipe; a second is told who.

    With --json each thing that happens is one line of JSON. Ctrl-C ends the watch, not the runs.

    Exit codes: 0 with --once all at the tier, 1 with --once one below it, 2 usage, configuration, or another watches,
    3 a node out of reach (without --once: for good, and no other is left), 4 not confirmed, 130 interrupted.
    """
    config = context.load_config()
    wanted = _wanted(config.recipe(recipe), tier)
    names = [one.name for one in (config.select(node) if node else config.nodes)]
    if once:
        return _look_once(context, config, names, wanted, as_json)
    announce("watch", config, wanted.recipe, names, node or ("all",), yes)
    context.start_log()
    limits = Limits(wanted.tier, tries)
    return _watch(context, config, names, wanted, limits, parallel, as_json)


def _wanted(recipe: Recipe, tier: str | None) -> Wanted:
    """Return what is to be kept. Raises: UsageError for a tier that the recipe does not reach, or that nobody sees."""
    wanted = Wanted(recipe, Tier(tier or recipe.target_tier))
    if not is_at(Tier(recipe.target_tier), wanted.tier):
        raise UsageError(f"--tier {wanted.tier.value}: recipe {recipe.name} goes no further than {recipe.target_tier}")
    if recipe.target_tier == "cached" and not recipe.hold.lock:
        raise UsageError(f"recipe {recipe.name} leaves files in the page cache, where nobody holds them: set hold.lock")
    return wanted


def _look_once(context: Context, config: Config, names: Sequence[str], wanted: Wanted, as_json: bool) -> int:
    async def tier(fleet: Fleet, name: str) -> Tier:
        await fleet.status(name)
        if fleet.state(name).probe is None:
            await fleet.probe(name)
        return see(fleet.state(name), wanted).tier or Tier.COLD

    context.start_log()
    answers = run_async(ask(context, config, names, tier))
    if as_json:
        nodes = [_standing(answer, wanted) for answer in answers]
        emit({"recipe": wanted.recipe.name, "wanted": wanted.tier.value, "nodes": nodes})
    for answer in answers if not as_json else ():
        words = f"? {answer.node:<14} {answer.error}"
        if answer.value is not None:
            is_up = is_at(answer.value, wanted.tier)
            words = f"{'✔' if is_up else '✖'} {answer.node:<14} {answer.value.value}{'' if is_up else ', below'}"
        click.echo(clean(words, 1000))
    below = any(answer.value is not None and not is_at(answer.value, wanted.tier) for answer in answers)
    return 1 if below else exit_code(answers)


def _standing(answer: Answer[Tier], wanted: Wanted) -> dict[str, object]:
    return {
        "node": answer.node,
        "tier": answer.value.value if answer.value else None,
        "at_tier": is_at(answer.value, wanted.tier) if answer.value else None,
        "error": str(answer.error) if answer.error else None,
    }


def _watch(
    context: Context,
    config: Config,
    names: Sequence[str],
    wanted: Wanted,
    limits: Limits,
    parallel: int | None,
    as_json: bool,
) -> int:
    actor = current_actor()
    watch: Watch | None = None

    def told(node: str, one: Told) -> None:
        if as_json:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            click.echo(json.dumps({"time": now, **document(node, one)}, ensure_ascii=False))
        else:
            text = f"{clock_text(time.time_ns())} {line(node, one, wanted.tier.value)}"
            click.echo(clean(text, 1000))

    async def work(store: WatchStore) -> int:
        nonlocal watch
        async with context.fleet(config, names, parallel) as fleet:
            for notice in fleet.notices:
                say(notice)
            watch = Watch(fleet, names, wanted, limits, Leases(store, fleet.history, names), told)
            await watch.run()
        codes = [error.exit_code for error in watch.ended.values()]
        return LinkError.exit_code if LinkError.exit_code in codes else max(codes, default=0)

    try:
        path = open_history(context.locations.history_file).path
        key = (wanted.recipe.name, wanted.tier.value)
        with contextlib.closing(WatchStore(path, holder_name(), key, (actor.user, actor.host))) as store:
            store.take(names)
            try:
                return run_async(work(store), lambda: _explain(watch))
            finally:
                store.give_back(names)
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error


def _explain(watch: Watch | None) -> str:
    going = watch.going if watch is not None else {}
    if not going:
        return "interrupted; nothing is watched any more, and nothing was left running"
    lines = ["interrupted; nothing is watched any more. What a host has accepted goes on there; to end it:"]
    return "\n".join([*lines, *(f"  glowplug cancel {node} --run {short_uid(uid)}" for node, uid in going.items())])
