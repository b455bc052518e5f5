"""Nodes of ``fleet.toml``: the tables as written, the `Node` they become, and every check on the way.

What goes into a remote command line is restricted to characters that mean nothing
to any shell inside quotes, so that no login shell can read it as anything else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from console.places import PARALLEL_MOST
from remote_agent.protocol.budget import parse_budget
from remote_agent.protocol.codec import Problem

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "must be 1..64 letters, digits, '.', '_' or '-', the first a letter or digit"
_HOST = re.compile(r"[A-Za-z0-9_:.%][A-Za-z0-9_:.%-]{0,254}")
_USER = re.compile(r"[^\s\x00-\x20\x7f@-][^\s\x00-\x20\x7f@]{0,63}")
_HOP = re.compile(r"(?:(?P<user>[^@]+)@)?(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:@\[\]]+))(?::(?P<port>\d{1,5}))?")
_SHELL_CHARACTERS = {
    "'": "a single quote", '"': "a double quote", "\\": "a backslash", "$": "'$'", "`": "a backtick",
    "!": "'!'", "\n": "a line break", "\r": "a line break",
}  # fmt: skip
_SSH_KEYS = ("host", "user", "port", "jump", "identity", "known_hosts", "host_key_alias", "ssh_config")


@dataclass(frozen=True)
class NodeTable:
    """What ``[nodes.NAME]`` may hold; None where the defaults or ssh decide."""

    host: str | None = None
    user: str | None = None
    port: int | None = None
    jump: str | tuple[str, ...] | None = None
    identity: str | tuple[str, ...] | None = None
    known_hosts: str | tuple[str, ...] | None = None
    host_key_alias: str | None = None
    ssh_config: bool | str | None = None
    transport: tuple[str, ...] | None = None
    python: str | tuple[str, ...] | None = None
    agent: str | tuple[str, ...] | None = None
    state_directory: str | None = None
    hold_budget: str | None = None
    storage_group: str | None = None
    connect_timeout_s: float | None = None
    tags: tuple[str, ...] | None = None
    recipes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class DefaultsTable:
    """What ``[defaults]`` may hold: settings for every node that has none of its own, and ``parallel``."""

    user: str | None = None
    port: int | None = None
    jump: str | tuple[str, ...] | None = None
    identity: str | tuple[str, ...] | None = None
    known_hosts: str | tuple[str, ...] | None = None
    ssh_config: bool | str | None = None
    python: str | tuple[str, ...] | None = None
    agent: str | tuple[str, ...] | None = None
    state_directory: str | None = None
    hold_budget: str | None = None
    storage_group: str | None = None
    connect_timeout_s: float | None = None
    tags: tuple[str, ...] | None = None
    parallel: int | None = None


@dataclass(frozen=True)
class Defaults:
    """What holds for the fleet as a whole; everything else of ``[defaults]`` is already in each `Node`."""

    parallel: int = 4


@dataclass(frozen=True)
class Node:
    """One GPU host and how to reach it.

    ``host`` None: ``name`` is an alias that ssh's own configuration resolves; ``user``,
    ``port`` None: ssh's. ``known_hosts`` empty: the user's, the system's and our own;
    otherwise only these. ``ssh_config`` True: ssh's configuration is asked about ``host``, which may
    be an alias then; a file: that one, in place of the user's and the system's. ``hops`` are ``jump``
    resolved, nearest to us first. ``transport``: an argv that gives stdio on the host, in place of SSH.
    ``agent`` empty: found on the host. ``hold_budget``: what warm models may take of each device there; empty for
    no limit. ``storage_group``: the storage that it loads from together with other nodes; empty for its own.
    """

    name: str
    host: str | None = None
    user: str | None = None
    port: int | None = None
    jump: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] = ()
    host_key_alias: str | None = None
    ssh_config: bool | str = False
    transport: tuple[str, ...] = ()
    python: tuple[str, ...] = ("python3",)
    agent: tuple[str, ...] = ()
    state_directory: str | None = None
    hold_budget: str = ""
    storage_group: str = ""
    connect_timeout_s: float = 20.0
    tags: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    hops: tuple[Node, ...] = field(default=(), repr=False)


def build_defaults(table: DefaultsTable, base: Path, problems: list[Problem]) -> Defaults:
    """Return the fleet's defaults, having checked every setting of the table once."""
    problems.extend(_check_settings("defaults", table, base))
    if table.parallel is not None and not 1 <= table.parallel <= PARALLEL_MOST:
        problems.append(Problem("defaults.parallel", f"{table.parallel} is not within 1..{PARALLEL_MOST}"))
    return Defaults(table.parallel if table.parallel is not None else Defaults.parallel)


