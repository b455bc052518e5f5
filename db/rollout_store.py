"""Writes rollouts: a turn is stored whole before anything of it is done, and only by whoever holds the lease.

The lease lies in the rollout's own row and is renewed with every turn. It can be taken by another only once it has
expired and is not renewed, and whoever lost it can't store anything more, so it does nothing more.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from db.database import explained
from db.errors import LeaseHeldError, LeaseLostError, RolloutError
from db.lease_store import LEASE_S, NS_PER_S, LeaseStore
from db.rollout_records import CommandRow, Entry, Lease, RolloutNodeRow, RolloutRow, TimelineRow, Turn, Unfinished
from db.rollouts import COMMAND_COLUMNS, TIMELINE_COLUMNS, command_row, find_row, rollout_row

_ADD_ENTRY = (
    "INSERT INTO rollout_timeline (rollout_id, t_wall_ns, kind, what, node, attempt, intent_id, data_json)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_SET_NODE = (
    "INSERT INTO rollout_nodes (rollout_id, ordinal, node, batch, state, reason, attempt, is_out, updated_ns)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (rollout_id, ordinal) DO UPDATE SET state = excluded.state,"
    " reason = excluded.reason, attempt = excluded.attempt, is_out = excluded.is_out, updated_ns = excluded.updated_ns"
)

DOUBT = 0.4
"""Holders renew a lease after a quarter of its time."""


class RolloutStore(LeaseStore):
    """Rollouts, each with a lease of its own.

    ``may_live`` says of a holder's name whether its process may still run; ``sleep`` waits so many seconds.
    """

    def __init__(
        self,
        path: Path,
        holder: str,
        lease_s: float = LEASE_S,
        clock_ns: Callable[[], int] = time.time_ns,
        may_live: Callable[[str], bool] = lambda holder: True,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(path, holder, lease_s, clock_ns)
        self._may_live = may_live
        self._sleep = sleep

    # --- whose turn it is -----------------------------------------------------

    def create(self, row: RolloutRow, nodes: Sequence[RolloutNodeRow]) -> None:
        """Store a new rollout, with the lease. Its times and lease are set here.

        Raises: RolloutError if one of that name is not over, or one of the nodes is in a rollout that is not.
        """
        with self._transaction() as (connection, now_ns):
            _refuse_unfinished(connection, row, nodes)
            ident = connection.execute(
                "INSERT INTO rollouts (rollout_uid, name, recipe, actor_user, actor_host, settings_json, state_json,"
                " phase, reason, created_ns, updated_ns, lease_holder, lease_expires_ns)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.rollout_uid, row.name, row.recipe, row.actor_user, row.actor_host, row.settings_json,
                    row.state_json, row.phase, row.reason, now_ns, now_ns, self.holder, self._until(now_ns),
                ),
            ).lastrowid  # fmt: skip
            _set_nodes(connection, int(ident or 0), nodes, now_ns)

    def take(self, rollout_uid: str) -> RolloutRow:
        """Take the lease and return the rollout as it stands; what was asked of the one before is taken back.

        One that has run out by the clock, which may have been set forward, or have gone on while this machine slept, is
        taken only if a holder that may live does not renew it within `DOUBT` of its time.
        Raises: LeaseHeldError while another's has not expired; RolloutError for none of that uid.
        """
        self._bound(rollout_uid)
        if self._is_in_doubt(rollout_uid):
            self._sleep(self.lease_s * DOUBT)
        with self._transaction() as (connection, now_ns):
            row = rollout_row(_row(connection, rollout_uid))
            lease = lease_of(row, now_ns)
            if lease is not None and lease.holder != self.holder:
                raise LeaseHeldError(row.name, lease.holder, (lease.expires_ns - now_ns) / NS_PER_S)
            if row.lease is None or row.lease.holder != self.holder:
                _withdraw_all(connection, rollout_uid, now_ns)
            connection.execute(
                "UPDATE rollouts SET lease_holder = ?, lease_expires_ns = ? WHERE rollout_uid = ?",
                (self.holder, self._until(now_ns), rollout_uid),
            )
            return row

    def renew(self, rollout_uid: str) -> None:
        """Keep the lease for its whole time from now on. Raises: LeaseLostError."""
        with self._transaction() as (connection, now_ns):
            self._keep(connection, rollout_uid, now_ns)

    def give_back(self, rollout_uid: str) -> None:
        """Let the next one have the lease at once; nothing where it is another's."""
        with self._transaction() as (connection, _):
            connection.execute(
                "UPDATE rollouts SET lease_holder = NULL, lease_expires_ns = NULL"
                " WHERE rollout_uid = ? AND lease_holder = ?",
                (rollout_uid, self.holder),
            )

    # --- what becomes of it -----------------------------------------------------

    def record(self, rollout_uid: str, turn: Turn) -> tuple[int, ...]:
        """Store one turn and return the ids of its entries, in order; it is durable then, and the lease renewed.

        Raises: LeaseLostError, and nothing of it is stored.
        """
        with self._transaction() as (connection, now_ns):
            ident = self._keep(connection, rollout_uid, now_ns)
            connection.execute(
                "UPDATE rollouts SET state_json = ?, phase = ?, reason = ?, updated_ns = ?,"
                " finished_ns = CASE WHEN ? THEN coalesce(finished_ns, ?) END WHERE rollout_id = ?",
                (turn.state_json, turn.phase, turn.reason, now_ns, turn.is_over, now_ns, ident),
            )
            _set_nodes(connection, ident, turn.nodes, now_ns)
            for command_id, (is_done, answer) in (turn.answers or {}).items():
                _answer(connection, command_id, is_done, answer, now_ns)
            return tuple(_append(connection, ident, entry, now_ns) for entry in turn.entries)

    def open_intents(self, rollout_uid: str) -> tuple[TimelineRow, ...]:
        """Return the intents without an outcome, oldest first."""
        with self._transaction() as (connection, _):
            rows = connection.execute(
                f"SELECT {TIMELINE_COLUMNS} FROM rollout_timeline AS intents WHERE rollout_id = ? AND kind = 'intent'"
                " AND NOT EXISTS (SELECT 1 FROM rollout_timeline WHERE intent_id = intents.entry_id)"
                " ORDER BY entry_id",
                (_row(connection, rollout_uid)["rollout_id"],),
            )
            return tuple(TimelineRow(**dict(row)) for row in rows)

    # --- what operators ask -------------------------------------------------------

    def ask(self, rollout_uid: str, actor: tuple[str, str], verb: str, arguments: Mapping[str, object]) -> int | None:
        """Leave a command for whoever holds the lease and return its id; None where nobody does."""
        self._bound(rollout_uid)
        with self._transaction() as (connection, now_ns):
            row = _row(connection, rollout_uid)
            if lease_of(rollout_row(row), now_ns) is None:
                return None
            return connection.execute(
                "INSERT INTO rollout_commands (rollout_id, asked_ns, actor_user, actor_host, verb, arguments_json)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (row["rollout_id"], now_ns, *actor, verb, json.dumps(arguments)),
            ).lastrowid

    def asked(self, rollout_uid: str) -> tuple[CommandRow, ...]:
        """Return the commands that nobody has answered, oldest first."""
        with self._lock, explained(self._path):
            rows = self._connection.execute(
                f"SELECT {COMMAND_COLUMNS} FROM rollout_commands WHERE answered_ns IS NULL AND rollout_id ="
                " (SELECT rollout_id FROM rollouts WHERE rollout_uid = ?) ORDER BY command_id",
                (rollout_uid,),
            ).fetchall()
            return tuple(command_row(row) for row in rows)

    def withdraw(self, command_id: int) -> bool:
        """Take a command back; False if it was answered already."""
        with self._transaction() as (connection, now_ns):
            return _answer(connection, command_id, False, "withdrawn", now_ns)

    # --- within -------------------------------------------------------------------

    def _bound(self, rollout_uid: str) -> None:
        """Let a lease end within its whole time from now: a clock that was set back would keep a dead console's."""
        with self._transaction() as (connection, now_ns):
            connection.execute(
                "UPDATE rollouts SET lease_expires_ns = ? WHERE rollout_uid = ? AND lease_expires_ns > ?",
                (self._until(now_ns), rollout_uid, self._until(now_ns)),
            )

    def _is_in_doubt(self, rollout_uid: str) -> bool:
        """Whether another's lease has run out whose holder may live."""
        with self._transaction() as (connection, now_ns):
            lease = rollout_row(_row(connection, rollout_uid)).lease
        if lease is None or lease.expires_ns > now_ns or lease.holder == self.holder:
            return False
        return self._may_live(lease.holder)

    def _keep(self, connection: sqlite3.Connection, rollout_uid: str, now_ns: int) -> int:
        """Renew the lease and return the rollout's number. Raises: LeaseLostError."""
        kept = connection.execute(
            "UPDATE rollouts SET lease_expires_ns = ? WHERE rollout_uid = ? AND lease_holder = ? RETURNING rollout_id",
            (self._until(now_ns), rollout_uid, self.holder),
        ).fetchone()
        if kept is None:
            row = rollout_row(_row(connection, rollout_uid))
            by = row.lease.holder if row.lease is not None else "another, which has ended"
            raise LeaseLostError(f"rollout {row.name} was taken over by {by}; nothing more is done here")
        return int(kept["rollout_id"])


