"""``glowplug hook``: what a rollout's hooks may call to move traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from console.cli.common import Context, ended_by_signals, json_option, say
from console.cli.hook_task import make_task, places_of
from console.cli.seconds import Seconds
from console.hooks.haproxy.drain import drain as drain_servers
from console.hooks.haproxy.places import look_at
from console.hooks.haproxy.protocol import State, Weight, change_command, kill_command, parse_weight
from console.hooks.haproxy.restore import changes, remembered
from console.hooks.haproxy.restore import restore as restore_servers
from console.hooks.haproxy.shift import Steps, check_possible
from console.hooks.haproxy.shift import shift as shift_servers
from console.rollout.settings import LONGEST_S

_SECONDS = Seconds(LONGEST_S)


@click.group("hook")
def command() -> None:
    """Move a node's traffic, as a hook of a rollout."""


@command.group("haproxy")
def haproxy() -> None:
    """Take a node out of the traffic of one or several HAProxies, and give it back.

    Each word speaks HAProxy's runtime API and reads back what it has set. Node and rollout come from the hook's
    environment (GLOWPLUG_ROLLOUT_NODE, GLOWPLUG_ROLLOUT_ID) or from --node and --rollout; with
    GLOWPLUG_ROLLOUT_DRY_RUN or --dry-run nothing is changed, and what would be said to HAProxy is printed.

    Exit codes: 0 done, 1 HAProxy refuses or a step did not hold, 2 usage, 75 another try may succeed.
    """


