"""Asks a keeper: a line out, a line and perhaps descriptors back. Blocking, with a deadline; standard library alone."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from remote_agent.agentd.paths import KEEPER_SOCKET_NAME, StateDir, socket_address
from remote_agent.errors import KeeperError, KeeperGoneError, KeeperRefusedError, StateDirError
from remote_agent.keeper.holdings import DESCRIPTORS_MAX
from remote_agent.keeper.sockets import receive

PATIENCE_S = 2
READ_BYTES = 1 << 16
LIST_LIMIT_BYTES = 1 << 20

CARRYING = ("show", "get")
"""Words whose answer counts the descriptors that come with it."""


@dataclass(frozen=True)
class Listed:
    """A resident as ``list`` has it."""

    name: str
    descriptors: int
    attached: tuple[int, ...]


@dataclass
class Reply:
    """What a keeper answered. ``lines`` follow the first; descriptors are the caller's to close."""

    count: int
    pid: int
    lines: tuple[str, ...] = ()
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class KeeperAddress:
    """Where a keeper listens: a state directory, or the socket it has for other users."""

    def __init__(self, place: StateDir | Path) -> None:
        self._place = place

    def __str__(self) -> str:
        return str(self._place.run / KEEPER_SOCKET_NAME if isinstance(self._place, StateDir) else self._place)

    def connect(self) -> socket.socket:
        """Return a connection. Raises: KeeperGoneError where nobody listens; KeeperError, StateDirError"""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The kernel's own deadline: with Python's, a listener that is busy refuses instead of letting us wait.
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE_S, 0))
            if isinstance(self._place, StateDir):
                directory = self._place.open_run()
                try:
                    link.connect(socket_address(directory, KEEPER_SOCKET_NAME))
                finally:
                    os.close(directory)
            else:
                link.connect(str(self._place))
            link.settimeout(PATIENCE_S)
        except BaseException as error:
            link.close()
            why = error.__cause__ if isinstance(error, StateDirError) else error  # no directory, no keeper in it
            if isinstance(why, (FileNotFoundError, ConnectionRefusedError)):
                raise KeeperGoneError(f"no keeper listens at {self}") from error
            if isinstance(error, OSError):
                raise KeeperError(f"the keeper at {self} can't be reached: {error}") from error
            raise
        return link


def ask(address: KeeperAddress, line: str, descriptors: Sequence[int] = ()) -> Reply:
    """Return what a keeper answers to one line. Raises: KeeperError of the kind that fits"""
    with address.connect() as link:
        return converse(link, line, descriptors)


def lease(
    address: KeeperAddress, name: str, meanwhile: Callable[[], None] = lambda: None
) -> tuple[socket.socket, Reply]:
    """Return the connection that keeps ``name`` attached for as long as it is open, and its descriptors.

    ``meanwhile`` is done while the keeper looks for them. Raises: KeeperGoneError, KeeperError, and what that does
    """
    link = address.connect()
    try:
        return link, converse(link, f"get {name}", meanwhile=meanwhile)
    except BaseException:
        link.close()
        raise


def list_residents(address: KeeperAddress) -> tuple[Listed, ...]:
    """Return every resident a keeper holds. Raises: KeeperGoneError, KeeperError"""
    reply = ask(address, "list")
    try:
        words = [line.split() for line in reply.lines]
        return tuple(Listed(name, int(count), tuple(map(int, pids))) for name, count, *pids in words)
    except ValueError as error:
        raise KeeperError(f"the keeper at {address} answers what is no list") from error
    finally:
        reply.close()


def converse(
    link: socket.socket, line: str, descriptors: Sequence[int] = (), meanwhile: Callable[[], None] = lambda: None
) -> Reply:
    """Say one line on a fresh connection, do something meanwhile, and return the answer.

    Raises: KeeperGoneError, KeeperError, and what ``meanwhile`` does
    """
    text, taken = b"", list[int]()
    try:
        _say(link, line.encode("ascii") + b"\n", descriptors)
        meanwhile()
        while not _is_whole(line, text):
            data, came, is_cut = receive(link, READ_BYTES, DESCRIPTORS_MAX)
            taken += came
            text += data
            if is_cut:  # not the keeper's fault, nor the resident's
                raise KeeperError("the keeper's descriptors do not fit: this process has too many files open")
            if not data:
                raise KeeperGoneError("the keeper closed the connection")
            if len(text) > LIST_LIMIT_BYTES:
                raise KeeperError("the keeper's answer has no end")
        return _read_reply(line, text, taken)
    except BaseException as error:
        for descriptor in taken:
            os.close(descriptor)
        if isinstance(error, (ConnectionResetError, BrokenPipeError)):
            raise KeeperGoneError("the keeper closed the connection") from error
        if isinstance(error, OSError):
            raise KeeperError(f"the keeper does not answer: {error}") from error
        raise


def _say(link: socket.socket, line: bytes, descriptors: Sequence[int]) -> None:
    """Send a line; a keeper that refused before it heard one has answered already, and that answer is read."""
    try:
        if descriptors:
            socket.send_fds(link, [line], list(descriptors))
        else:
            link.sendall(line)
    except BrokenPipeError:
        pass


def _is_whole(line: str, text: bytes) -> bool:
    """Whether the first line is there, and for ``list`` as many more as it announces."""
    first, newline, rest = text.partition(b"\n")
    words = first.split()
    announced = int(words[1]) if line == "list" and words[:1] == [b"ok"] and words[1:2] and words[1].isdigit() else 0
    return bool(newline) and rest.count(b"\n") >= announced


def _read_reply(line: str, text: bytes, descriptors: list[int]) -> Reply:
    first, *lines = text.decode("ascii", "replace").splitlines()
    words = first.split()
    if words[:1] == ["error"]:
        raise KeeperRefusedError(first.partition(" ")[2])
    if len(words) != 3 or words[0] != "ok" or not (words[1] + words[2]).isdigit():
        raise KeeperError(f"the keeper answers {line.split()[0]} with {first[:80]!r}")
    if line.split()[0] in CARRYING and len(descriptors) != int(words[1]):
        raise KeeperError(f"the keeper answers {line.split()[0]} with {len(descriptors)} of {words[1]} descriptors")
    return Reply(int(words[1]), int(words[2]), tuple(lines), descriptors)


def tell_keeper(state: StateDir, word: str) -> str | None:
    """Return a keeper's answer to one word as it said it, or None where none answers. Raises: StateDirError"""
    try:
        reply = ask(KeeperAddress(state), word)
    except KeeperRefusedError as refusal:
        return f"error {refusal}"
    except KeeperError:
        return None
    return f"ok {reply.count} {reply.pid}"