def lease_of(row: RolloutRow | Unfinished, now_ns: int) -> Lease | None:
    """Return the lease of a rollout if it has not expired."""
    return row.lease if row.lease is not None and row.lease.expires_ns > now_ns else None


def _row(connection: sqlite3.Connection, rollout_uid: str) -> sqlite3.Row:
    row = find_row(connection, rollout_uid)
    if row is None:
        raise RolloutError(f"there is no rollout {rollout_uid}")
    return row


def _refuse_unfinished(connection: sqlite3.Connection, new: RolloutRow, nodes: Sequence[RolloutNodeRow]) -> None:
    names = {node.node for node in nodes}
    unfinished = connection.execute(
        "SELECT rollout_id, rollout_uid, name, phase FROM rollouts WHERE finished_ns IS NULL"
    )
    for row in unfinished.fetchall():
        what = f"rollout {row['name']} ({row['rollout_uid'][:8]}) is {row['phase']}"
        if row["name"] == new.name:
            raise RolloutError(f"{what}; resume or abort it before it is started anew")
        taken = connection.execute(
            "SELECT node FROM rollout_nodes WHERE rollout_id = ? ORDER BY ordinal", (row["rollout_id"],)
        )
        both = [node for (node,) in taken if node in names]
        if both:
            more = f" and {len(both) - 1} more" if len(both) > 1 else ""
            raise RolloutError(f"{what} and has node {both[0]}{more} too; resume or abort it first")


