"""``glowplug warm``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import click

from console import report
from console.cli.ahead import Done, ahead_options, read_schedule, run_ahead
from console.cli.common import Context, confirm, emit, json_option, parallel_option, run_async, say, yes_option
from console.cli.follow import Following
from console.config import Config
from console.errors import UsageError
from console.format import counted, short_uid
from remote_agent.protocol.messages import Recipe


@click.command("warm")
@click.argument("recipe")
@click.argument("node", nargs=-1, required=True)
@parallel_option
@click.option("--wait/--no-wait", default=True, help="Wait until each run is over, or only until it is accepted.")
@ahead_options
@yes_option
@json_option
@click.pass_obj
def command(
    context: Context,
    recipe: str,
    node: tuple[str, ...],
    parallel: int | None,
    wait: bool,
    at: str | None,
    every: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Warm RECIPE on each NODE: a name, tag:NAME, a pattern, or all.

    The exact nodes are named first. On a terminal you are asked when a tag or a
    pattern chose them. Each stage is told on stderr as it ends; the runs stand on stdout.

    How far a run goes is the recipe's target_tier: cached (files in the page cache),
    host (registered with a GPU), resident (weights in memory), standby (ready to answer).

    Ctrl-C stops watching, not the runs: they go on on their hosts, and how to end
    them is said. What still waited here for a place is not started.

    With --no-wait, too, no more than --parallel runs load at once.

    With --at or --every this waits in the foreground until it is time and says when that is; recipe and nodes are
    those of now. A machine that slept catches up once. What still goes on when the next is due is not started twice.
    A time that a change of the clock skips comes at the next valid moment, one that comes twice the first time. With
    --json each thing that happens is one line of JSON.

    Exit codes: 0 all ready (--no-wait: accepted), 1 a run failed, 3 a node out of
    reach, 4 not confirmed, 130 interrupted.
    """
    schedule = read_schedule(at, every)
    if every is not None and not wait:
        raise UsageError("--every waits for each run, so that none is started twice: leave --no-wait out")
    config = context.load_config()
    wanted = config.recipe(recipe)
    names = [one.name for one in config.select(node)]
    announce("warm", config, wanted, names, node, yes)
    context.start_log()
    warming = _Warming(context, config, wanted, names, parallel, wait, as_json)
    if schedule is not None:
        return run_ahead(schedule, warming.once, warming.explain, as_json)
    done = run_async(warming.once(), warming.explain)
    if as_json:
        emit(done.document)
    return done.exit_code


def announce(
    verb: str, config: Config, recipe: Recipe, names: Sequence[str], selectors: Sequence[str], yes: bool
) -> None:
    """Name the nodes, and ask where a tag or a pattern chose them. Raises: Aborted."""
    say(f"{verb} {recipe.name} ({recipe.model.path}) on {counted(len(names), 'node')}: {', '.join(names)}")
    known = {node.name for node in config.nodes}
    if not known.issuperset(selectors):
        confirm(f"{verb.capitalize()} {counted(len(names), 'node')}?", yes)


@dataclass
class _Warming:
    """One recipe on the same nodes, once or at each of its times; ``following``: the newest."""

    context: Context
    config: Config
    recipe: Recipe
    names: Sequence[str]
    parallel: int | None
    wait: bool
    as_json: bool
    following: Following = field(default_factory=Following)

    async def once(self) -> Done:
        """Warm the nodes, and show their runs unless they are to be a document."""
        self.following = Following()
        async with self.context.fleet(self.config, self.names, self.parallel) as fleet:
            for notice in fleet.notices:
                say(notice)
            await self.following.warm(fleet, self.names, self.recipe, wait=self.wait)
        runs = [report.of_view(one.node, one.run) for one in self.following.outcomes.values() if one.run is not None]
        for run in runs if not self.as_json else ():
            click.echo(report.one_line(run))
        document = {"runs": self.following.documents(), "errors": self.following.errors()}
        return Done(self.following.exit_code, document)

    def explain(self) -> str:
        """Say what goes on without us, and how to end it."""
        going = self.following.going
        if not going:
            return "interrupted; nothing was left running"
        lines = ["interrupted; what its host has accepted goes on, what waited here is not started. To end it:"]
        lines += [f"  glowplug cancel {one.node} --run {short_uid(one.run_uid or '')}" for one in going]
        return "\n".join(lines)
