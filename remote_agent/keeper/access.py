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

from remote_agent.keeper.sockets import peer_groups, peer_of
from remote_agent.keeper.words import FOR_OTHERS

SOCKET_NAME = "attach.sock"
FILE_LIMIT_BYTES = 1 << 16
_ID = re.compile(r"[0-9]{1,10}")


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
        if word in numbers and _ID.fullmatch(value):
            numbers[word].add(int(value))
        elif word == "directory" and value.startswith("/"):
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


def bind_for_others(directory: Path) -> socket.socket:
    """Return a listening socket that any user who can enter ``directory`` can reach; who may speak is asked later.

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
        if path.is_socket() and path.lstat().st_uid == os.geteuid():
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o666)
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
    except (OSError, ValueError) as error:  # a zero byte, or what the locale can't write
        raise AccessError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return listener
