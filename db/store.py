"""Writes a batch of rows in one transaction, so that their order of arrival and repetitions change nothing.

An event is stored once. A run and each of its stages keep what the highest-ranking event said about
them: a final word outranks any other, then the later journal, then the higher seq.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable

from db.records import GapRow, Record, RunRow, SampleRow, StageRow

Row = Record | SampleRow | GapRow

UNFINISHED = ("queued", "running")
"""States of a run that are not its last word."""

_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1

_ADD_EVENT = (
    "INSERT INTO events (journal_uuid, seq, node_id, run_id, t_mono_ns, t_wall_ns, kind, data_json)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (journal_uuid, seq) DO NOTHING"
)

_OWN_RUN_FIELDS = ("run_uid", "node", "recipe", "devices")
_RUN_COLUMNS = tuple(field.name for field in dataclasses.fields(RunRow) if field.name not in _OWN_RUN_FIELDS)
_DESCRIBE_RUN = (
    f"UPDATE runs SET recipe_id = ?, devices_json = ?, {', '.join(f'{column} = ?' for column in _RUN_COLUMNS)},"
    " final = ?, cursor_id = ?, seq = ?"
    " WHERE run_id = ? AND (state IS NULL OR (?, ?, ?) > (final, cursor_id, seq))"
)

_STAGE_COLUMNS = tuple(field.name for field in dataclasses.fields(StageRow) if field.name != "ordinal")
_STAGE_SET = (*_STAGE_COLUMNS, "final", "cursor_id", "seq")
_SET_STAGE = (
    f"INSERT INTO stages (run_id, ordinal, {', '.join(_STAGE_SET)}) VALUES (?, ?{', ?' * len(_STAGE_SET)})"
    " ON CONFLICT (run_id, ordinal) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in _STAGE_SET)
    + " WHERE (excluded.final, excluded.cursor_id, excluded.seq) > (final, cursor_id, seq)"
)


def store_batch(connection: sqlite3.Connection, rows: Iterable[Row]) -> dict[str, int]:
    """Store ``rows`` in one transaction; return the highest contiguous seq of each journal they name.

    All or nothing. Raises: sqlite3.Error, with the transaction rolled back.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        batch = _Batch(connection)
        for row in rows:
            batch.store(row)
        cursors = batch.advance_cursors()
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return cursors


def is_storable(row: Row) -> bool:
    """Whether the row's numbers can be kept: a seq is a positive 64-bit integer."""
    if isinstance(row, Record):
        return 0 < row.event.seq <= _INT_MAX
    if isinstance(row, GapRow):
        return 0 < row.from_seq <= row.to_seq <= _INT_MAX
    return True


