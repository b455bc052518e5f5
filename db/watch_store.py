"""Leases on nodes that are kept warm: one process at a time watches a node for a recipe."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from db.errors import WatchHeldError
from db.lease_store import LEASE_S, NS_PER_S, LeaseStore

_TAKE = (
    "INSERT INTO watches (node, recipe, tier, holder, actor_user, actor_host, since_ns, expires_ns)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (node, recipe) DO UPDATE SET tier = excluded.tier,"
    " actor_user = excluded.actor_user, actor_host = excluded.actor_host, expires_ns = excluded.expires_ns,"
    " since_ns = CASE WHEN holder = excluded.holder THEN since_ns ELSE excluded.since_ns END, holder = excluded.holder"
)


@dataclass(frozen=True)
class WatchRow:
    """Who watches a node for a recipe, and until when unless it is renewed. Times in nanoseconds of wall time."""

    node: str
    recipe: str
    tier: str
    holder: str
    actor_user: str
    actor_host: str
    since_ns: int
    expires_ns: int

    @property
    def who(self) -> str:
        return f"{self.actor_user}@{self.actor_host} ({self.holder})"


class WatchStore(LeaseStore):
    """The leases of one watch. What ran out is free for whoever comes first."""

    def __init__(
        self,
        path: Path,
        holder: str,
        watched: tuple[str, str],
        actor: tuple[str, str],
        lease_s: float = LEASE_S,
        clock_ns: Callable[[], int] | None = None,
    ) -> None:
        """``watched``: recipe and tier. ``actor``: user and host."""
        super().__init__(path, holder, lease_s, *([clock_ns] if clock_ns else []))
        self._recipe, self._tier = watched
        self._actor = actor

    def take(self, nodes: Sequence[str]) -> None:
        """Take all of these nodes. Raises: WatchHeldError while another has one of them; then none is taken."""
        self._bound()
        with self._transaction() as (connection, now_ns):
            for row in self._others(connection, nodes, now_ns):
                raise WatchHeldError(row.node, row.recipe, row.who, (row.expires_ns - now_ns) / NS_PER_S)
            self._put(connection, nodes, now_ns)

    def keep(self, nodes: Sequence[str]) -> tuple[WatchRow, ...]:
        """Renew what is still ours or free, and return the rest: who has it by now."""
        self._bound()
        with self._transaction() as (connection, now_ns):
            lost = self._others(connection, nodes, now_ns)
            self._put(connection, set(nodes) - {row.node for row in lost}, now_ns)
            return lost

    def give_back(self, nodes: Iterable[str]) -> None:
        """Let the next one have these nodes at once; nothing of what is another's."""
        with self._transaction() as (connection, _):
            connection.executemany(
                "DELETE FROM watches WHERE node = ? AND recipe = ? AND holder = ?",
                [(node, self._recipe, self.holder) for node in nodes],
            )

    def _bound(self) -> None:
        """Let leases end within their whole time from now: a clock that was set back would keep a dead watch's."""
        with self._transaction() as (connection, now_ns):
            connection.execute(
                "UPDATE watches SET expires_ns = ? WHERE recipe = ? AND expires_ns > ?",
                (self._until(now_ns), self._recipe, self._until(now_ns)),
            )

    def _others(self, connection: sqlite3.Connection, nodes: Sequence[str], now_ns: int) -> tuple[WatchRow, ...]:
        rows = connection.execute(
            "SELECT * FROM watches WHERE recipe = ? AND holder != ? AND expires_ns > ? ORDER BY node",
            (self._recipe, self.holder, now_ns),
        )
        return tuple(WatchRow(**dict(row)) for row in rows if row["node"] in nodes)

    def _put(self, connection: sqlite3.Connection, nodes: Iterable[str], now_ns: int) -> None:
        until_ns = self._until(now_ns)
        connection.executemany(
            _TAKE,
            [(node, self._recipe, self._tier, self.holder, *self._actor, now_ns, until_ns) for node in sorted(nodes)],
        )
