"""``glowplug release``"""

from __future__ import annotations

import click

from console.cli.choose import choose_runs
from console.cli.common import Context, confirm, emit, json_option, run_async, say, yes_option
from console.config import Config
from console.errors import Aborted, UsageError
from console.format import counted, short_uid, size_text
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import RELEASE_WAIT_MOST_S, ReleaseParams, ReleaseResult, Resident


@click.command("release")
@click.argument("node")
@click.option("--run", "run_uid", help="The run that left it warm, or how it begins.")
@click.option("--all", "everything", is_flag=True, help="Everything that is warm on the node.")
@click.option("--driver", is_flag=True, help="The device files that keep the driver loaded; before its upgrade.")
@click.option("--wait", "wait_s", type=float, default=0.0, metavar="SECONDS", help="For those attached to go.")
@click.option("--force", is_flag=True, help="Also what other processes have attached.")
@yes_option
@json_option
@click.pass_obj
def command(
    context: Context,
    node: str,
    run_uid: str | None,
    everything: bool,
    driver: bool,
    wait_s: float,
    force: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Let go of warm models on NODE, their memory is free afterwards; or of the driver.

    Without --run, --all or --driver, the only model there is. On a terminal you are asked first. What other
    processes have attached is refused, unless they go while --wait lasts; or let go with --force: they keep
    its memory until they end. The driver can't go while models are warm: --all --driver lets go of both.

    Exit codes: 0 released, 1 refused (attached or in use) or the driver is still held, 2 nothing like that is
    warm, 3 the node is out of reach, 4 not confirmed.
    """
    if not 0 <= wait_s <= RELEASE_WAIT_MOST_S:
        raise UsageError(f"--wait: {wait_s:g} is not within 0..{RELEASE_WAIT_MOST_S:g} seconds")
    config = context.load_config()
    name = config.node(node).name
    context.start_log()
    chosen = _choose(context, config, name, run_uid, everything, driver)
    what = ([counted(len(chosen), "model")] if chosen else []) + (["the driver"] if driver else [])
    confirm(f"Release {' and '.join(what)} on {name}?", yes)
    uid = None if everything or not chosen else chosen[0]
    result = run_async(_release(context, config, name, ReleaseParams(uid, everything, driver, force, wait_s)))
    if as_json:
        emit({"node": name, "released": encode(list(result.released)), "driver_released": result.driver_released})
    else:
        for one in result.released:
            click.echo(f"– {name:<14} {one.recipe:<16} {one.device:<12} {size_text(one.bytes):>9} released")
        if driver:
            click.echo(f"{name}: the driver is {'released' if result.driver_released else 'still held'}")
    if driver:
        return 0 if result.driver_released else 1
    if not result.released:
        raise Aborted(f"nothing was released on {name}: it was gone already")
    return 0


def _choose(
    context: Context, config: Config, node: str, prefix: str | None, everything: bool, driver: bool
) -> list[str]:
    """Return the uids of what is to go, and tell them; none where it is the driver alone. Raises: UsageError"""
    if driver and prefix is None and not everything:
        return []
    held = run_async(_held(context, config, node))
    if driver and prefix is None and not held:
        return []
    described = {one.run_uid: f"{one.recipe} on {one.device}, {size_text(one.bytes)}" for one in held}
    chosen = choose_runs(described, prefix, everything, f"nothing is warm on {node}")
    for uid in chosen:
        say(f"release {short_uid(uid)} on {node}: {described[uid]}")
    return chosen


async def _held(context: Context, config: Config, node: str) -> tuple[Resident, ...]:
    async with context.fleet(config, [node]) as fleet:
        return (await fleet.status(node)).residents


async def _release(context: Context, config: Config, node: str, params: ReleaseParams) -> ReleaseResult:
    async with context.fleet(config, [node]) as fleet:
        return await fleet.let_go(node, params)
