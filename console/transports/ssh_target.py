"""Where an SSH connection goes: ``fleet.toml`` first, then ssh's own configuration, then plain values.

ssh's configuration is never read here: ``ssh -G`` is asked, which knows Include, Match
and all the rest. Of its answer only names, ports, users, files and jumps are used;
whatever it says, host keys are always checked.
"""

from __future__ import annotations

import asyncio
import getpass
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from console.clean import clean
from console.config_nodes import Node, parse_hop, resolve_hops
from console.errors import NodeMisconfigured
from console.transports.base import TimedOut, bounded
from console.transports.gate import Gate
from console.transports.known_hosts import SSH_PORT

ORACLE_TIMEOUT_S = 10.0
HOP_LIMIT = 8
_DEFAULT_IDENTITIES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")

Settings = Mapping[str, Sequence[str]]
"""What ``ssh -G`` printed: values by key, a key may come more than once."""


@dataclass(frozen=True)
class Target:
    """One SSH server and how to log into it. ``label`` is our own name for it.

    ``named_identities``: the operator named them, so only they are tried.
    ``append_to``: where a host key goes that a person accepts.
    """

    label: str
    host: str
    port: int
    user: str
    identities: tuple[Path, ...]
    named_identities: bool
    known_hosts: tuple[Path, ...]
    append_to: Path
    host_key_alias: str | None
    agent_socket: str | None
    connect_timeout_s: float


async def resolve(node: Node, gate: Gate) -> tuple[Target, ...]:
    """Return the way to ``node``: every bastion, nearest to us first, then the node itself.

    Raises: NodeMisconfigured.
    """
    chain = await _resolve_chain(node, gate, 0)
    if len(chain) > HOP_LIMIT:
        raise NodeMisconfigured(f"{node.name}: more than {HOP_LIMIT} hops")
    return tuple(chain)


async def _resolve_chain(node: Node, gate: Gate, depth: int) -> list[Target]:
    if depth > HOP_LIMIT:
        raise NodeMisconfigured(f"{node.name}: more than {HOP_LIMIT} hops, or jumps in a circle")
    settings = await _ask_ssh(node, gate)
    hops = _hops(node, settings)
    chain: list[Target] = []
    for index, hop in enumerate(hops):
        # Like ssh: the first hop's own jumps are followed, a later one is reached through the one before it.
        chain += await _resolve_chain(hop, gate, depth + 1) if index == 0 else [await _resolve_one(hop, gate)]
    return [*chain, _target(node, settings, gate)]


async def _resolve_one(node: Node, gate: Gate) -> Target:
    return _target(node, await _ask_ssh(node, gate), gate)


def _hops(node: Node, settings: Settings) -> tuple[Node, ...]:
    if node.jump:
        try:
            return node.hops or resolve_hops(node, {})
        except ValueError as error:
            raise NodeMisconfigured(clean(f"{node.name}: jump: {error}")) from error
    jumps = _first(settings, "proxyjump")
    if jumps in (None, "none"):
        if _first(settings, "proxycommand") not in (None, "none"):
            raise NodeMisconfigured(
                f"{node.name}: ssh's configuration has a ProxyCommand for it, which is not run here; "
                "set jump or transport in fleet.toml"
            )
        return ()
    hops = []
    for text in (jumps or "").split(","):
        hop = parse_hop(text.removeprefix("ssh://"), node)
        if hop is None:
            raise NodeMisconfigured(clean(f"{node.name}: ssh's configuration jumps through {text!r}"))
        hops.append(hop)
    return tuple(hops)


def _target(node: Node, settings: Settings, gate: Gate) -> Target:
    host = node.host or _first(settings, "hostname") or node.name
    port = node.port or int(_first(settings, "port") or SSH_PORT)
    user = node.user or _first(settings, "user") or _local_user()
    tokens = {"h": host, "n": node.name, "p": str(port), "r": user, "u": _local_user(), "d": str(gate.home)}
    named = tuple(_paths(node.identity, tokens, gate))
    found = _paths(settings.get("identityfile", ()) or _DEFAULT_IDENTITIES, tokens, gate)
    agent = _first(settings, "identityagent")
    own_files = tuple(_paths(node.known_hosts, tokens, gate))
    return Target(
        label=node.name,
        host=host,
        port=port,
        user=user,
        identities=named or tuple(path for path in found if path.is_file()),
        named_identities=bool(named),
        known_hosts=own_files or _known_hosts(settings, tokens, gate),
        append_to=own_files[0] if own_files else gate.known_hosts_file,
        host_key_alias=node.host_key_alias or _first(settings, "hostkeyalias"),
        agent_socket=gate.agent_socket if agent in (None, "SSH_AUTH_SOCK") else None if agent == "none" else agent,
        connect_timeout_s=node.connect_timeout_s,
    )


def _known_hosts(settings: Settings, tokens: Mapping[str, str], gate: Gate) -> tuple[Path, ...]:
    user = _file_list(settings, "userknownhostsfile") or _USER_KNOWN_HOSTS
    system = _file_list(settings, "globalknownhostsfile") or _SYSTEM_KNOWN_HOSTS
    return (*_paths(user, tokens, gate), *_paths(system, tokens, gate), gate.known_hosts_file)


def _file_list(settings: Settings, key: str) -> tuple[str, ...]:
    """Return the files of a list; ``none`` and ``/dev/null`` would switch checking off and count as no list."""
    text = _first(settings, key) or ""
    try:
        files = shlex.split(text)
    except ValueError:
        files = text.split()
    return tuple(name for name in files if name.lower() not in ("none", "/dev/null"))


def _paths(names: Sequence[str], tokens: Mapping[str, str], gate: Gate) -> list[Path]:
    paths = []
    for name in names:
        unknown = [token for token in re.findall(r"%(.)", name) if token not in tokens and token != "%"]
        if unknown:
            continue  # a token that only ssh itself can fill in
        text = re.sub(r"%(.)", lambda match: tokens.get(match[1], "%"), name)
        paths.append(gate.home / text[2:] if text.startswith("~/") else Path(text))
    return paths


async def _ask_ssh(node: Node, gate: Gate) -> Settings:
    """Return what ``ssh -G`` makes of the node's name or host; nothing where it need not or can't be asked."""
    if node.host is not None and not node.ssh_config:
        return {}
    options = [*(["-l", node.user] if node.user else []), *(["-p", str(node.port)] if node.port else [])]
    try:
        process = await asyncio.create_subprocess_exec(
            gate.ssh,
            "-G",
            *options,
            "--",
            node.host or node.name,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError:
        return {}
    try:
        output, errors = await bounded(process.communicate(), ORACLE_TIMEOUT_S)
    except TimedOut as error:
        raise NodeMisconfigured(f"{node.name}: `ssh -G` did not answer within {ORACLE_TIMEOUT_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise NodeMisconfigured(clean(f"{node.name}: `ssh -G` says: {errors.decode('utf-8', 'replace').strip()}"))
    settings: dict[str, list[str]] = {}
    for line in output.decode("utf-8", "replace").splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key.lower(), []).append(value.strip())
    return settings


def _first(settings: Settings, key: str) -> str | None:
    values = settings.get(key)
    return values[0] if values else None


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError) as error:
        raise NodeMisconfigured("this user has no name here; set user in fleet.toml") from error
