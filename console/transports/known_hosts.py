"""Which host keys are known. An unknown key, a changed one and a revoked one are three different things.

asyncssh says the same for all of them, so the files are looked up here. As in
OpenSSH, an entry without a port also vouches for a host on another port, but a
different key under the plain name says nothing about that port.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from console.clean import clean
from console.errors import NodeMisconfigured

SSH_PORT = 22


class Verdict(enum.Enum):
    """What is known of a host key that was not accepted."""

    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"
    NOT_CERTIFIED = "not certified"


@dataclass(frozen=True)
class Known:
    """What the files say of one host. ``exact``: its own entries, for this very port."""

    keys: tuple[asyncssh.SSHKey, ...] = ()
    authorities: tuple[asyncssh.SSHKey, ...] = ()
    revoked: tuple[asyncssh.SSHKey, ...] = ()
    exact: tuple[asyncssh.SSHKey, ...] = ()

    def judge(self, key: asyncssh.SSHKey) -> Verdict:
        """Say what a key that did not pass is."""
        if key in self.revoked:
            return Verdict.REVOKED
        if self.exact:
            return Verdict.CHANGED
        return Verdict.NOT_CERTIFIED if self.authorities else Verdict.UNKNOWN

    def algorithms(self) -> list[str]:
        """Return the host key algorithms to offer, those of the known keys first."""
        known = {algorithm.decode() for key in self.keys for algorithm in key.sig_algorithms}
        plain = sorted(_ALGORITHMS, key=lambda name: name not in known)
        certified = [f"{name}-cert-v01@openssh.com" for name in _ALGORITHMS] if self.authorities else []
        return certified + plain


_REVOCATION_LIST = b"SSHKRL\n\0"
_ALGORITHMS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)


def read(files: Iterable[Path], host: str, port: int | None) -> Known:
    """Return what ``files`` say of ``host``; ``port`` None for a name that stands for any port (an alias).

    Names are alike whatever their case. A missing file is an empty one.

    Raises: NodeMisconfigured naming the file and line that can't be read.
    """
    entries, host = asyncssh.SSHKnownHosts(), host.lower()
    for path in files:
        _load(entries, path)
    keys, authorities, revoked = entries.match(entry_name(host, port), "", None)[:3]
    exact = tuple(keys)
    if entry_name(host, port) != host:
        plain = entries.match(host, "", None)
        keys, authorities, revoked = [*keys, *plain[0]], [*authorities, *plain[1]], [*revoked, *plain[2]]
    return Known(tuple(keys), tuple(authorities), tuple(revoked), exact)


def read_revoked(path: Path) -> tuple[asyncssh.SSHKey, ...]:
    """Return the public keys of a RevokedHostKeys file of that form, one a line.

    Raises: NodeMisconfigured if it can't be read as a whole, where ssh would take no key either.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NodeMisconfigured(f"RevokedHostKeys {path}: {error.strerror}") from error
    if data.startswith(_REVOCATION_LIST):
        raise NodeMisconfigured(
            f"RevokedHostKeys {path} is a binary revocation list; a list of public keys is followed"
        )
    keys = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip() and not line.lstrip().startswith(b"#"):
            try:
                keys.append(asyncssh.import_public_key(line))
            except ValueError as error:
                raise NodeMisconfigured(clean(f"RevokedHostKeys {path}:{number}: {error}")) from error
    return tuple(keys)


def rsa_bits(key: asyncssh.SSHKey) -> int | None:
    """Return an RSA key's size, None for a key of another kind."""
    return int(key.pyca_key.key_size) if key.algorithm == b"ssh-rsa" else None  # type: ignore[union-attr]


def entry_name(host: str, port: int | None) -> str:
    """Return the name a known_hosts line has for ``host``."""
    return host if port in (None, SSH_PORT) else f"[{host}]:{port}"


def entry_line(host: str, port: int | None, key: asyncssh.SSHKey, *, hashed: bool = False) -> str:
    """Return the known_hosts line for ``key``, without a line break; ``hashed``: its name as HashKnownHosts has it."""
    algorithm, data = key.export_public_key().decode().split()[:2]
    name = entry_name(host.lower() if hashed else host, port)
    return f"{_hashed(name) if hashed else name} {algorithm} {data}"


def _hashed(name: str) -> str:
    salt = os.urandom(20)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def kind_of(key: asyncssh.SSHKey) -> str:
    """Return a key's kind as ssh names it: ``ED25519``."""
    name = key.get_algorithm().removeprefix("ssh-").removeprefix("sk-ssh-").partition("@")[0]
    return "ECDSA" if "ecdsa" in name else name.upper()


def describe_entries(files: Iterable[Path], host: str, port: int | None) -> tuple[str, ...]:
    """Return a text for each line about ``host``, ``ED25519 SHA256:… in FILE:LINE``. For people, after `read`."""
    found = []
    names = {entry_name(host.lower(), port), host.lower()}
    for path in files:
        for number, line in enumerate(_text(path).split("\n"), 1):
            entry = asyncssh.SSHKnownHosts()
            try:
                entry.load(_in_lower_case(line))
            except ValueError:
                continue
            for name in names:
                keys, authorities, revoked = entry.match(name, "", None)[:3]
                marked = (*((key, "") for key in keys), *((key, "@cert-authority ") for key in authorities))
                for key, marker in (*marked, *((key, "@revoked ") for key in revoked)):
                    found.append(f"{marker}{kind_of(key)} {key.get_fingerprint('sha256')} in {path}:{number}")
    return tuple(dict.fromkeys(found))


def append(path: Path, line: str) -> None:
    """Add one line to a known_hosts file, making it (0600, its directory 0700) where there is none.

    Only for a key that a person has confirmed by typing, or whose taking ssh's configuration asks for.

    Raises: NodeMisconfigured if the file can't be written.
    """
    if "\n" in line or not line.strip():
        raise ValueError("a known_hosts entry is one line")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - 1))
            joint = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(joint + line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise NodeMisconfigured(f"{path}: {error.strerror}") from error


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise NodeMisconfigured(f"{path}: {error.strerror}") from error


def _load(entries: asyncssh.SSHKnownHosts, path: Path) -> None:
    for number, line in enumerate(_text(path).split("\n"), 1):
        try:
            _refuse_empty_names(line)
            entries.load(_in_lower_case(line))
        except ValueError as error:
            raise NodeMisconfigured(clean(f"{path}:{number}: {error}")) from error


def _in_lower_case(line: str) -> str:
    """Return the line with its names as ssh compares them; a hash is one of lower case already."""
    match = re.match(r"\s*(?:@\S+\s+)?([^#|@\s]\S*)", line)
    return line if match is None else line[: match.start(1)] + match[1].lower() + line[match.end(1) :]


def _refuse_empty_names(line: str) -> None:
    """An empty name in a list ("host1, ssh-ed25519 …") would stand for every host."""
    words = [word for word in line.split()[:2] if not word.startswith("@")]
    if words and not words[0].startswith("#") and "" in words[0].split(","):
        raise ValueError(f"an empty host name in {words[0]!r}")
