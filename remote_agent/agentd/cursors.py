"""How far each subscriber has come, kept across restarts. A subscriber is a history database, not a connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from remote_agent.agentd.files import read_json, write_whole
from remote_agent.errors import RefusedError
from remote_agent.protocol.codec import DecodeError, decode, encode

REMEMBERED_S = 7 * 24 * 3600
MAX_SUBSCRIBERS = 64
MAX_NAME = 128


@dataclass(frozen=True)
class Cursor:
    """``seq``: the highest contiguous event the subscriber has stored."""

    seq: int
    seen_wall_ns: int


@dataclass(frozen=True)
class _File:
    journal_uuid: str
    subscribers: Mapping[str, Cursor]


class Cursors:
    """The subscribers of one journal. Changes are kept by `save`, at most a second behind."""

    def __init__(self, path: Path, journal_uuid: str) -> None:
        self._path, self._journal_uuid = path, journal_uuid
        self._cursors: dict[str, Cursor] = {}
        self.changed = False
        try:
            content = decode(_File, read_json(path) or {})
        except DecodeError:
            return  # subscribers say where they are when they come back
        if content.journal_uuid == journal_uuid:
            self._cursors = dict(content.subscribers)

    @property
    def highest(self) -> int:
        """The highest seq that anyone has acknowledged."""
        return max((cursor.seq for cursor in self._cursors.values()), default=0)

    def lowest_recent(self, now_wall_ns: int) -> int | None:
        """Return what every subscriber of the last seven days has; None where there is none."""
        oldest_ns = now_wall_ns - REMEMBERED_S * 10**9
        return min((c.seq for c in self._cursors.values() if c.seen_wall_ns >= oldest_ns), default=None)

    def subscribe(self, name: str, seq: int, now_wall_ns: int) -> None:
        """Note where a subscriber says it is. Raises: RefusedError for a name over the limit."""
        if len(name) > MAX_NAME:
            raise RefusedError("bad_subscriber", f"a subscriber's name has at most {MAX_NAME} characters")
        if name not in self._cursors and len(self._cursors) >= MAX_SUBSCRIBERS:
            del self._cursors[min(self._cursors, key=lambda known: self._cursors[known].seen_wall_ns)]
        self._cursors[name] = Cursor(seq, now_wall_ns)
        self.changed = True

    def ack(self, name: str, seq: int, now_wall_ns: int) -> None:
        """Note that a subscriber has stored everything up to ``seq``; a cursor never goes back by this.

        Raises: RefusedError for a subscriber that never subscribed.
        """
        known = self._cursors.get(name)
        if known is None:
            raise RefusedError("unknown_subscriber", f"no such subscriber: {name[:MAX_NAME]}")
        self._cursors[name] = Cursor(max(known.seq, seq), now_wall_ns)
        self.changed = True

    def touch(self, name: str, now_wall_ns: int) -> None:
        """Note that a subscriber is still connected."""
        if name in self._cursors:
            self._cursors[name] = replace(self._cursors[name], seen_wall_ns=now_wall_ns)
            self.changed = True

    def save(self) -> None:
        """Write the cursors, whole or not at all. Raises: OSError; what was there stays then."""
        write_whole(self._path, encode(_File(self._journal_uuid, self._cursors)))
        self.changed = False
