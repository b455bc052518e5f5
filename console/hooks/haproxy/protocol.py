"""What is said to HAProxy's runtime API and what it answers. Pure: text in, frozen objects out.

A command is one line and the answer ends with the connection. A ``set`` that was carried out is answered by an empty
line and nothing else; an answer cut short is none. What a server is, comes from one question with several parts, so
that all of it is of one process. Formats: HAProxy's management guide, 9.1 (CSV) and 9.3 (``show servers state``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from console.clean import clean
from console.errors import HookFailed, HookRetry
from console.format import counted

WEIGHT_MOST = 256
_NAME = re.compile(r"[A-Za-z0-9_.:-]+/[A-Za-z0-9_.:-]+")
_WEIGHT = re.compile(r"([0-9]{1,3})(%?)")
_MAINT, _DRAIN = 0x01, 0x08  # forced by an administrator; what is inherited or resolved has other bits
_CHECK_ENABLED = 0x04
_ERRORS = ("econ", "eresp", "hrsp_5xx")
"""One failed request grows one of them: no connection, no whole answer, an answer of 500 and above."""


class State(str, Enum):
    """What an administrator wants of a server; ``ready`` is no statement about its health."""

    READY = "ready"
    DRAIN = "drain"
    MAINT = "maint"


@dataclass(frozen=True)
class Weight:
    """``50%`` of the weight that haproxy.cfg gives a server, or ``50`` as it is."""

    number: int
    is_relative: bool

    def __str__(self) -> str:
        return f"{self.number}%" if self.is_relative else str(self.number)

    def of(self, configured: int) -> int:
        """Return the weight that HAProxy makes of it: rounded down, at most 256."""
        return min(WEIGHT_MOST, configured * self.number // 100) if self.is_relative else self.number


@dataclass(frozen=True)
class Server:
    """One server of one process. ``status`` is HAProxy's own word, cleaned: ``UP``, ``UP 1/2``, ``no check``.

    ``errors`` counts since the process started. ``is_checked``: something says whether it is up, be it a health check,
    its agent or the server that it tracks.
    """

    pid: int
    state: State
    weight: int
    configured_weight: int
    status: str
    sessions: int
    queued: int
    errors: int
    is_checked: bool
    has_agent: bool

    def __str__(self) -> str:
        waiting = f" and {self.queued} queued" if self.queued else ""
        busy = f"{counted(self.sessions, 'session')}{waiting}"
        return f"{self.state.value}, weight {self.weight}, {self.status}, {busy}"


def is_server_name(text: str) -> bool:
    """Return whether it reads BACKEND/SERVER; nothing else may stand in a command."""
    return _NAME.fullmatch(text) is not None


def parse_weight(text: str) -> Weight | None:
    """Return None for what is no weight that lets traffic through: 1..256, or 1%..100%."""
    match = _WEIGHT.fullmatch(text)
    if match is None:
        return None
    weight = Weight(int(match[1]), bool(match[2]))
    return weight if 1 <= weight.number <= (100 if weight.is_relative else WEIGHT_MOST) else None


def find_command(server: str) -> str:
    """Ask what the socket lets us do, and for the numbers of a server."""
    return f"show cli level;show servers state {_backend(server)}"


def look_command(server: str, numbers: tuple[int, int]) -> str:
    """Ask for the process that answers, and for a server.

    By ``numbers``, since ``show stat`` takes the name of a backend for that of a frontend called the same.
    """
    proxy, number = numbers
    return f"show info;show servers state {_backend(server)};show stat {proxy} 4 {number}"


def change_command(server: str, change: State | int) -> str:
    """Set a server's state, or its weight."""
    if isinstance(change, State):
        return f"set server {server} state {change.value}"
    return f"set server {server} weight {change}"


def kill_command(server: str) -> str:
    """End every session of a server."""
    return f"shutdown sessions server {server}"


def check_whole(reply: bytes) -> None:
    """Raises: HookRetry unless HAProxy said all that it had to say: its answers end with a line break."""
    if not reply.endswith(b"\n"):
        raise _cut(reply)


def check_changed(reply: bytes, command: str) -> None:
    """Raises: HookFailed with HAProxy's words unless a change was carried out; HookRetry if that can't be known."""
    check_whole(reply)
    if reply.strip():
        raise HookFailed(f"HAProxy refuses `{command}`: {_words(reply)}")


