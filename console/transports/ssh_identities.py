"""What one login may use: private keys from files, keys of an ssh-agent, certificates. In ssh's order.

An agent's keys that a file names come first, so that a full agent does not use up a
server's tries; then its others, where any may be used; then the files' own. An encrypted
file is opened once a server would take its key.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh

from console.clean import clean
from console.errors import NodeMisconfigured, PromptDeclined
from console.transports.base import CLOSE_TIMEOUT_S, TimedOut, bounded
from console.transports.ssh_keyring import LockedPair, OpenKey
from console.transports.ssh_target import Target

AGENT_TIMEOUT_S = 5.0

KeyPair = asyncssh.SSHKey | tuple[asyncssh.SSHKey, asyncssh.SSHCertificate] | asyncssh.SSHKeyPair


@dataclass
class Identities:
    """``keys`` in the order of their tries; ``locked``: files that are encrypted and stayed so; ``notes``: the rest.

    ``open_key`` opens an encrypted file, None where nobody can be asked. ``opaque``: encrypted files of which
    nobody knows which key they hold; they come after the keys.
    The agent's keys sign through its open socket, which is closed after the login.
    """

    open_key: OpenKey | None
    keys: list[KeyPair] = field(default_factory=list)
    locked: list[Path] = field(default_factory=list)
    opaque: list[Path] = field(default_factory=list)
    certificates: list[asyncssh.SSHCertificate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    agent: asyncssh.SSHAgentClient | None = None

    async def open_next(self) -> list[asyncssh.SSHKeyPair]:
        """Return the pairs of the next file of ``opaque``; none where it stays locked or is of no use."""
        assert self.open_key is not None
        path = self.opaque.pop(0)
        try:
            key = await self.open_key(path)
        except (PromptDeclined, OSError, ValueError) as error:
            self.notes.append(clean(f"{path}: {error}"))
            return []
        return list(asyncssh.load_keypairs(_with_certificates(key, self.certificates)))

    async def __aenter__(self) -> Identities:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.agent is not None:
            self.agent.close()
            try:
                await bounded(self.agent.wait_closed(), CLOSE_TIMEOUT_S)
            except (TimedOut, OSError):
                pass


async def load_identities(target: Target, open_key: OpenKey | None) -> Identities:
    """Return what ``target`` may be logged into with.

    Raises: AuthenticationFailed, NodeMisconfigured for a file that the operator named and that is of no use.
    """
    found = Identities(open_key)
    try:
        await _load(target, found)
    except BaseException:
        await found.__aexit__()
        raise
    return found


async def _load(target: Target, found: Identities) -> None:
    if not target.settings.keys_allowed:
        return
    held = await _ask_agent(target, found)
    certificates = found.certificates = await asyncio.to_thread(_read_certificates, target, found)
    named = [pair for pair in held if any(pair.public_data == one.public_data for one in certificates)]
    own: list[KeyPair] = []
    for path in target.identities:
        public = await asyncio.to_thread(_read_public, path)
        match = next((pair for pair in held if public and pair.key_public_data == public.public_data), None)
        if match is not None:
            named.append(match)
            continue
        key = await _load_file(path, target, found)
        if key is not None:
            own += _with_certificates(key, certificates)
        elif path in found.locked and found.open_key is not None:
            own += _locked(path, public, found.open_key, found)
    # Identities that fleet.toml names and that can be used are tried alone.
    is_limited = target.settings.identities_only or (target.named_identities and bool(named or own))
    others = [] if is_limited else [pair for pair in held if pair not in named]
    found.keys = [key for pair in (*named, *others) for key in _with_certificate(pair, certificates)] + own


def _locked(
    path: Path, public: asyncssh.SSHKey | None, open_key: OpenKey, found: Identities
) -> Sequence[asyncssh.SSHKeyPair]:
    """Return pairs that open their file when they are needed; what can't be told beforehand goes to ``opaque``."""
    found.locked.remove(path)
    if public is None:
        found.opaque.append(path)
        return ()
    own = [one for one in found.certificates if one.key.public_data == public.public_data]
    return [LockedPair(public, certificate, path, open_key) for certificate in (*own, None)]


async def _ask_agent(target: Target, found: Identities) -> Sequence[asyncssh.SSHKeyPair]:
    if target.agent_socket is None:
        return ()
    try:
        found.agent = await bounded(asyncssh.connect_agent(target.agent_socket), AGENT_TIMEOUT_S)
        return await bounded(found.agent.get_keys(), AGENT_TIMEOUT_S)
    except TimedOut:
        found.notes.append(f"the ssh-agent at {target.agent_socket} does not answer")
    except (OSError, ValueError, asyncssh.Error):
        found.notes.append(f"there is no ssh-agent at {target.agent_socket}")
    return ()


async def _load_file(path: Path, target: Target, found: Identities) -> asyncssh.SSHKey | None:
    """Return the private key, None for one that is locked, or is of no use and was not named in fleet.toml."""
    try:
        return await asyncio.to_thread(asyncssh.read_private_key, path)
    except (OSError, ValueError) as error:
        if isinstance(error, asyncssh.KeyImportError) and "assphrase" in str(error):
            found.locked.append(path)
            return None
        what = f"{path}: {error.strerror}" if isinstance(error, OSError) else f"{path} is not a private key: {error}"
        if target.named_identities:
            raise NodeMisconfigured(clean(f"{target.label}: {what}")) from error
        found.notes.append(clean(what))
        return None


def _read_public(path: Path) -> asyncssh.SSHKey | None:
    """Return the public half of an identity, from its file beside it or the file itself; None where there is none."""
    for name in (path.with_name(f"{path.name}.pub"), path):
        try:
            return asyncssh.read_public_key(name)
        except (OSError, ValueError):
            continue
    return None


def _read_certificates(target: Target, found: Identities) -> list[asyncssh.SSHCertificate]:
    """Return the certificates that are named, and those that lie beside an identity under ssh's name for them."""
    certificates = []
    beside = [path.with_name(f"{path.name}-cert.pub") for path in target.identities]
    for path in (*target.certificates, *(path for path in beside if path.is_file())):
        try:
            certificates.append(asyncssh.read_certificate(path))
        except OSError as error:
            found.notes.append(f"{path}: {error.strerror}")
        except ValueError as error:
            raise NodeMisconfigured(clean(f"{target.label}: {path} is not a certificate: {error}")) from error
    return certificates


def _with_certificates(key: asyncssh.SSHKey, certificates: Sequence[asyncssh.SSHCertificate]) -> list[KeyPair]:
    """Return the key with each certificate that is its own; asyncssh tries such a pair with and without it."""
    return [(key, one) for one in certificates if one.key.public_data == key.public_data] or [key]


def _with_certificate(
    pair: asyncssh.SSHKeyPair, certificates: Sequence[asyncssh.SSHCertificate]
) -> list[asyncssh.SSHKeyPair]:
    pairs = []
    for one in certificates:
        if one.key.public_data == pair.key_public_data and not pair.has_cert:
            certified = copy.copy(pair)
            certified.set_certificate(one)
            pairs.append(certified)
    return [*pairs, pair]
