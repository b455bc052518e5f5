"""One call of a hook for HAProxy: its node and rollout, the servers it is about, and what it prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from console.cli.common import Context, emit
from console.config_nodes import NAME, NAME_RULE
from console.errors import UsageError
from console.hooks.haproxy.admin_socket import AdminSocket
from console.hooks.haproxy.memory import Memory
from console.hooks.haproxy.places import Place, Seen
from console.hooks.haproxy.protocol import Server, is_server_name

_NO = ("", "0", "false", "no")


@dataclass(frozen=True)
class Task:
    """What one call is about. ``name``: its word."""

    name: str
    node: str
    is_dry: bool
    as_json: bool
    memory: Memory

    def finish(self, seen: Seen, would: Iterable[str] = ()) -> int:
        """Print what servers are now, or what would be said to them."""
        commands = tuple(would)
        if self.as_json:
            emit(
                {
                    "hook": f"haproxy {self.name}",
                    "node": self.node,
                    "dry_run": self.is_dry,
                    "servers": [_document(place, seen[place]) for place in seen],
                    "commands": list(commands),
                }
            )
            return 0
        for place, server in seen.items():
            click.echo(f"{place}: {server}")
        for line in commands:
            click.echo(f"would say: {line}")
        return 0


def _document(place: Place, server: Server) -> Mapping[str, object]:
    return {
        "socket": place.socket.address,
        "server": place.server,
        "state": server.state.value,
        "weight": server.weight,
        "status": server.status,
        "sessions": server.sessions,
        "queued": server.queued,
    }


def make_task(
    context: Context, name: str, *, node: str | None, rollout: str | None, dry_run: bool, as_json: bool
) -> Task:
    """Raises: UsageError where nobody says which node and rollout it is about."""
    node = node or context.environ.get("GLOWPLUG_ROLLOUT_NODE")
    rollout = rollout or context.environ.get("GLOWPLUG_ROLLOUT_ID")
    if not node or not NAME.fullmatch(node):
        raise UsageError(f"--node (or GLOWPLUG_ROLLOUT_NODE): {(node or '')[:80]!r}: a node's name {NAME_RULE}")
    if not rollout:
        raise UsageError("--rollout (or GLOWPLUG_ROLLOUT_ID) is needed: what servers were is remembered by it")
    is_dry = dry_run or context.environ.get("GLOWPLUG_ROLLOUT_DRY_RUN", "").lower() not in _NO
    return Task(name, node, is_dry, as_json, Memory(context.locations.state_directory, rollout, node))


def places_of(task: Task, sockets: tuple[str, ...], servers: tuple[str, ...]) -> list[Place]:
    """Return every server at every socket, each once. Raises: UsageError."""
    names = [server.replace("{node}", task.node) for server in servers]
    for name in names:
        if not is_server_name(name):
            raise UsageError(f"--server: {name[:80]!r} is not BACKEND/SERVER")
    addresses = [str(Path(one).expanduser().absolute()) if "/" in one else one for one in sockets]
    admins = [AdminSocket(address) for address in dict.fromkeys(addresses)]
    return [Place(admin, name) for admin in admins for name in dict.fromkeys(names)]