def parse_find(reply: bytes, server: str) -> tuple[int, int]:
    """Return the numbers of a server's proxy and of the server, from what `find_command` was answered.

    Raises: HookFailed where HAProxy refuses, has no such backend or server, or lets us change nothing; HookRetry where
    the answer is cut short.
    """
    check_whole(reply)
    level, _, state = reply.decode("utf-8", "replace").partition("\n\n")
    if level.strip() not in ("admin", "operator", "user"):
        raise HookFailed(f"HAProxy answers `show cli level` with: {_words(reply)}")
    if level.strip() != "admin":
        raise HookFailed(
            f"this socket has the level {level}: `stats socket … level admin` is needed to change a server"
        )
    if not state.endswith("\n\n"):
        raise _cut(reply)
    row = _state_row(state, server)
    return _number(row, "be_id"), _number(row, "srv_id")


def parse_look(reply: bytes, server: str) -> Server:
    """Return what `look_command` was answered. Raises: as `parse_find`."""
    check_whole(reply)
    parts = reply.decode("utf-8", "replace").split("\n\n", 2)
    if len(parts) < 3 or not parts[2].endswith("\n\n"):
        raise _cut(reply)
    info, state, stat = parts
    row = {**_state_row(state, server), **_stat_row(stat, server)}
    return _server(_number(_fields(info), "Pid"), row)


def grown(errors: int, before: int) -> int:
    """Return by how much a counter grew, also where an operator has cleared it meanwhile."""
    return errors - before if errors >= before else errors


def _server(pid: int, row: Mapping[str, str]) -> Server:
    admin = _number(row, "srv_admin_state")
    has_agent = bool(_number(row, "srv_agent_state") & _CHECK_ENABLED)
    has_check = bool(_number(row, "srv_check_state") & _CHECK_ENABLED)
    return Server(
        pid=pid,
        state=State.MAINT if admin & _MAINT else State.DRAIN if admin & _DRAIN else State.READY,
        weight=_number(row, "srv_uweight"),
        configured_weight=_number(row, "srv_iweight"),
        status=clean(row.get("status", ""), 80),
        sessions=_number(row, "scur"),
        queued=_number(row, "qcur"),
        errors=sum(_number(row, name) for name in _ERRORS),
        is_checked=has_check or has_agent or bool(row.get("tracked")),
        has_agent=has_agent,
    )


def _fields(info: str) -> dict[str, str]:
    pairs = (line.partition(": ") for line in info.splitlines())
    return {name: value for name, _, value in pairs}


def _state_row(text: str, server: str) -> dict[str, str]:
    """Return the server's line of ``show servers state``, format 1, by the names in its header."""
    version, _, table = text.partition("\n")
    if version != "1":
        raise HookFailed(f"HAProxy says: {_words(text)}")
    header, *lines = table.split("\n")
    names = header[2:].split()
    for line in lines:
        row = dict(zip(names, line.split(), strict=False))
        if f"{row.get('be_name')}/{row.get('srv_name')}" == server:
            return row
    raise HookFailed("the backend has no such server; one that was added at run time is lost at a reload")


def _stat_row(text: str, server: str) -> dict[str, str]:
    """Return the server's line of ``show stat``."""
    for row in csv.DictReader(text[2:].splitlines(), restval=""):
        if f"{row.get('pxname')}/{row.get('svname')}" == server:
            return {name: value for name, value in row.items() if isinstance(value, str)}
    raise HookRetry("the server has gone while HAProxy answered")


def _number(row: Mapping[str, str], name: str) -> int:
    """Return a figure; HAProxy leaves empty what does not apply, such as 5xx answers in TCP mode."""
    try:
        return int(row[name] or 0)
    except KeyError:
        raise HookFailed(f"HAProxy says nothing of {name}: is this its admin socket?") from None
    except ValueError:
        raise HookFailed(f"HAProxy says {clean(row[name], 80)!r} for {name}, which is no number") from None


def _backend(server: str) -> str:
    return server.partition("/")[0]


def _cut(reply: bytes) -> HookRetry:
    return HookRetry(f"the answer ends in the middle, after {len(reply)} bytes: HAProxy ended or was reloaded")


def _words(text: str | bytes) -> str:
    said = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return clean(said.strip(), 300) or "nothing"
