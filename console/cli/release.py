"""``glowplug release``"""

from __future__ import annotations

import click

from console.cli.choose import choose_runs
from console.cli.common import Context, confirm, emit, json_option, run_async, say, yes_option
from console.config import Config
from console.errors import Aborted
from console.format import counted, short_uid, size_text
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import Resident


@click.command("release")
@click.argument("node")
@click.option("--run", "run_uid", help="The run that left it warm, or how it begins.")
@click.option("--all", "everything", is_flag=True, help="Everything that is warm on the node.")
@click.option("--force", is_flag=True, help="Also what other processes have attached.")
@yes_option
@json_option
@click.pass_obj
def command(
    context: Context, node: str, run_uid: str | None, everything: bool, force: bool, yes: bool, as_json: bool
) -> int:
    """Let go of warm models on NODE; their memory is free afterwards.

    Without --run or --all, the only one there is. On a terminal you are asked first. What other processes
    have attached is refused, or let go with --force: they keep its memory until they end.

    Exit codes: 0 released, 2 nothing like that is warm, 3 the node is out of reach, 4 not confirmed.
    """
    config = context.load_config()
    name = config.node(node).name
    context.start_log()
    held = run_async(_held(context, config, name))
    described = {one.run_uid: f"{one.recipe} on {one.device}, {size_text(one.bytes)}" for one in held}
    chosen = choose_runs(described, run_uid, everything, f"nothing is warm on {name}")
    for uid in chosen:
        say(f"release {short_uid(uid)} on {name}: {described[uid]}")
    confirm(f"Release {counted(len(chosen), 'model')} on {name}?", yes)
    released = run_async(_release(context, config, name, chosen, force))
    if as_json:
        emit({"node": name, "released": encode(released)})
    else:
        for one in released:
            click.echo(f"– {name:<14} {one.recipe:<16} {one.device:<12} {size_text(one.bytes):>9} released")
    if not released:
        raise Aborted(f"nothing was released on {name}: it was gone already")
    return 0


async def _held(context: Context, config: Config, node: str) -> tuple[Resident, ...]:
    async with context.fleet(config, [node]) as fleet:
        return (await fleet.status(node)).residents


async def _release(context: Context, config: Config, node: str, run_uids: list[str], force: bool) -> list[Resident]:
    async with context.fleet(config, [node]) as fleet:
        return [one for uid in run_uids for one in await fleet.release(node, uid, force)]