def _decorated(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _weights(ctx: click.Context, param: click.Parameter, value: str) -> tuple[Weight, ...]:
    weights = []
    for part in value.split(","):
        weight = parse_weight(part.strip())
        if weight is None:
            raise click.BadParameter(f"{part.strip()[:80]!r} is neither 1%..100% nor 1..256", ctx, param)
        weights.append(weight)
    return tuple(weights)


_subject = _decorated(
    click.option("--node", help="The node; otherwise GLOWPLUG_ROLLOUT_NODE."),
    click.option("--rollout", help="The rollout; otherwise GLOWPLUG_ROLLOUT_ID."),
    click.option("--dry-run", is_flag=True, help="Change nothing, print what would be said to HAProxy."),
    json_option,
)
_servers = _decorated(
    click.option(
        "--socket",
        "sockets",
        multiple=True,
        required=True,
        metavar="PATH|HOST:PORT",
        help="An admin socket; several for several load balancers, which all must agree.",
    ),
    click.option(
        "--server",
        "servers",
        multiple=True,
        required=True,
        metavar="BACKEND/SERVER",
        help="A server of the node; {node} stands for its name. May be given several times.",
    ),
)
_maint = click.option(
    "--maint", is_flag=True, help="Out of traffic is `maint`, not `drain`: no sticky sessions either."
)
_up = _decorated(
    click.option("--timeout-s", type=_SECONDS, default=30.0, show_default=True, help="For a server to be UP."),
    click.option(
        "--max-errors", type=click.IntRange(min=0), default=0, show_default=True, help="That servers may make."
    ),
    click.option("--allow-unchecked", is_flag=True, help="Take servers without a health check."),
    _maint,
)


@haproxy.command("drain")
@_servers
@click.option("--timeout-s", type=_SECONDS, default=50.0, show_default=True, help="For sessions to end.")
@click.option("--force", is_flag=True, help="End sessions that are left then.")
@_maint
@_subject
@click.pass_obj
def drain(
    context: Context,
    /,
    sockets: tuple[str, ...],
    servers: tuple[str, ...],
    timeout_s: float,
    force: bool,
    maint: bool,
    **subject: Any,
) -> int:
    """Take a node's servers out of traffic, and wait until they have no session and no queue.

    What they were before the rollout is remembered first. For before_shift; its timeout_s must be above --timeout-s.

    Exit codes: 0 drained, 1 HAProxy refuses, 75 sessions are left, or HAProxy can't be asked now.
    """
    task = make_task(context, "drain", **subject)
    places, out = places_of(task, sockets, servers), _out(maint)
    if task.is_dry:
        seen = look_at(places)
        would = [f"{place}: {change_command(place.server, out)}" for place in places]
        forced = [f"{place}: {kill_command(place.server)}, after {timeout_s:g} s" for place in places if force]
        return task.finish(seen, would + forced)
    with ended_by_signals():
        return task.finish(drain_servers(places, task.memory, out, timeout_s, force, say))


@haproxy.command("shift")
@_servers
@click.option("--weights", callback=_weights, default="100%", show_default=True, help="Steps, such as 10%,50%,100%.")
@click.option("--step-s", type=_SECONDS, default=10.0, show_default=True, help="How long a step is watched.")
@_up
@_subject
@click.pass_obj
def shift(
    context: Context,
    /,
    sockets: tuple[str, ...],
    servers: tuple[str, ...],
    weights: tuple[Weight, ...],
    step_s: float,
    **others: Any,
) -> int:
    """Give a node's servers their traffic in steps of weight, each watched: UP, and no more errors than may be.

    Percentages are of the weight in haproxy.cfg. A step that does not hold puts the servers out of traffic again.

    Exit codes: 0 shifted, 1 a step did not hold, 75 HAProxy can't be asked now or was reloaded.
    """
    return _give_traffic(context, "shift", sockets, servers, weights, step_s, **others)


@haproxy.command("ready")
@_servers
@_up
@_subject
@click.pass_obj
def ready(context: Context, /, sockets: tuple[str, ...], servers: tuple[str, ...], **others: Any) -> int:
    """Give a node's servers their traffic at once, by the weight that they have, and wait until they are UP.

    Exit codes: 0 UP, 1 not UP and out of traffic again, 75 HAProxy can't be asked now or was reloaded.
    """
    return _give_traffic(context, "ready", sockets, servers, (), 0.0, **others)


@haproxy.command("restore")
@_subject
@click.pass_obj
def restore(context: Context, /, **subject: Any) -> int:
    """Bring a node's servers back to the state and weight that they had before the rollout touched them.

    By what was remembered, so it needs no socket. Where nothing is, all stays as it is. For on_abort.

    Exit codes: 0 as before, 1 HAProxy refuses, 75 HAProxy can't be asked now.
    """
    task = make_task(context, "restore", **subject)
    found = remembered(task.memory)
    if not found:
        say(f"nothing is remembered of {task.node} in this rollout: all stays as it is")
        return task.finish({})
    if task.is_dry:
        seen = {place: place.look() for place, _ in found}
        changed = ((place, change) for place, former in found for change in changes(former, seen[place]))
        return task.finish(seen, [f"{place}: {change_command(place.server, change)}" for place, change in changed])
    with ended_by_signals():
        return task.finish(restore_servers(task.memory))


def _give_traffic(
    context: Context,
    name: str,
    sockets: tuple[str, ...],
    servers: tuple[str, ...],
    weights: tuple[Weight, ...],
    step_s: float,
    *,
    timeout_s: float,
    max_errors: int,
    allow_unchecked: bool,
    maint: bool,
    **subject: Any,
) -> int:
    task = make_task(context, name, **subject)
    places = places_of(task, sockets, servers)
    steps = Steps(weights, step_s, timeout_s, max_errors, not allow_unchecked)
    if not task.is_dry:
        with ended_by_signals():
            return task.finish(shift_servers(places, task.memory, steps, _out(maint), say))
    seen = look_at(places)
    check_possible(seen, steps)
    order: list[Weight | State] = [*weights[:1], State.READY, *weights[1:]]
    lines = []
    for change in order:
        for place, server in seen.items():
            to = change.of(server.configured_weight) if isinstance(change, Weight) else change
            lines.append(f"{place}: {change_command(place.server, to)}")
    return task.finish(seen, lines)


def _out(maint: bool) -> State:
    return State.MAINT if maint else State.DRAIN
