"""What the keeper and agentd need of Unix sockets."""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import NamedTuple

from remote_agent.agentd.paths import socket_address

SO_PEERGROUPS = 59
"""Linux 4.13; ``socket`` has no name for it."""

GROUPS_LIMIT_BYTES = 1024
"""What ``socket`` takes at most: 256 groups."""


class Peer(NamedTuple):
    """Who is at the other end. ``pid`` is 0 where it lives in a pid namespace that can't be seen from here."""

    pid: int
    uid: int
    gid: int


def listen(directory: int, name: str) -> socket.socket:
    """Return a listening socket in the private directory, in place of one that a dead process left.

    The caller holds the lock that makes it the only one here.
    """
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_address(directory, name))
    listener.listen(64)
    return listener


def receive(link: socket.socket, limit_bytes: int, limit_descriptors: int) -> tuple[bytes, list[int], bool]:
    """Return what came with its descriptors, and whether the kernel had to leave some of those out.

    Unlike `socket.recv_fds`, which drops its flags, no program that is started later inherits one. Raises: OSError
    """
    came = array.array("i")
    space = socket.CMSG_SPACE(limit_descriptors * came.itemsize)
    data, ancillary, flags, _ = link.recvmsg(limit_bytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            came.frombytes(content[: len(content) - len(content) % came.itemsize])
    return data, list(came), bool(flags & socket.MSG_CTRUNC)


def peer_of(link: socket.socket) -> Peer:
    """Return the process at the other end as it was when it connected."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", credentials))


def peer_uid(link: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    return peer_of(link).uid


def peer_groups(link: socket.socket) -> frozenset[int]:
    """Return every group of the process at the other end; only its first where the kernel does not tell the rest."""
    first = peer_of(link).gid
    try:
        raw = link.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_LIMIT_BYTES)
    except OSError:
        return frozenset((first,))
    return frozenset((first, *struct.unpack(f"{len(raw) // 4}I", raw)))
