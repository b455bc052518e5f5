"""Questions about rollouts, to a `db.queries.History`; each is answered from one snapshot."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from db.errors import AmbiguousRolloutError
from db.queries import SHORTEST_PREFIX, History, is_text
from db.rollout_records import CommandRow, Lease, RolloutNodeRow, RolloutRecord, RolloutRow, TimelineRow, Unfinished

ROLLOUT_COLUMNS = (
    "rollout_uid, name, recipe, actor_user, actor_host, settings_json, state_json, phase, reason, created_ns,"
    " updated_ns, finished_ns, lease_holder, lease_expires_ns"
)
NODE_COLUMNS = "ordinal, node, batch, state, reason, attempt, is_out"
TIMELINE_COLUMNS = "entry_id, t_wall_ns, kind, what, node, attempt, intent_id, data_json"
COMMAND_COLUMNS = "command_id, asked_ns, actor_user, actor_host, verb, arguments_json, is_done, answer"


def find(history: History, name: str) -> RolloutRow | None:
    """Return a rollout by itself, whatever the length of its timeline; ``name`` and errors as for `read`."""
    with history.snapshot() as connection:
        row = find_row(connection, name)
        return None if row is None else rollout_row(row)


def read(
    history: History, name: str, after_entry: int = 0, is_enough: Callable[[TimelineRow], bool] = lambda entry: False
) -> RolloutRecord | None:
    """Return a rollout with its nodes and its timeline after that entry; None where there is none.

    ``name`` is a rollout's name, of which the newest is meant, or its uid or how that begins (four characters or more).
    ``is_enough`` is asked from the newest entry backwards: none is read before the first of which it says so.
    Raises: AmbiguousRolloutError naming those that fit; HistoryError where the file can't be read.
    """
    with history.snapshot() as connection:
        row = find_row(connection, name)
        if row is None:
            return None
        ident = row["rollout_id"]
        nodes = connection.execute(
            f"SELECT {NODE_COLUMNS} FROM rollout_nodes WHERE rollout_id = ? ORDER BY ordinal", (ident,)
        )
        found = connection.execute(
            f"SELECT {TIMELINE_COLUMNS} FROM rollout_timeline WHERE rollout_id = ? AND entry_id > ?"
            " ORDER BY entry_id DESC",
            (ident, after_entry),
        )
        entries = []
        for entry in found:
            entries.append(TimelineRow(**dict(entry)))
            if is_enough(entries[-1]):
                break
        return RolloutRecord(
            rollout_row(row),
            tuple(RolloutNodeRow(**{**dict(node), "is_out": bool(node["is_out"])}) for node in nodes),
            tuple(reversed(entries)),
        )


def listed(history: History, limit: int = 20) -> tuple[RolloutRow, ...]:
    """Return the newest rollouts, newest first."""
    with history.snapshot() as connection:
        rows = connection.execute(
            f"SELECT rollout_id, {ROLLOUT_COLUMNS} FROM rollouts ORDER BY created_ns DESC LIMIT ?", (limit,)
        )
        return tuple(rollout_row(row) for row in rows)


def unfinished(history: History) -> tuple[Unfinished, ...]:
    """Return the rollouts that are not over, newest first, without what is long of them."""
    with history.snapshot() as connection:
        rows = connection.execute(
            "SELECT rollout_uid, name, phase, lease_holder, lease_expires_ns, (SELECT count(*) FROM rollout_nodes"
            " WHERE rollout_nodes.rollout_id = rollouts.rollout_id AND is_out) AS nodes_out"
            " FROM rollouts WHERE finished_ns IS NULL ORDER BY created_ns DESC"
        )
        return tuple(Unfinished(**_with_lease(row)) for row in rows)


def claims(history: History, node: str) -> tuple[str, ...]:
    """Return, a line each, which rollouts that are not over have the node out of its traffic or under way."""
    with history.snapshot() as connection:
        rows = connection.execute(
            "SELECT rollouts.name, rollout_nodes.state, is_out FROM rollout_nodes JOIN rollouts USING (rollout_id)"
            " WHERE finished_ns IS NULL AND node = ? AND (is_out OR rollout_nodes.state IN"
            " ('draining', 'warming', 'verifying', 'shifting', 'unknown')) ORDER BY rollout_id",
            (node,),
        )
        out = {True: " and has it out of traffic", False: ""}
        return tuple(f"rollout {row['name']} is at it ({row['state']}){out[bool(row['is_out'])]}" for row in rows)


def command(history: History, command_id: int) -> CommandRow | None:
    """Return a command with its answer, as far as there is one."""
    with history.snapshot() as connection:
        row = connection.execute(
            f"SELECT {COMMAND_COLUMNS} FROM rollout_commands WHERE command_id = ?", (command_id,)
        ).fetchone()
        return command_row(row) if row else None


def find_row(connection: sqlite3.Connection, name: str) -> sqlite3.Row | None:
    """Return the row that a name, a uid or a uid's beginning means. Raises: AmbiguousRolloutError."""
    if not is_text(name):
        return None
    select = f"SELECT rollout_id, {ROLLOUT_COLUMNS} FROM rollouts"
    for condition in ("rollout_uid = ?", "name = ? ORDER BY created_ns DESC, rollout_id DESC LIMIT 1"):
        row: sqlite3.Row | None = connection.execute(f"{select} WHERE {condition}", (name,)).fetchone()
        if row is not None:
            return row
    if len(name) < SHORTEST_PREFIX:
        return None
    past = f"{name}\U0010ffff"
    rows = connection.execute(
        f"{select} WHERE rollout_uid >= ? AND rollout_uid < ? ORDER BY rollout_uid LIMIT 10", (name, past)
    ).fetchall()
    if len(rows) > 1:
        raise AmbiguousRolloutError(name, tuple(row["rollout_uid"] for row in rows))
    return rows[0] if rows else None


def rollout_row(row: sqlite3.Row) -> RolloutRow:
    fields = _with_lease(row)
    del fields["rollout_id"]
    return RolloutRow(**fields)


def _with_lease(row: sqlite3.Row) -> dict[str, Any]:
    fields = dict(row)
    holder, expires_ns = fields.pop("lease_holder"), fields.pop("lease_expires_ns")
    return {**fields, "lease": None if holder is None else Lease(holder, expires_ns)}


def command_row(row: sqlite3.Row) -> CommandRow:
    fields = dict(row)
    is_done = fields.pop("is_done")
    return CommandRow(**fields, is_done=None if is_done is None else bool(is_done))
