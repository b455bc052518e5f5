"""``glowplug park``, and what ``glowplug unpark`` has in common with it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from console.clean import clean
from console.cli.common import Context, emit, json_option, run_async
from console.errors import UsageError
from console.fleet import Fleet
from console.format import duration_text, short_uid, size_text
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import ParkResult, Resident, Tier


@click.command("park")
@click.argument("node")
@click.argument("which", metavar="[MODEL|RUN]", required=False)
@json_option
@click.pass_obj
def command(context: Context, node: str, which: str | None, as_json: bool) -> int:
    """Take a standby of NODE off its GPU; it waits in the host's memory.

    Its weights stay on the GPU for whoever attaches them, until they are released. MODEL is a recipe's name or a
    model's path, RUN how a run begins; without one, the only standby there is. Parking a parked one changes nothing.

    Exit codes: 0 parked, 1 the node can't, and says why, 2 no such standby, 3 the node is out of reach.
    """
    return move_standby(context, node, which, Tier.PARKED, as_json)


def move_standby(context: Context, node: str, which: str | None, tier: Tier, as_json: bool) -> int:
    """Have the node park or unpark a standby, tell what it is then, and return the exit code."""
    config = context.load_config()
    name = config.node(node).name
    context.start_log()

    async def work() -> ParkResult:
        async with context.fleet(config, [name]) as fleet:
            return await _ask(fleet, name, which, tier)

    moved = run_async(work())
    if as_json:
        emit({"node": name, **encode(moved)})
    else:
        for one in moved.residents:
            took = moved.steps.get(one.device, {}).get("park_ns" if tier is Tier.PARKED else "unpark_ns")
            notes = f"  in {duration_text(took)}" if took is not None else "  as before"
            notes += f"  {size_text(one.host_bytes)} in host memory" if one.host_bytes else ""
            line = f"✔ {name:<14} {one.recipe:<16} {one.tier.value:<9} {one.device:<12}{notes}"
            click.echo(clean(line, 1000))
    return 0


async def _ask(fleet: Fleet, node: str, which: str | None, tier: Tier) -> ParkResult:
    run_uid = choose_standby((await fleet.status(node)).residents, which, node)
    return await fleet.park(node, run_uid) if tier is Tier.PARKED else await fleet.unpark(node, run_uid)


def choose_standby(residents: Sequence[Resident], which: str | None, node: str) -> str:
    """Return the run of the one standby that is meant, parked or not.

    What is named is left to the node to refuse where it is no standby. Raises: UsageError naming what there is
    """
    standbys = [one for one in residents if one.tier in (Tier.STANDBY, Tier.PARKED)]
    if which is None:
        found = standbys
    else:
        found = [one for one in residents if which in (one.recipe, one.model) or one.run_uid.startswith(which)]
    runs = {one.run_uid: f"{short_uid(one.run_uid)} ({one.recipe} {one.tier.value})" for one in found or standbys}
    if found and len(runs) == 1:
        return found[0].run_uid
    if not runs:
        raise UsageError(f"no standby is on {node}: only those can be parked")
    what = f"{which!r} is {'several' if found else 'none'} of" if which is not None else "say which of"
    raise UsageError(f"{what} what is on {node}: {', '.join(runs.values())}")
