"""Opens one SSH connection, and says in our own words why it did not open.

Nothing of ssh's configuration is left to asyncssh, which ignores part of it in silence:
every option it would look up is passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial

import asyncssh

from console.clean import clean
from console.errors import (
    AuthenticationFailed,
    HostKeyChanged,
    HostKeyUnknown,
    LinkError,
    NodeMisconfigured,
    NodeUnreachable,
)
from console.prompts import PromptQueue
from console.transports import known_hosts, ssh_algorithms
from console.transports.base import TimedOut, bounded_by, unbroken
from console.transports.gate import Gate
from console.transports.known_hosts import Known, Verdict
from console.transports.patience import Patience, Place
from console.transports.ssh_client import Client
from console.transports.ssh_identities import Identities, load_identities
from console.transports.ssh_keyring import open_key as open_key_file
from console.transports.ssh_proxy import Proxy, open_proxy
from console.transports.ssh_questions import Questions
from console.transports.ssh_settings import NewHostKeys
from console.transports.ssh_target import Target

KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_COUNT_MAX = 3
ATTEMPTS = 5
FIRST_DELAY_S = 0.25
"""A server over its MaxStartups drops a connection at once; a few jittered tries get in."""
SLOT_HELD_S = 3.0

_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6, "any": socket.AF_UNSPEC}


@dataclass(frozen=True)
class Logins:
    """What the logins on the way to one node share. ``say(label, line)``: tells the operator, once."""

    gate: Gate
    prompts: PromptQueue | None
    node: str
    say: Callable[[str, str], None]


@dataclass
class _Login:
    """One login: what it may use, ask and trust."""

    target: Target
    questions: Questions
    trust: _Trust
    identities: Identities


async def connect(
    target: Target,
    logins: Logins,
    slots: asyncio.Semaphore,
    tunnel: asyncssh.SSHClientConnection | None = None,
) -> tuple[asyncssh.SSHClientConnection, Callable[[], Awaitable[None]]]:
    """Return a connection to ``target``, logged in, its host key checked, and what frees the way to it once it is over.

    A host key that is not known ends the connection before a person is asked, and is looked up anew for the next one.
    At most ``slots`` connect at once. Raises: LinkError.
    """
    is_hop = target.label != logins.node
    questions = Questions(target, logins.prompts, logins.node if is_hop else None)
    taken: set[str] = set()
    while True:
        try:
            return await _connect(target, logins.gate, questions, slots, tunnel)
        except HostKeyUnknown as error:
            if error.fingerprint in taken:
                raise
            await _take_host_key(error, target, questions, logins)
            taken.add(error.fingerprint)
        except HostKeyChanged as error:
            questions.tell_stop(error)
            raise


async def _take_host_key(error: HostKeyUnknown, target: Target, questions: Questions, logins: Logins) -> None:
    """Keep a new host key, if a person or ssh's configuration says so. Raises: HostKeyUnknown, PromptDeclined."""

    def is_known() -> bool:
        """Others may have been told about the same key meanwhile."""
        return any(key.get_fingerprint("sha256") == error.fingerprint for key in _read_known(target).keys)

    if is_known():
        return
    if target.settings.new_host_keys is NewHostKeys.ACCEPT:
        logins.say(target.label, f"took the host key {error.kind} {error.fingerprint}, as StrictHostKeyChecking says")
    elif questions.prompts is None:
        raise error
    else:
        await questions.about_host_key(error)
    if not is_known():
        known_hosts.append(error.known_hosts_file, error.line)


async def _connect(
    target: Target,
    gate: Gate,
    questions: Questions,
    slots: asyncio.Semaphore,
    tunnel: asyncssh.SSHClientConnection | None,
) -> tuple[asyncssh.SSHClientConnection, Callable[[], Awaitable[None]]]:
    is_direct = tunnel is None and target.proxy_command is None
    trust = _Trust(target, await asyncio.to_thread(_read_known, target), is_direct)
    open_key = partial(open_key_file, opened=gate.keys, questions=questions) if questions.prompts is not None else None
    async with Place(gate.agents if target.agent_socket is not None else None) as place:
        questions.holds(place)
        async with await load_identities(target, open_key) as identities:
            return await _connect_in_turn(_Login(target, questions, trust, identities), gate, slots, tunnel)


async def _connect_in_turn(
    login: _Login, gate: Gate, slots: asyncio.Semaphore, tunnel: asyncssh.SSHClientConnection | None
) -> tuple[asyncssh.SSHClientConnection, Callable[[], Awaitable[None]]]:
    """Try again, with chance in the delay, while the server drops connections before it asks for anything."""
    target = login.target
    for attempt in range(ATTEMPTS):
        client = Client(login.questions, login.identities)
        way = _Way(target, gate, tunnel)
        try:
            connection = await _in_a_slot(slots, login.questions, _connect_once(login, client, way))
            _check_host_key_size(connection, target)
            return connection, way.close
        except (asyncssh.ConnectionLost, ConnectionResetError, BrokenPipeError) as error:
            await way.close()
            if (reason := way.reason() or login.questions.lost_reason()) is not None:
                raise NodeUnreachable(f"{_place(target)}: {reason}") from error
            if attempt == ATTEMPTS - 1:
                raise NodeUnreachable(
                    f"{_place(target)} dropped {ATTEMPTS} connections before login (over its MaxStartups?)"
                ) from error
        except Exception as error:
            await way.close()
            if isinstance(error, LinkError):
                raise
            raise await asyncio.to_thread(_explain, error, login, client) from error
        except BaseException:
            await way.close()
            raise
        await asyncio.sleep(FIRST_DELAY_S * 2**attempt * (0.5 + gate.random()))
    raise AssertionError("unreachable")