def _set_nodes(connection: sqlite3.Connection, ident: int, nodes: Sequence[RolloutNodeRow], now_ns: int) -> None:
    connection.executemany(
        _SET_NODE,
        [
            (ident, node.ordinal, node.node, node.batch, node.state, node.reason, node.attempt, node.is_out, now_ns)
            for node in nodes
        ],
    )


def _append(connection: sqlite3.Connection, ident: int, entry: Entry, now_ns: int) -> int:
    values = (ident, now_ns, entry.kind, entry.what, entry.node, entry.attempt, entry.intent_id, entry.data_json)
    return int(connection.execute(_ADD_ENTRY, values).lastrowid or 0)


def _withdraw_all(connection: sqlite3.Connection, rollout_uid: str, now_ns: int) -> None:
    connection.execute(
        "UPDATE rollout_commands SET answered_ns = ?, is_done = 0, answer = 'withdrawn: its controller has ended'"
        " WHERE answered_ns IS NULL AND rollout_id = (SELECT rollout_id FROM rollouts WHERE rollout_uid = ?)",
        (now_ns, rollout_uid),
    )


def _answer(connection: sqlite3.Connection, command_id: int, is_done: bool, answer: str, now_ns: int) -> bool:
    changed = connection.execute(
        "UPDATE rollout_commands SET answered_ns = ?, is_done = ?, answer = ?"
        " WHERE command_id = ? AND answered_ns IS NULL",
        (now_ns, is_done, answer, command_id),
    ).rowcount
    return changed == 1
