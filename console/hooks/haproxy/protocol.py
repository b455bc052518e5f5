"""What is said to HAProxy's runtime API and what it answers. Pure: text in, frozen objects out.

A command is one line and the answer ends with the connection. A ``set`` that was carried out is answered by an empty
line and nothing else; an answer cut short is none. What a server is, comes from one question with four parts, so that
all of it is of one process. Formats: HAProxy's management guide, 9.1 (CSV) and 9.3 (``show servers state``).
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
_WEIGHT = re.compile(r"(\d{1,3})(%?)")
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


def look_command(server: str) -> str:
    """Ask for a server, and for the process that answers and what it lets us do."""
    backend = server.partition("/")[0]
    return f"show cli level;show info;show servers state {backend};show stat {backend} 4 -1"


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
        raise HookRetry(f"the answer ends in the middle, after {len(reply)} bytes: HAProxy ended or was reloaded")


def check_changed(reply: bytes, command: str) -> None:
    """Raises: HookFailed with HAProxy's words unless a change was carried out; HookRetry if that can't be known."""
    check_whole(reply)
    if reply.strip():
        raise HookFailed(f"HAProxy refuses `{command}`: {_words(reply)}")


def parse_look(reply: bytes, server: str) -> Server:
    """Return what `look_command` was answered.

    Raises: HookFailed where HAProxy refuses, has no such backend or server, or lets us change nothing; HookRetry where
    the answer is cut short.
    """
    check_whole(reply)
    parts = reply.decode("utf-8", "replace").split("\n\n", 3)
    level = parts[0].strip()
    if level not in ("admin", "operator", "user"):
        raise HookFailed(f"HAProxy answers `show cli level` with: {_words(reply)}")
    if level != "admin":
        raise HookFailed(
            f"this socket has the level {level}: `stats socket … level admin` is needed to change a server"
        )
    if len(parts) > 2 and not parts[2].startswith("1\n"):
        raise HookFailed(f"HAProxy says: {_words(parts[2])}")
    if len(parts) < 4 or not parts[3].endswith("\n\n"):
        raise HookRetry(f"the answer ends in the middle, after {len(reply)} bytes: HAProxy ended or was reloaded")
    _, info, state, stat = parts
    row = {**_state_row(state, server), **_stat_row(stat, server)}
    try:
        return _server(_number(_fields(info), "Pid"), row)
    except KeyError as error:
        raise HookFailed(f"HAProxy says nothing of {error.args[0]}: is this its admin socket?") from None
    except ValueError as error:
        raise HookFailed(f"HAProxy answers what can't be read: {clean(str(error), 200)}") from None


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
        status=clean(row["status"], 80),
        sessions=_number(row, "scur"),
        queued=_number(row, "qcur"),
        errors=sum(_number(row, name) for name in _ERRORS),
        is_checked=has_check or has_agent or bool(row["tracked"]),
        has_agent=has_agent,
    )


def _fields(info: str) -> dict[str, str]:
    pairs = (line.partition(": ") for line in info.splitlines())
    return {name: value for name, _, value in pairs}


def _state_row(text: str, server: str) -> dict[str, str]:
    """Return the server's line of ``show servers state``, format 1, by the names in its header."""
    _, header, *lines = text.split("\n")
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
    return int(row[name] or 0)


def _words(text: str | bytes) -> str:
    said = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return clean(said.strip(), 300) or "nothing"