class _Way:
    """What carries one connection: the network, another connection, or a ProxyCommand of its own."""

    def __init__(self, target: Target, gate: Gate, tunnel: asyncssh.SSHClientConnection | None) -> None:
        self.tunnel = tunnel
        self.is_direct = tunnel is None and target.proxy_command is None
        self._target, self._gate = target, gate
        self._proxy: Proxy | None = None

    async def open(self) -> socket.socket | None:
        """Return what to speak SSH on, where that isn't for asyncssh to open. Raises: NodeUnreachable."""
        command = self._target.proxy_command
        if command is None or self.tunnel is not None:
            return None
        self._proxy = await open_proxy(self._target.label, command, self._gate.environ)
        return self._proxy.socket

    def reason(self) -> str | None:
        """Return one line on how a ProxyCommand ended and what it said, None where there is nothing to say."""
        return self._proxy.reason() if self._proxy is not None else None

    async def close(self) -> None:
        if self._proxy is not None:
            await unbroken(self._proxy.close())


def _read_known(target: Target) -> Known:
    port = None if target.host_key_alias else target.port
    known = known_hosts.read(target.known_hosts, target.host_key_alias or target.host, port)
    if target.revoked_file is not None:
        known = replace(known, revoked=(*known.revoked, *known_hosts.read_revoked(target.revoked_file)))
    allowed = target.settings.authority_algorithms
    if not allowed:
        return known
    return replace(
        known,
        authorities=tuple(
            key for key in known.authorities if any(name.decode() in allowed for name in key.sig_algorithms)
        ),
    )


def _check_host_key_size(connection: asyncssh.SSHClientConnection, target: Target) -> None:
    """Like ssh's RequiredRSASize. Raises: HostKeyChanged, the connection being over."""
    key, required_bits = connection.get_server_host_key(), target.settings.required_rsa_bits
    bits = known_hosts.rsa_bits(key) if key is not None else None
    if key is not None and bits is not None and bits < required_bits:
        connection.abort()
        text = f"has {bits} bits, RequiredRSASize is {required_bits}"
        raise HostKeyChanged(target.host, target.port, key.get_fingerprint("sha256"), text)


