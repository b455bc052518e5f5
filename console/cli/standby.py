"""``glowplug standby``"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from console import report
from console.cli.common import Context, confirm, emit, json_option, run_async, say, yes_option
from console.cli.follow import Following
from console.cli.nodes import Answer, ask, show
from console.config import Config
from console.format import counted, size_text
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import Recipe, Resident


@click.group("standby")
def command() -> None:
    """Start processes that wait for a model's weights, or end them.

    An armed process has made everything of a model but its weights. When a run of the recipe brings
    those, from where they are resident or from disk, its first answer takes little more than a pass.
    """


@command.command("start")
@click.argument("recipe")
@click.argument("node", nargs=-1, required=True)
@yes_option
@json_option
@click.pass_obj
def start(context: Context, recipe: str, node: tuple[str, ...], yes: bool, as_json: bool) -> int:
    """Arm a process for RECIPE on each NODE: a name, tag:NAME, a pattern, or all.

    No weights are read. A model that can't be made without them is warmed as by warm, and the run says why.

    Exit codes: 0 all wait, 1 one failed, 3 a node out of reach, 4 not confirmed, 130 interrupted.
    """
    config = context.load_config()
    wanted = config.recipe(recipe)
    names = [one.name for one in config.select(node)]
    say(f"arm {wanted.name} ({wanted.model.path}) on {counted(len(names), 'node')}: {', '.join(names)}")
    if not {one.name for one in config.nodes}.issuperset(node):
        confirm(f"Arm {counted(len(names), 'node')}?", yes)
    context.start_log()
    following = Following()
    run_async(_start(context, config, wanted, names, following))
    if as_json:
        emit({"runs": following.documents(), "errors": following.errors()})
    else:
        for outcome in following.outcomes.values():
            if outcome.run is not None:
                click.echo(report.one_line(report.of_view(outcome.node, outcome.run)))
    return following.exit_code


@command.command("stop")
@click.argument("recipe")
@click.argument("node", nargs=-1, required=True)
@yes_option
@json_option
@click.pass_obj
def stop(context: Context, recipe: str, node: tuple[str, ...], yes: bool, as_json: bool) -> int:
    """End the processes that hold RECIPE, or wait for its weights, on each NODE.

    What is resident of it stays so, for the next start. One that serves a run is not ended.

    Exit codes: 0 ended, 1 nothing waits there or it serves a run, 3 a node out of reach, 4 not confirmed.
    """
    config = context.load_config()
    names = [one.name for one in config.select(node)]
    say(f"end the standbys of {recipe} on {counted(len(names), 'node')}: {', '.join(names)}")
    confirm(f"End the standbys of {recipe} on {counted(len(names), 'node')}?", yes)
    context.start_log()
    answers = run_async(ask(context, config, names, lambda fleet, name: fleet.stop_standbys(name, recipe)))
    return show(answers, as_json, _document, _lines)


def _document(answer: Answer[tuple[Resident, ...]]) -> dict[str, object]:
    return {"stopped": encode(list(answer.value or ()))}


def _lines(answer: Answer[tuple[Resident, ...]]) -> Iterator[str]:
    if answer.error is not None:
        yield f"? {answer.error}"
    for one in answer.value or ():
        tier, size = one.tier.value, size_text(one.bytes)
        yield f"– {answer.node:<14} {one.recipe:<16} {tier:<9} {one.device:<12} {size:>9} ended"


async def _start(context: Context, config: Config, recipe: Recipe, names: Sequence[str], following: Following) -> None:
    async with context.fleet(config, names) as fleet:
        for notice in fleet.notices:
            say(notice)
        await following.warm(fleet, names, recipe, arm=True)
