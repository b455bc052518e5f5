"""``glowplug unpark``"""

from __future__ import annotations

import click

from console.cli.common import Context, json_option
from console.cli.park import move_standby
from remote_agent.protocol.messages import Tier


@click.command("unpark")
@click.argument("node")
@click.argument("which", metavar="[MODEL|RUN]", required=False)
@json_option
@click.pass_obj
def command(context: Context, node: str, which: str | None, as_json: bool) -> int:
    """Put a parked standby of NODE back on its GPU; a run that finds one parked does that by itself.

    Named as for park. One that can't be put back is lost: it is gone, and the next run loads again.

    Exit codes: 0 a standby again, 1 the node can't, and says why, 2 no such standby, 3 the node is out of reach.
    """
    return move_standby(context, node, which, Tier.STANDBY, as_json)
