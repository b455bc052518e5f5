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
from dataclasses import replace

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
from console.transports import known_hosts, ssh_algorithms
from console.transports.base import Prompts, TimedOut, bounded, unbroken
from console.transports.gate import Gate
from console.transports.known_hosts import Known, Verdict
from console.transports.ssh_identities import Identities, load_identities
from console.transports.ssh_proxy import Proxy, open_proxy
from console.transports.ssh_target import Target

KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_COUNT_MAX = 3
ATTEMPTS = 5
FIRST_DELAY_S = 0.25
"""A server over its MaxStartups drops a connection at once; a few jittered tries get in."""
SLOT_HELD_S = 3.0

_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6, "any": socket.AF_UNSPEC}


class _Client(asyncssh.SSHClient):
    """Accepts no key that isn't known, and remembers the one that was shown."""

    def __init__(self) -> None:
        self.shown: asyncssh.SSHKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = key
        return False

    def validate_host_ca_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = key
        return False


async def connect(
    target: Target,
    gate: Gate,
    prompts: Prompts | None,
    slots: asyncio.Semaphore,
    tunnel: asyncssh.SSHClientConnection | None = None,
) -> tuple[asyncssh.SSHClientConnection, Callable[[], Awaitable[None]]]:
    """Return a connection to ``target``, logged in, its host key checked, and what frees the way to it once it is over.

    At most ``slots`` connect at once. Raises: LinkError.
    """
    is_direct = tunnel is None and target.proxy_command is None
    trust = _Trust(target, await asyncio.to_thread(_read_known, target), is_direct)
    places = gate.agents if target.agent_socket is not None else contextlib.nullcontext()
    async with places, await load_identities(target, prompts) as identities:
        for attempt in range(ATTEMPTS):
            client = _Client()
            way = _Way(target, gate, tunnel)
            try:
                connection = await _in_a_slot(slots, _connect_once(target, trust, identities, client, way))
                _check_host_key_size(connection, target)
                return connection, way.close
            except (asyncssh.ConnectionLost, ConnectionResetError, BrokenPipeError) as error:
                await way.close()
                if (reason := way.reason()) is not None:
                    raise NodeUnreachable(f"{_place(target)}: {reason}") from error
                if attempt == ATTEMPTS - 1:
                    raise NodeUnreachable(
                        f"{_place(target)} dropped {ATTEMPTS} connections before login (over its MaxStartups?)"
                    ) from error
            except Exception as error:
                await way.close()
                if isinstance(error, LinkError):
                    raise
                raise _explain(error, target, trust, client, identities) from error
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
    slots: asyncio.Semaphore, connecting: Coroutine[object, object, asyncssh.SSHClientConnection]
) -> asyncssh.SSHClientConnection:
    """A host that does not answer gives its slot back early, so that dead hosts don't hold up live ones."""
    try:
        await slots.acquire()
    except BaseException:
        connecting.close()
        raise
    task = asyncio.ensure_future(connecting)
    try:
        await asyncio.wait({task}, timeout=SLOT_HELD_S)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=2.0)
        raise
    finally:
        slots.release()
    return await task


async def _connect_once(
    target: Target,
    trust: _Trust,
    identities: Identities,
    client: _Client,
    way: _Way,
) -> asyncssh.SSHClientConnection:
    settings = target.settings
    chosen, _ = ssh_algorithms.usable(target)
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
        preferred_auth="publickey",
        client_keys=identities.keys,
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
    return await bounded(connection, target.connect_timeout_s)


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


def _explain(error: Exception, target: Target, trust: _Trust, client: _Client, identities: Identities) -> LinkError:
    place = _place(target)
    if isinstance(error, (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed)):
        return _explain_host_key(error, target, trust, client)
    if isinstance(error, asyncssh.PermissionDenied):
        locked = identities.locked
        tried = ", ".join(str(path) for path in target.identities if path not in locked) or "no key"
        hint = f"; {', '.join(map(str, locked))} is encrypted: add it to ssh-agent" if locked else ""
        notes = "".join(f"; {note}" for note in identities.notes)
        return AuthenticationFailed(clean(f"{place} did not let {target.user} in with {tried}{hint}{notes}"))
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


def _strerror(error: OSError) -> str:
    """Return the reason without the address, which asyncio puts into its own texts."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else clean(str(error))


def _explain_host_key(error: asyncssh.Error, target: Target, trust: _Trust, client: _Client) -> LinkError:
    name, port, known = target.host_key_alias or target.host, target.port, trust.known
    key = client.shown
    if key is None and isinstance(error, asyncssh.HostKeyNotVerifiable):
        return HostKeyChanged(name, port, "", clean(f"can't be trusted ({error.reason.partition(' for host')[0]})"))
    if key is None:
        return NodeUnreachable(clean(f"{_place(target)}: {error.reason}"))
    fingerprint = key.get_fingerprint("sha256")
    verdict = known.judge(key)
    if key in known.keys and verdict is not Verdict.REVOKED and trust.contradicts(key):
        return HostKeyChanged(name, port, fingerprint, f"is not the one known for its address {trust.address}")
    if verdict is Verdict.CHANGED:
        return HostKeyChanged(name, port, fingerprint, "has changed")
    if verdict is Verdict.REVOKED:
        return HostKeyChanged(name, port, fingerprint, "is revoked")
    if verdict is Verdict.NOT_CERTIFIED:
        return HostKeyChanged(name, port, fingerprint, "is not signed by the authority that known_hosts names")
    if target.append_to is None:
        return HostKeyChanged(name, port, fingerprint, "is not known, and StrictHostKeyChecking is yes")
    entry_port = None if target.host_key_alias else port
    return HostKeyUnknown(name, port, fingerprint, known_hosts.entry_line(name, entry_port, key), target.append_to)


def _place(target: Target) -> str:
    where = f"{target.host} port {target.port}"
    return where if target.label == target.host else f"{target.label} ({where})"
