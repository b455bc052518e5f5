"""Where an SSH connection goes: ``fleet.toml`` first, then ssh's own configuration, then plain values.

``ssh -G`` is asked what ssh would do for a host, each hop for itself; without an ssh client
its files are read as far as they can't be misread. What is followed, said or refused of the
answer is decided in `ssh_settings`. Here tokens become names and files.
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote

from console.clean import clean
from console.config_nodes import Node, parse_hop, resolve_hops
from console.errors import NodeMisconfigured
from console.transports.gate import Gate
from console.transports.known_hosts import SSH_PORT
from console.transports.ssh_config_file import Misread, read_files
from console.transports.ssh_oracle import NoClient, Question, Settings
from console.transports.ssh_settings import NewHostKeys, Refused, SshSettings, expand, read_settings

HOP_LIMIT = 8
_DEFAULT_IDENTITIES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_SHELL_ACTS_ON = re.compile(r"[\s'\"`$\\;&<>|(){}\x00-\x1f\x7f]|\A-")
_NO_CLIENT = "no ssh client is installed: ssh's configuration was read by Glowplug, as far as that is safe"


@dataclass(frozen=True)
class Target:
    """One SSH server and how to log into it. ``label`` is our own name for it.

    ``named_identities``: the operator named them, so only they are tried.
    ``append_to``: where a host key goes that a person accepts; None where none may be accepted.
    ``by_hand``: the command line of ssh that logs in there, empty where ssh knows no such way.
    ``revoked_file``: public keys that no host may have. ``proxy_command``: a command line for the
    user's shell that gives a stream to the server. ``notes``: what of ssh's configuration is not followed.
    """

    label: str
    host: str
    port: int
    user: str
    identities: tuple[Path, ...]
    named_identities: bool
    certificates: tuple[Path, ...]
    known_hosts: tuple[Path, ...]
    append_to: Path | None
    revoked_file: Path | None
    host_key_alias: str | None
    agent_socket: str | None
    proxy_command: str | None
    connect_timeout_s: float
    settings: SshSettings
    by_hand: str = ""
    reads_users_known_hosts: bool = False
    notes: tuple[str, ...] = field(default=(), compare=False)


async def resolve(node: Node, gate: Gate) -> tuple[Target, ...]:
    """Return the way to ``node``: every bastion, nearest to us first, then the node itself.

    Raises: NodeMisconfigured.
    """
    async with gate.oracle:
        chain = await _resolve_chain(node, gate, 0)
    if len(chain) > HOP_LIMIT:
        raise NodeMisconfigured(f"{node.name}: more than {HOP_LIMIT} hops")
    return tuple(chain)


async def _resolve_chain(node: Node, gate: Gate, depth: int) -> list[Target]:
    if depth > HOP_LIMIT:
        raise NodeMisconfigured(f"{node.name}: more than {HOP_LIMIT} hops, or jumps in a circle")
    settings = await _settings(node, gate)
    hops = _hops(node, settings, gate)
    chain: list[Target] = []
    for index, hop in enumerate(hops):
        # Like ssh: the first hop's own jumps are followed, a later one is reached through the one before it.
        chain += await _resolve_chain(hop, gate, depth + 1) if index == 0 else [await _resolve_one(hop, gate)]
    return [*chain, _target(node, settings, gate, is_reached_directly=not hops)]


async def _resolve_one(node: Node, gate: Gate) -> Target:
    return _target(node, await _settings(node, gate), gate, is_reached_directly=False)


async def _settings(node: Node, gate: Gate) -> SshSettings:
    """Return what ssh's configuration says of the node's name or host; the defaults where it need not be asked."""
    if node.host is not None and not node.ssh_config:
        return SshSettings()
    file = node.ssh_config if isinstance(node.ssh_config, str) else None
    try:
        answer = await gate.oracle.ask(node.name, Question(_asked(node), node.user, node.port, file))
        return read_settings(answer, await gate.oracle.usual())
    except NoClient:
        return _settings_without_ssh(node, gate, file)
    except Refused as error:
        raise NodeMisconfigured(clean(f"{node.name}: {error}")) from error


def _settings_without_ssh(node: Node, gate: Gate, file: str | None) -> SshSettings:
    try:
        answer: Settings = read_files(_asked(node), gate.account_home, file=Path(file) if file else None)
        settings = read_settings(answer, {})
    except (Misread, Refused) as error:
        raise NodeMisconfigured(clean(f"{node.name}: {error}")) from error
    if answer and gate.once("", _NO_CLIENT):
        return replace(settings, notes=(_NO_CLIENT, *settings.notes))
    return settings


def _asked(node: Node) -> str:
    return node.host or node.name


def _hops(node: Node, settings: SshSettings, gate: Gate) -> tuple[Node, ...]:
    if node.jump:
        try:
            return node.hops or resolve_hops(node, {})
        except ValueError as error:
            raise NodeMisconfigured(clean(f"{node.name}: jump: {error}")) from error
    if settings.proxy_jump is None:
        return ()
    names = _Names(node, settings, gate)
    hops = []
    for text in names.expanded(settings.proxy_jump, "ProxyJump").split(","):
        is_uri = text.startswith("ssh://")
        hop = parse_hop(unquote(text.removeprefix("ssh://")) if is_uri else text, node)
        if hop is None:
            raise NodeMisconfigured(clean(f"{node.name}: ssh's configuration jumps through {text!r}"))
        hops.append(hop)
    return tuple(hops)


class _Names:
    """What stands for tokens in one host's settings, and the names and files that come of them."""

    def __init__(self, node: Node, settings: SshSettings, gate: Gate) -> None:
        self._node, self._gate = node, gate
        # Files of ssh's configuration are where ssh would look for them.
        self.home = gate.home if settings == SshSettings() else gate.account_home
        self.host = settings.host or node.host or node.name  # ssh was asked about ours, where it was asked
        self.port = node.port or settings.port or SSH_PORT
        self.user = node.user or settings.user or _local_user()
        self.alias = node.host_key_alias or settings.host_key_alias
        local = socket.gethostname()
        self._tokens = {
            "%": "%", "h": self.host, "n": _asked(node), "p": str(self.port), "r": self.user, "u": _local_user(),
            "d": str(self.home), "i": str(os.getuid()), "k": self.alias or _asked(node), "l": local,
            "L": local.partition(".")[0],
        }  # fmt: skip

    def expanded(self, text: str, keyword: str) -> str:
        """Return a setting with its ``%x`` filled in. Raises: NodeMisconfigured naming the setting."""
        try:
            return expand(text, self._tokens, None)
        except Refused as error:
            raise NodeMisconfigured(clean(f"{self._node.name}: {keyword} {error}")) from error

    def path(self, text: str) -> Path:
        """Return a file with its ``~``, ``%x`` and ``${NAME}`` filled in. Raises: Refused."""
        environ = os.environ if self._gate.environ is None else self._gate.environ
        return Path(expand(str(self.located(text)), self._tokens, environ))

    def located(self, text: str) -> Path:
        """Return a file whose tokens ssh has filled in already. Raises: Refused for a ``~`` of nobody."""
        match = re.match(r"~([^/]*)(?:/|\Z)", text)
        if match is None:
            return Path(text)
        if not match[1]:
            return self.home / text[match.end() :]
        try:
            return Path(pwd.getpwnam(match[1]).pw_dir) / text[match.end() :]
        except KeyError as error:
            raise Refused(f"{text!r}: there is no user {match[1]}") from error

    def command(self, text: str) -> str:
        """Return a ProxyCommand filled in. Raises: NodeMisconfigured where a shell would act on a name."""
        for token in re.findall(r"%(.)", text):
            if _SHELL_ACTS_ON.search(self._tokens.get(token, "")) and token in "hnrk":
                raise NodeMisconfigured(
                    clean(f"{self._node.name}: ProxyCommand: a shell would act on {self._tokens[token]!r} (%{token})")
                )
        return self.expanded(text, "ProxyCommand")