def build_nodes(
    tables: Mapping[str, NodeTable | None], defaults: DefaultsTable, base: Path, problems: list[Problem]
) -> tuple[Node, ...]:
    """Return a Node a table, in order, having added every mistake to ``problems``.

    Relative ``identity`` and ``known_hosts`` are below ``base``.
    """
    nodes: dict[str, Node] = {}
    seen: dict[str, str] = {}
    for name, table in tables.items():
        path = f"nodes.{name}"
        problems.extend(_check_name(path, name, seen))
        if table is not None:
            problems.extend(_check_settings(path, table, base))
            problems.extend(_check_transport(path, table))
            nodes[name] = _merge(name, table, defaults, base)
    return tuple(_with_hops(node, nodes, tables[node.name], problems) for node in nodes.values())


def shell_problem(text: str) -> str | None:
    """Say which character of ``text`` may not stand in a remote command line; None for safe text."""
    if not text:
        return "must not be empty"
    for character in text:
        if character in _SHELL_CHARACTERS:
            return f"{text[:80]!r} holds {_SHELL_CHARACTERS[character]}, which a remote shell could act on"
        if not character.isprintable():
            return f"{text[:80]!r} holds a control character (U+{ord(character):04X})"
    return None


def parse_hop(text: str, like: Node) -> Node | None:
    """Return ``[user@]host[:port]`` as a node that is logged into as ``like`` is; None if it is none."""
    match = _HOP.fullmatch(text)
    if match is None:
        return None
    host, user = match["six"] or match["host"], match["user"]
    port = int(match["port"]) if match["port"] else None
    if (
        not _HOST.fullmatch(host)
        or (user and not _USER.fullmatch(user))
        or (port is not None and not 1 <= port < 65536)
    ):
        return None
    # No host of its own, so that a hop that is an alias in ssh's configuration gets its settings from there.
    return Node(
        name=host,
        user=user,
        port=port,
        identity=like.identity,
        known_hosts=like.known_hosts,
        ssh_config=like.ssh_config,
        connect_timeout_s=like.connect_timeout_s,
    )


def resolve_hops(node: Node, nodes: Mapping[str, Node], trail: tuple[str, ...] = ()) -> tuple[Node, ...]:
    """Return ``node.jump`` as nodes; only the first hop's own jumps are followed, as ssh does.

    Raises: ValueError for a hop that can't be read, or a loop.
    """
    hops: list[Node] = []
    for text in node.jump:
        hop = nodes.get(text) or parse_hop(text, node)
        if hop is None:
            raise ValueError(f"{text[:80]!r} is neither a node nor [user@]host[:port]")
        if hop.transport:
            raise ValueError(f"{text} has a transport of its own; only an SSH host can be jumped through")
        if text in trail or text == node.name:
            raise ValueError(f"jumps in a circle: {' → '.join((*trail, node.name, text))}")
        if not hops and hop.jump:
            hops.extend(resolve_hops(hop, nodes, (*trail, node.name)))
        hops.append(hop)
    return tuple(hops)


