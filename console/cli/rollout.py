"""``glowplug rollout``"""

from __future__ import annotations

import click

from console.clean import clean
from console.cli import rollout_verbs as verbs
from console.cli.ahead import ahead_options, read_schedule
from console.cli.common import Context, emit, json_option, parallel_option, run_async
from console.config import Config
from console.rollout import dry_run
from console.rollout.beginning import planned
from console.rollout.plan import Plan
from console.rollout.plan_text import plan_document, plan_lines


class _Verbs(click.Group):
    """Lists its verbs in the order in which they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group("rollout", cls=_Verbs)
def command() -> None:
    """Bring a recipe to many nodes batch by batch, as a [[rollout]] of fleet.toml says."""


@command.command("plan", short_help="Show what it would do, batch by batch; no node is asked.")
@click.argument("name")
@parallel_option
@click.option("--try-hooks", is_flag=True, help="Run each hook that says dry_run = true, for every node.")
@json_option
@click.pass_obj
def plan(context: Context, name: str, parallel: int | None, try_hooks: bool, as_json: bool) -> int:
    """Show what rollout NAME would do: batches, nodes in order, gates, and what each is expected to take.

    From fleet.toml and this machine's history alone: no node is asked. A node's tier is the one that its last ready
    run of the recipe left; its time is the median of its ready runs from there, or "no history".

    With --try-hooks, hooks with dry_run = true are run as well, with GLOWPLUG_ROLLOUT_DRY_RUN=1: such a hook changes
    nothing then, and ends as it would. `glowplug hook haproxy` heeds it.

    Exit codes: 0 shown, 1 a hook that was tried failed, 2 no such rollout, a selector that names no node, or a mistake
    in fleet.toml, 130 interrupted.
    """
    shown = _planned(context, context.load_config(), name, parallel)
    document, lines = plan_document(shown), plan_lines(shown)
    if not as_json:
        for line in lines:
            click.echo(line)
    tried = run_async(dry_run.try_hooks(shown, context.program_environ)) if try_hooks else ()
    if as_json:
        emit(document | (dry_run.tried_document(shown, tried) if try_hooks else {}))
    elif try_hooks:
        for line in dry_run.tried_lines(shown, tried):
            click.echo(clean(line, 1000))
    return 0 if all(one.ended.succeeded for one in tried) else 1


@command.command("start", short_help="Carry it out in this terminal, to its end.")
@click.argument("name")
@parallel_option
@ahead_options
@json_option
@click.pass_obj
def start(context: Context, name: str, parallel: int | None, at: str | None, every: str | None, as_json: bool) -> int:
    """Carry out rollout NAME in this terminal, to its end; progress is told on stderr.

    While it waits for you, the other verbs reach it from another terminal. Ctrl-C pauses it and ends this: what runs
    on nodes goes on there, hooks that move traffic are waited for (once more, and they are ended), and
    `glowplug rollout resume NAME` takes it up again.

    With --at or --every it is planned and begun when it is time, as `glowplug warm --help` says of these; fleet.toml is
    that of now. One that is not over when the next is due is not begun twice.

    Exit codes: 0 all ready or skipped, 1 a node failed, 2 usage, configuration, or a rollout of that name or with one
    of these nodes is not over, 4 aborted, 130 interrupted.
    """
    schedule = read_schedule(at, every)
    config = context.load_config()
    if schedule is not None:
        return verbs.start_ahead(context, config, lambda: _planned(context, config, name, parallel), schedule, as_json)
    return verbs.start_planned(context, config, _planned(context, config, name, parallel), as_json)


for verb in (verbs.status, verbs.pause, verbs.resume, verbs.promote, verbs.retry, verbs.skip, verbs.abort):
    command.add_command(verb)


def _planned(context: Context, config: Config, name: str, parallel: int | None) -> Plan:
    return planned(config, name, context.locations.history_file, parallel)