def _target(node: Node, settings: SshSettings, gate: Gate, *, is_reached_directly: bool) -> Target:
    try:
        return _filled_in(node, settings, gate, _Names(node, settings, gate), is_reached_directly)
    except Refused as error:
        raise NodeMisconfigured(clean(f"{node.name}: {error}")) from error


def _filled_in(node: Node, settings: SshSettings, gate: Gate, names: _Names, is_reached_directly: bool) -> Target:
    notes = list(settings.notes)
    own_files = tuple(Path(name) for name in node.known_hosts)
    if settings.known_hosts_command is not None and not own_files:
        raise Refused("KnownHostsCommand is not run, and it may revoke keys: name known_hosts for it in fleet.toml")
    proxy_command = settings.proxy_command if is_reached_directly else None
    if settings.bind_interface is not None and is_reached_directly and proxy_command is None:
        raise Refused("BindInterface can't be followed; BindAddress can")
    named = tuple(Path(name) for name in node.identity)
    found = _files(_DEFAULT_IDENTITIES if settings.identity_files is None else settings.identity_files, names, notes)
    append_to = own_files[0] if own_files else gate.known_hosts_file
    return Target(
        label=node.name,
        host=names.host,
        port=names.port,
        user=names.user,
        identities=named or tuple(path for path in found if path.is_file()),
        named_identities=bool(named),
        certificates=_files(settings.certificate_files, names, notes),
        known_hosts=own_files or _known_hosts(settings, names, gate),
        append_to=None if settings.new_host_keys is NewHostKeys.NEVER else append_to,
        revoked_file=names.path(settings.revoked_host_keys) if settings.revoked_host_keys else None,
        host_key_alias=names.alias,
        agent_socket=_agent(settings.identity_agent, gate),
        proxy_command=names.command(proxy_command) if proxy_command is not None else None,
        connect_timeout_s=min(node.connect_timeout_s, settings.connect_timeout_s or node.connect_timeout_s),
        settings=settings,
        by_hand=_by_hand(node, settings, names),
        reads_users_known_hosts=not own_files and settings.user_known_hosts != (),
        notes=tuple(notes),
    )