def _as_tuple(value: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    return (value,) if isinstance(value, str) else value


def _check_name(path: str, name: str, seen: dict[str, str]) -> Iterator[Problem]:
    if not NAME.fullmatch(name):
        yield Problem(path, f"a node's name {NAME_RULE}")
    elif name == "all":
        yield Problem(path, "'all' stands for every node and can't be the name of one")
    elif name.lower() in seen:
        yield Problem(path, f"differs from {seen[name.lower()]} in case only")
    seen.setdefault(name.lower(), name)


def _check_settings(path: str, table: NodeTable | DefaultsTable, base: Path) -> Iterator[Problem]:
    """Check what nodes and defaults have in common, and a node's host."""
    host = table.host if isinstance(table, NodeTable) else None
    if host is not None and not _HOST.fullmatch(host):
        hint = "; a user goes under user" if "@" in host else ""
        yield Problem(f"{path}.host", f"{host[:80]!r} is not a host name or address{hint}")
    if table.user is not None and not _USER.fullmatch(table.user):
        yield Problem(f"{path}.user", f"{table.user[:80]!r} is not a user name")
    if table.port is not None and not 1 <= table.port <= 65535:
        yield Problem(f"{path}.port", f"{table.port} is not within 1..65535")
    if table.connect_timeout_s is not None and not 0.1 <= table.connect_timeout_s <= 600:
        yield Problem(f"{path}.connect_timeout_s", f"{table.connect_timeout_s} is not within 0.1..600")
    for key in ("identity", "known_hosts"):
        for name in _as_tuple(getattr(table, key)) or ():
            if not name or not name.isprintable():
                yield Problem(f"{path}.{key}", f"{name[:80]!r} is not a file name")
            elif key == "identity" and not _local_path(name, base).is_file():
                yield Problem(f"{path}.{key}", f"no such file: {_local_path(name, base)}")
            elif key == "known_hosts" and name.lower() in ("none", "/dev/null"):
                yield Problem(f"{path}.{key}", "host keys are always checked; name a file")
    if isinstance(table.ssh_config, str) and not _local_path(table.ssh_config, base).is_file():
        yield Problem(f"{path}.ssh_config", f"no such file: {_local_path(table.ssh_config, base)}")
    yield from _check_remote(path, table)
    if table.hold_budget is not None:
        try:
            parse_budget(table.hold_budget)
        except ValueError as error:
            yield Problem(f"{path}.hold_budget", str(error))
    if table.storage_group is not None and not NAME.fullmatch(table.storage_group):
        yield Problem(f"{path}.storage_group", f"{table.storage_group[:80]!r}: a group's name {NAME_RULE}")
    for index, tag in enumerate(table.tags or ()):
        if not NAME.fullmatch(tag):
            yield Problem(f"{path}.tags[{index}]", f"a tag {NAME_RULE}")


def _check_remote(path: str, table: NodeTable | DefaultsTable) -> Iterator[Problem]:
    for key in ("python", "agent"):
        items = _as_tuple(getattr(table, key))
        if items is not None and not items:
            yield Problem(f"{path}.{key}", "name at least one argument")
        for item in items or ():
            problem = shell_problem(item)
            if problem:
                yield Problem(f"{path}.{key}", problem)
    if table.state_directory is not None:
        problem = shell_problem(table.state_directory)
        if problem is None and not table.state_directory.startswith(("/", "~/")):
            problem = f"{table.state_directory!r} must begin with / or ~/"
        if problem:
            yield Problem(f"{path}.state_directory", problem)


def _check_transport(path: str, table: NodeTable) -> Iterator[Problem]:
    if table.transport is None:
        return
    if not table.transport:
        yield Problem(f"{path}.transport", "name at least one argument")
    for index, item in enumerate(table.transport):
        if not item or not item.isprintable():
            yield Problem(f"{path}.transport[{index}]", f"{item[:80]!r} is empty or holds a control character")
    for key in _SSH_KEYS:
        if getattr(table, key) is not None:
            yield Problem(f"{path}.{key}", "is for SSH and can't stand beside transport")


def _local_path(name: str, base: Path) -> Path:
    try:
        return base / Path(name).expanduser()
    except RuntimeError:  # ~someone who is unknown here
        return base / name


def _merge(name: str, table: NodeTable, defaults: DefaultsTable, base: Path) -> Node:
    def pick(key: str) -> tuple[str, ...]:
        own = _as_tuple(getattr(table, key))
        return own if own is not None else _as_tuple(getattr(defaults, key)) or ()

    def files(key: str) -> tuple[str, ...]:
        return tuple(str(_local_path(item, base)) for item in pick(key))

    ssh = table.transport is None
    # A bastion that [defaults] names is itself reached directly.
    jumps = ssh and (table.jump is not None or name not in (_as_tuple(defaults.jump) or ()))
    timeout_s = table.connect_timeout_s if table.connect_timeout_s is not None else defaults.connect_timeout_s
    return Node(
        name=name,
        host=table.host,
        user=(table.user or defaults.user) if ssh else None,
        port=(table.port or defaults.port) if ssh else None,
        jump=pick("jump") if jumps else (),
        identity=files("identity") if ssh else (),
        known_hosts=files("known_hosts") if ssh else (),
        host_key_alias=table.host_key_alias,
        ssh_config=_ssh_config(table, defaults, base) if ssh else False,
        transport=table.transport or (),
        python=pick("python") or ("python3",),
        agent=pick("agent"),
        state_directory=table.state_directory or defaults.state_directory,
        hold_budget=table.hold_budget or defaults.hold_budget or "",
        storage_group=table.storage_group or defaults.storage_group or "",
        connect_timeout_s=timeout_s if timeout_s is not None else Node.connect_timeout_s,
        tags=tuple(dict.fromkeys((*(defaults.tags or ()), *(table.tags or ())))),
        recipes=table.recipes or (),
    )


def _ssh_config(table: NodeTable, defaults: DefaultsTable, base: Path) -> bool | str:
    value = table.ssh_config if table.ssh_config is not None else defaults.ssh_config
    return str(_local_path(value, base)) if isinstance(value, str) else bool(value)


def _with_hops(node: Node, nodes: Mapping[str, Node], table: NodeTable | None, problems: list[Problem]) -> Node:
    try:
        return dataclasses.replace(node, hops=resolve_hops(node, nodes))
    except ValueError as error:
        own = table is not None and table.jump is not None
        problems.append(Problem(f"nodes.{node.name}.jump" if own else "defaults.jump", str(error)))
        return node
