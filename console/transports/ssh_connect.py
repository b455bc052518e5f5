"""Opens one SSH connection, and says in our own words why it did not open.

Nothing of ssh's configuration is left to asyncssh, which ignores part of it in silence:
every option it would look up is passed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from pathlib import Path

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
from console.transports import known_hosts
from console.transports.base import Prompts, TimedOut, bounded
from console.transports.gate import Gate
from console.transports.known_hosts import Known, Verdict
from console.transports.ssh_target import Target

KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_COUNT_MAX = 3
ATTEMPTS = 5
FIRST_DELAY_S = 0.25
"""A server over its MaxStartups drops a connection at once; a few jittered tries get in."""
SLOT_HELD_S = 3.0

Identity = asyncssh.SSHKey | tuple[asyncssh.SSHKey, asyncssh.SSHCertificate]


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
) -> asyncssh.SSHClientConnection:
    """Return a connection to ``target``, logged in, its host key checked; at most ``slots`` connect at once.

    Raises: LinkError.
    """
    port = None if target.host_key_alias else target.port
    known = known_hosts.read(target.known_hosts, target.host_key_alias or target.host, port)
    keys, locked = await _load_identities(target, prompts)
    for attempt in range(ATTEMPTS):
        client = _Client()
        try:
            return await _in_a_slot(slots, _connect_once(target, known, keys, client, tunnel))
        except (asyncssh.ConnectionLost, ConnectionResetError, BrokenPipeError) as error:
            if attempt == ATTEMPTS - 1:
                raise NodeUnreachable(
                    f"{_place(target)} dropped {ATTEMPTS} connections before login (over its MaxStartups?)"
                ) from error
        except Exception as error:
            raise _explain(error, target, known, client, locked) from error
        await asyncio.sleep(FIRST_DELAY_S * 2**attempt * (0.5 + gate.random()))
    raise AssertionError("unreachable")


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
    known: Known,
    keys: list[Identity],
    client: _Client,
    tunnel: asyncssh.SSHClientConnection | None,
) -> asyncssh.SSHClientConnection:
    # Named identities that could be read are tried alone; otherwise an ssh-agent may know better.
    use_agent = target.agent_socket is not None and not (target.named_identities and keys)
    connection = asyncssh.connect(
        target.host,
        target.port,
        tunnel=tunnel or (),
        config=None,
        client_factory=lambda: client,
        username=target.user,
        # Where no certificates are in play a revoked key is merely not trusted, so that `_Client` sees it.
        known_hosts=lambda host, addr, port: (
            [key for key in known.keys if key not in known.revoked],
            known.authorities,
            known.revoked if known.authorities else (),
        ),
        host_key_alias=target.host_key_alias,
        server_host_key_algs=known.algorithms(),
        x509_trusted_certs=None,
        preferred_auth="publickey",
        client_keys=keys,
        password=None,
        gss_host=None,
        agent_path=target.agent_socket if use_agent else None,
        agent_forwarding=False,
        keepalive_interval=KEEPALIVE_INTERVAL_S,
        keepalive_count_max=KEEPALIVE_COUNT_MAX,
        connect_timeout=None,
        login_timeout=0,
    )
    return await bounded(connection, target.connect_timeout_s)


def _explain(error: Exception, target: Target, known: Known, client: _Client, locked: list[Path]) -> LinkError:
    place = _place(target)
    if isinstance(error, LinkError):
        return error
    if isinstance(error, (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed)):
        return _explain_host_key(error, target, known, client)
    if isinstance(error, asyncssh.PermissionDenied):
        tried = ", ".join(str(path) for path in target.identities if path not in locked) or "no key"
        hint = f"; {', '.join(map(str, locked))} is encrypted: add it to ssh-agent" if locked else ""
        return AuthenticationFailed(f"{place} did not let {target.user} in with {tried}{hint}")
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


def _explain_host_key(error: asyncssh.Error, target: Target, known: Known, client: _Client) -> LinkError:
    name, port = target.host_key_alias or target.host, target.port
    key = client.shown
    if key is None and isinstance(error, asyncssh.HostKeyNotVerifiable):
        return HostKeyChanged(name, port, "", clean(f"can't be trusted ({error.reason.partition(' for host')[0]})"))
    if key is None:
        return NodeUnreachable(clean(f"{_place(target)}: {error.reason}"))
    fingerprint = key.get_fingerprint("sha256")
    verdict = known.judge(key)
    if verdict is Verdict.CHANGED:
        return HostKeyChanged(name, port, fingerprint, "has changed")
    if verdict is Verdict.REVOKED:
        return HostKeyChanged(name, port, fingerprint, "is revoked")
    if verdict is Verdict.NOT_CERTIFIED:
        return HostKeyChanged(name, port, fingerprint, "is not signed by the authority that known_hosts names")
    entry_port = None if target.host_key_alias else port
    return HostKeyUnknown(name, port, fingerprint, known_hosts.entry_line(name, entry_port, key), target.append_to)


async def _load_identities(target: Target, prompts: Prompts | None) -> tuple[list[Identity], list[Path]]:
    """Return the private keys that could be read, and the files that are encrypted and stay so."""
    keys: list[Identity] = []
    locked: list[Path] = []
    for path in target.identities:
        key = await _load_identity(path, target, prompts)
        if key is None:
            locked.append(path)
        else:
            keys.append(key)
    if locked and target.named_identities and not keys and target.agent_socket is None:
        raise AuthenticationFailed(f"{target.label}: {locked[0]} is encrypted and there is no ssh-agent: add it to one")
    return keys, locked


async def _load_identity(path: Path, target: Target, prompts: Prompts | None) -> Identity | None:
    try:
        try:
            key = await asyncio.to_thread(asyncssh.read_private_key, path)
        except asyncssh.KeyImportError as error:
            if "assphrase" not in str(error):
                raise
            passphrase = await prompts.passphrase(target.label, str(path)) if prompts else None
            if passphrase is None:
                return None
            key = await asyncio.to_thread(asyncssh.read_private_key, path, passphrase)
        certificate = path.with_name(f"{path.name}-cert.pub")
        return (key, asyncssh.read_certificate(certificate)) if certificate.is_file() else key
    except asyncssh.KeyEncryptionError as error:
        raise AuthenticationFailed(f"{target.label}: {path}: the passphrase is wrong") from error
    except OSError as error:
        raise NodeMisconfigured(f"{target.label}: {path}: {error.strerror}") from error
    except ValueError as error:
        raise NodeMisconfigured(clean(f"{target.label}: {path} is not a private key: {error}")) from error


def _place(target: Target) -> str:
    where = f"{target.host} port {target.port}"
    return where if target.label == target.host else f"{target.label} ({where})"