def _by_hand(node: Node, settings: SshSettings, names: _Names) -> str:
    if node.jump:
        return ""
    if settings == SshSettings():
        port = ["-p", str(names.port)] if names.port != SSH_PORT else []
        return shlex.join(["ssh", *port, f"{names.user}@{names.host}"])
    file = node.ssh_config if isinstance(node.ssh_config, str) else None
    return shlex.join(["ssh", *Question(_asked(node), node.user, node.port, file).by_hand()])


def _files(texts: Sequence[str], names: _Names, notes: list[str]) -> tuple[Path, ...]:
    """Return the key files; like ssh, one whose name can't be filled in is passed over, which goes to ``notes``."""
    paths = []
    for text in texts:
        try:
            paths.append(names.path(text))
        except Refused as error:
            notes.append(f"a key file is passed over: {error}")
    return tuple(paths)


def _known_hosts(settings: SshSettings, names: _Names, gate: Gate) -> tuple[Path, ...]:
    user = _USER_KNOWN_HOSTS if settings.user_known_hosts is None else settings.user_known_hosts
    system = _SYSTEM_KNOWN_HOSTS if settings.system_known_hosts is None else settings.system_known_hosts
    return (*(names.located(name) for name in (*user, *system)), gate.known_hosts_file)


def _agent(named: str | None, gate: Gate) -> str | None:
    """Return the agent's socket. ``$NAME`` is the one form that ssh leaves for later."""
    environ: Mapping[str, str] = os.environ if gate.environ is None else gate.environ
    if named in (None, "SSH_AUTH_SOCK"):
        return gate.agent_socket
    if named == "none":
        return None
    return environ.get(named[1:]) or None if named.startswith("$") else named


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError) as error:
        raise NodeMisconfigured("this user has no name here; set user in fleet.toml") from error