async def _in_a_slot(
    slots: asyncio.Semaphore,
    questions: Questions,
    connecting: Coroutine[object, object, asyncssh.SSHClientConnection],
) -> asyncssh.SSHClientConnection:
    """A host that does not answer, or asks a person, gives its slot back early, and so does not hold up others."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            place = await stack.enter_async_context(Place(slots))
        except BaseException:
            connecting.close()
            raise
        questions.holds(place)
        task = asyncio.ensure_future(connecting)
        try:
            await asyncio.wait({task}, timeout=SLOT_HELD_S)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=2.0)
            raise
        place.give_back()
        return await task


async def _connect_once(login: _Login, client: Client, way: _Way) -> asyncssh.SSHClientConnection:
    target, trust = login.target, login.trust
    settings = target.settings
    chosen, _ = ssh_algorithms.usable(target)
    patience = Patience(target.connect_timeout_s)
    login.questions.begins(patience)
    try:
        connection = asyncssh.connect(
            target.host,
            target.port,
            tunnel=way.tunnel or (),
            sock=await way.open(),
            family=_FAMILIES[settings.address_family] if way.is_direct else socket.AF_UNSPEC,
            local_addr=(settings.bind_address, 0) if settings.bind_address and way.is_direct else None,
            config=None,
            client_factory=lambda: client,
            username=target.user,
            known_hosts=trust.keys,
            host_key_alias=target.host_key_alias,
            server_host_key_algs=ssh_algorithms.host_key_algorithms(target, trust.known, chosen),
            x509_trusted_certs=None,
            preferred_auth=list(settings.login_methods),
            client_keys=login.identities.keys,
            client_certs=[],
            password=None,
            gss_host=None,
            agent_path=None,
            agent_forwarding=False,
            keepalive_interval=settings.alive_interval_s or KEEPALIVE_INTERVAL_S,
            keepalive_count_max=settings.alive_count_max if settings.alive_interval_s else KEEPALIVE_COUNT_MAX,
            connect_timeout=None,
            login_timeout=0,
            **ssh_algorithms.options(chosen),
        )
        return await bounded_by(connection, patience)
    finally:
        patience.close()


class _Trust:
    """What the known_hosts files say of one target, as asyncssh asks for it."""

    def __init__(self, target: Target, known: Known, is_direct: bool) -> None:
        self.known = known
        self._target = target
        # What goes through something else has no address here, for ssh neither.
        self._checks_address = target.settings.check_host_ip and is_direct
        self.address_keys: tuple[asyncssh.SSHKey, ...] = ()
        self.address = ""

    def keys(self, host: str, addr: str, port: int) -> tuple[Sequence[asyncssh.SSHKey], ...]:
        """Return the keys that are trusted, the authorities that are, and what is revoked."""
        known = self.known
        if self._checks_address and addr and addr != host:
            self.address, self.address_keys = addr, known_hosts.read(self._target.known_hosts, addr, port).exact
        trusted = [key for key in known.keys if key not in known.revoked and not self.contradicts(key)]
        # Where no certificates are in play a revoked key is merely not trusted, so that `_Client` sees it.
        return trusted, known.authorities, known.revoked if known.authorities else ()

    def contradicts(self, key: asyncssh.SSHKey) -> bool:
        """Say whether the address is known with keys, and this is none of them."""
        return bool(self.address_keys) and key not in self.address_keys


def _explain(error: Exception, login: _Login, client: Client) -> LinkError:
    """Return what a login failed of. Reads known_hosts files."""
    target = login.target
    place = _place(target)
    if isinstance(error, (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed)):
        return _explain_host_key(error, target, login.trust, client)
    if login.questions.declined is not None:
        return login.questions.declined
    if isinstance(error, asyncssh.PermissionDenied):
        return AuthenticationFailed(_not_let_in(login))
    if isinstance(error, TimedOut):
        return NodeUnreachable(f"{place} gave no SSH login within {target.connect_timeout_s:g} s")
    if isinstance(error, asyncssh.ChannelOpenError):
        return NodeUnreachable(clean(f"{place} can't be reached from the host before it: {error.reason}"))
    if isinstance(error, asyncssh.Error):
        return NodeUnreachable(clean(f"{place}: {error.reason}"))
    if isinstance(error, socket.gaierror):
        return NodeUnreachable(f"{target.host}: no such host: {error.strerror}")
    if isinstance(error, OSError):
        return NodeUnreachable(f"{place}: {_strerror(error)}")
    return NodeMisconfigured(clean(f"{place}: {error}"))


def _not_let_in(login: _Login) -> str:
    target, locked = login.target, login.identities.locked
    tried = ", ".join(str(path) for path in target.identities if path not in locked) or "no key"
    hints = [f"{', '.join(map(str, locked))} is encrypted: add it to ssh-agent"] if locked else []
    if login.questions.unanswered:
        asks = " or ".join(dict.fromkeys(login.questions.unanswered))
        hints.append(f"it takes {asks}, which {login.questions.nobody()}: log in with a key")
    text = "; ".join((f"did not let {target.user} in with {tried}", *hints, *login.identities.notes))
    return clean(f"{_place(target)} {text}")


def _strerror(error: OSError) -> str:
    """Return the reason without the address, which asyncio puts into its own texts."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else clean(str(error))


def _explain_host_key(error: asyncssh.Error, target: Target, trust: _Trust, client: Client) -> LinkError:
    name, port, known = target.host_key_alias or target.host, target.port, trust.known
    key = client.shown
    if key is None and isinstance(error, asyncssh.HostKeyNotVerifiable):
        return HostKeyChanged(name, port, "", clean(f"can't be trusted ({error.reason.partition(' for host')[0]})"))
    if key is None:
        return NodeUnreachable(clean(f"{_place(target)}: {error.reason}"))
    fingerprint, kind = key.get_fingerprint("sha256"), known_hosts.kind_of(key)
    entry_port = None if target.host_key_alias else port

    def stop(text: str, host: str = name) -> HostKeyChanged:
        entries = known_hosts.describe_entries(target.known_hosts, host, entry_port)
        return HostKeyChanged(name, port, fingerprint, text, entries, kind)

    verdict = known.judge(key)
    if key in known.keys and verdict is not Verdict.REVOKED and trust.contradicts(key):
        return stop(f"is not the one known for its address {trust.address}", trust.address)
    if verdict is Verdict.CHANGED:
        return stop("has changed")
    if verdict is Verdict.REVOKED:
        return stop("is revoked")
    if verdict is Verdict.NOT_CERTIFIED:
        return stop("is not signed by the authority that known_hosts names")
    if target.append_to is None:
        return stop("is not known, and StrictHostKeyChecking is yes")
    line = known_hosts.entry_line(name, entry_port, key, hashed=target.settings.hash_known_hosts)
    return HostKeyUnknown(name, port, fingerprint, line, target.append_to, kind, _how_to_accept(target))


def _how_to_accept(target: Target) -> str:
    by_hand = f" or `{target.by_hand}`" if target.by_hand and target.reads_users_known_hosts else ""
    return f"; open the console (`glowplug`){by_hand} once to accept it"


def _place(target: Target) -> str:
    where = f"{target.host} port {target.port}"
    return where if target.label == target.host else f"{target.label} ({where})"
