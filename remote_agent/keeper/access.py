"""Which other users may attach, and where: the file ``attach.allow`` in the state directory.

One entry a line, ``#`` begins a comment::

    directory /run/glowplug     # holds the socket attach.sock; those users must be able to enter it
    uid 1001
    gid 2000                    # a user's first or further group

The control socket stays in its private directory whatever stands here. The file is read again for each
client, so that a change counts at once; a line that can't be read lets nobody in.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from remote_agent.agentd.daemon import identity
from remote_agent.keeper.sockets import peer_groups, peer_of
from remote_agent.keeper.words import FOR_OTHERS

SOCKET_NAME = "attach.sock"
FILE_LIMIT_BYTES = 1 << 16
_NUMBER = re.compile(r"[0-9]{1,10}")


class AccessError(Exception):
    """The file or its directory can't be used; one line says why."""


class Access(NamedTuple):
    """What the file says."""

    directory: Path | None = None
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()


def read_access(path: Path) -> Access:
    """Return what ``path`` says; without a file nobody else is let in. Raises: AccessError"""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
                raise AccessError(f"{path}: must be written by its owner alone")
            lines = file.read(FILE_LIMIT_BYTES).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return Access()
    except OSError as error:
        raise AccessError(f"{path}: can't be read: {error.strerror}") from error
    directory: Path | None = None
    numbers: dict[str, set[int]] = {"uid": set(), "gid": set()}
    for number, line in enumerate(lines, 1):
        word, _, value = line.partition("#")[0].strip().partition(" ")
        value = value.strip()
        if word in numbers and _NUMBER.fullmatch(value):
            numbers[word].add(int(value))
        elif word == "directory" and value.startswith("/") and "\0" not in value:
            directory = Path(value)
        elif word:
            raise AccessError(f"{path}, line {number}: {line[:80]!r} is not 'directory /PATH', 'uid N' or 'gid N'")
    return Access(directory, frozenset(numbers["uid"]), frozenset(numbers["gid"]))


def admit_attacher(path: Path, link: socket.socket) -> frozenset[str]:
    """Return the words that a client of the second socket may say."""
    try:
        access = read_access(path)
    except AccessError:
        access = Access()  # `AttachSocket` says why
    peer = peer_of(link)
    is_allowed = peer.uid in {0, os.geteuid()} | access.uids or not access.gids.isdisjoint(peer_groups(link))
    return FOR_OTHERS if is_allowed else frozenset()


def bind_for_others(directory: Path) -> tuple[socket.socket, tuple[int, int] | None]:
    """Return a listening socket that any user who can enter ``directory`` can reach, and which one it is there.

    Who may speak is asked later.

    Raises: AccessError, also where somebody else could put a socket of theirs in its place.
    """
    path = directory / SOCKET_NAME
    try:
        found = directory.stat()
        is_sticky = bool(found.st_mode & stat.S_ISVTX)
        if not stat.S_ISDIR(found.st_mode):
            raise AccessError(f"{directory}: is no directory")
        if found.st_uid not in (0, os.geteuid()) or (found.st_mode & 0o022 and not is_sticky):
            raise AccessError(f"{directory}: others could replace the socket in it")
        if os.path.lexists(path) and not (path.is_socket() and path.lstat().st_uid == os.geteuid()):
            raise AccessError(f"{path}: is there already, and is no socket of this user's")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        hidden = directory / f".{SOCKET_NAME}.{os.getpid()}"  # who sees the name can connect
        try:
            hidden.unlink(missing_ok=True)
            listener.bind(str(hidden))
            hidden.chmod(0o666)
            listener.listen(64)
            bound = identity(hidden)  # before anybody could put another in its place
            hidden.rename(path)
        except BaseException:
            listener.close()
            hidden.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:  # ValueError: a name that this process's locale can't express
        raise _cannot(path, error) from error
    return listener, bound


def socket_identity(directory: Path) -> tuple[int, int] | None:
    """Return which socket lies in ``directory``, None where there is none. Raises: AccessError"""
    try:
        return identity(directory / SOCKET_NAME)
    except OSError as error:
        raise _cannot(directory / SOCKET_NAME, error) from error


def remove_socket(directory: Path) -> None:
    """Take the socket out of ``directory``. Raises: AccessError"""
    try:
        (directory / SOCKET_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise _cannot(directory / SOCKET_NAME, error) from error


def _cannot(path: Path, error: OSError | ValueError) -> AccessError:
    return AccessError(f"{path}: {getattr(error, 'strerror', None) or error}")