class _Batch:
    """One transaction's worth of statements, with the ids it has looked up."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._nodes: dict[str, int] = {}
        self._recipes: dict[str, int] = {}
        self._journals: dict[str, int] = {}

    def store(self, row: Row) -> None:
        if isinstance(row, Record):
            self._store_record(row)
        elif isinstance(row, GapRow):
            self._store_gap(row)
        else:
            self._store_sample(row)

    def advance_cursors(self) -> dict[str, int]:
        """Move each named journal's cursor over what is now contiguous, gaps included, and return where it is."""
        return {journal_uuid: self._advance(journal_uuid) for journal_uuid in self._journals}

    def _store_record(self, record: Record) -> None:
        event = record.event
        node_id = self._node_id(event.node)
        cursor_id = self._cursor_id(event.journal_uuid, node_id)
        run_uid = record.run.run_uid if record.run else event.run_uid
        run_id = self._run_id(run_uid, node_id) if run_uid else None
        is_new = self._execute(
            _ADD_EVENT,
            (
                event.journal_uuid,
                event.seq,
                node_id,
                run_id,
                event.t_mono_ns,
                event.t_wall_ns,
                event.kind,
                event.data_json,
            ),
        ).rowcount
        if not is_new or run_id is None:
            return
        is_final = record.run is not None and record.run.state not in UNFINISHED
        rank = (int(is_final), cursor_id, event.seq)
        if record.run:
            self._store_run(run_id, record.run, rank)
        for stage in record.stages:
            self._store_stage(run_id, stage, rank)

    def _store_run(self, run_id: int, run: RunRow, rank: tuple[int, int, int]) -> None:
        recipe_id = self._recipe_id(run.recipe)
        described = (getattr(run, column) for column in _RUN_COLUMNS)
        self._execute(_DESCRIBE_RUN, (recipe_id, json.dumps(run.devices), *described, *rank, run_id, *rank))

    def _store_stage(self, run_id: int, stage: StageRow, rank: tuple[int, int, int]) -> None:
        described = (getattr(stage, column) for column in _STAGE_COLUMNS)
        self._execute(_SET_STAGE, (run_id, stage.ordinal, *described, *rank))

    def _store_sample(self, sample: SampleRow) -> None:
        node_id = self._node_id(sample.node)
        run_id = self._run_id(sample.run_uid, node_id) if sample.run_uid else 0
        self._execute(
            "INSERT INTO samples (run_id, t_wall_ns, node_id, data_json) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (run_id, sample.t_wall_ns, node_id, sample.data_json),
        )

    def _store_gap(self, gap: GapRow) -> None:
        node_id = self._node_id(gap.node)
        self._cursor_id(gap.journal_uuid, node_id)
        self._execute(
            "INSERT INTO gaps (journal_uuid, from_seq, to_seq, node_id) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (gap.journal_uuid, gap.from_seq, gap.to_seq, node_id),
        )

    def _advance(self, journal_uuid: str) -> int:
        (reached,) = self._one("SELECT contiguous_seq FROM cursors WHERE journal_uuid = ?", (journal_uuid,))
        start = reached
        while True:
            later = self._execute(
                "SELECT seq FROM events WHERE journal_uuid = ? AND seq > ? ORDER BY seq", (journal_uuid, reached)
            )
            for (seq,) in later:
                if seq != reached + 1:
                    break
                reached = seq
            later.close()
            covered = self._execute(
                "SELECT max(to_seq) FROM gaps WHERE journal_uuid = ? AND from_seq <= ? AND to_seq > ?",
                (journal_uuid, reached + 1, reached),
            ).fetchone()[0]
            if covered is None:
                break
            reached = covered
        if reached != start:
            self._execute("UPDATE cursors SET contiguous_seq = ? WHERE journal_uuid = ?", (reached, journal_uuid))
        return int(reached)

    def _node_id(self, name: str) -> int:
        if name not in self._nodes:
            self._execute("INSERT INTO nodes (name) VALUES (?) ON CONFLICT DO NOTHING", (name,))
            (self._nodes[name],) = self._one("SELECT node_id FROM nodes WHERE name = ?", (name,))
        return self._nodes[name]

    def _cursor_id(self, journal_uuid: str, node_id: int) -> int:
        if journal_uuid not in self._journals:
            self._execute(
                "INSERT INTO cursors (journal_uuid, node_id) VALUES (?, ?) ON CONFLICT DO NOTHING",
                (journal_uuid, node_id),
            )
            (self._journals[journal_uuid],) = self._one(
                "SELECT cursor_id FROM cursors WHERE journal_uuid = ?", (journal_uuid,)
            )
        return self._journals[journal_uuid]

    def _run_id(self, run_uid: str, node_id: int) -> int:
        found = self._execute("SELECT run_id FROM runs WHERE run_uid = ?", (run_uid,)).fetchone()
        if found is None:
            self._execute("INSERT INTO runs (run_uid, node_id) VALUES (?, ?)", (run_uid, node_id))
            found = self._one("SELECT run_id FROM runs WHERE run_uid = ?", (run_uid,))
        return int(found[0])

    def _recipe_id(self, name: str) -> int:
        if name not in self._recipes:
            self._execute("INSERT INTO recipes (name) VALUES (?) ON CONFLICT DO NOTHING", (name,))
            (self._recipes[name],) = self._one("SELECT recipe_id FROM recipes WHERE name = ?", (name,))
        return self._recipes[name]

    def _one(self, statement: str, values: tuple[object, ...]) -> tuple[int, ...]:
        row: tuple[int, ...] = self._execute(statement, values).fetchone()
        return row

    def _execute(self, statement: str, values: tuple[object, ...]) -> sqlite3.Cursor:
        return self._connection.execute(statement, tuple(_storable(value) for value in values))


def _storable(value: object) -> object:
    """Return ``value`` as SQLite can hold it: a host may send any integer, and halves of surrogate pairs."""
    if isinstance(value, int):
        return min(max(value, _INT_MIN), _INT_MAX)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value
