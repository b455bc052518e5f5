"""``glowplug serve``"""

from __future__ import annotations

from collections.abc import Iterator

import click

from console.cli.common import Context, confirm, json_option, run_async, say, yes_option
from console.cli.nodes import Answer, ask, show
from console.format import counted, short_uid
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import Server


@click.group("serve")
def command() -> None:
    """Stop what serves warm models.

    A run of a recipe with a table [recipes.NAME.serve] starts its server: glowplug warm. It is ready once a completion
    came back through the port. Another run of the recipe replaces it.
    """


@command.command("stop")
@click.argument("node", nargs=-1, required=True)
@click.option("--recipe", help="The server of this recipe alone; otherwise every server of the nodes.")
@yes_option
@json_option
@click.pass_obj
def stop(context: Context, node: tuple[str, ...], recipe: str | None, yes: bool, as_json: bool) -> int:
    """Stop the servers of each NODE; their ports close, and what they served stays warm.

    Exit codes: 0 stopped, 1 nothing serves there, 3 a node out of reach, 4 not confirmed.
    """
    config = context.load_config()
    names = [one.name for one in config.select(node)]
    what = f"the server of {recipe}" if recipe is not None else "every server"
    say(f"stop {what} on {counted(len(names), 'node')}: {', '.join(names)}")
    confirm(f"Stop {what} on {counted(len(names), 'node')}?", yes)
    context.start_log()
    answers = run_async(ask(context, config, names, lambda fleet, name: fleet.stop_servers(name, recipe)))
    return show(answers, as_json, _document, _lines)


def _document(answer: Answer[tuple[Server, ...]]) -> dict[str, object]:
    return {"stopped": encode(list(answer.value or ()))}


def _lines(answer: Answer[tuple[Server, ...]]) -> Iterator[str]:
    if answer.error is not None:
        yield f"? {answer.node:<14} {answer.error}"
    for one in answer.value or ():
        yield f"– {answer.node:<14} {one.recipe:<16} {one.address:<22} run {short_uid(one.run_uid)} stopped"
