"""Questions to the history, each answered from one consistent snapshot through an index."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import statistics
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from db.database import connect, explained
from db.errors import AmbiguousRunError
from db.records import Baseline, EventRow, RunFilter, RunRow, SampleRow, StageRow

RunWithStages = tuple[RunRow, tuple[StageRow, ...]]

SHORTEST_PREFIX = 4

_RUNS = """
    SELECT runs.run_id, run_uid, nodes.name AS node, recipes.name AS recipe, recipe_hash, model,
        actor_user, actor_host, state, tier_from, tier_to, started_ns, devices_json, wall_ns, unattributed_ns,
        first_output_ns, output, failure_code, failure_stage, failure_detail
    FROM runs CROSS JOIN nodes USING (node_id) CROSS JOIN recipes USING (recipe_id)
"""
_COMPARED = "state = 'ready' AND (tier_to IS 'armed') = ?"
"""Runs to compare with: armed ones, which load no weights and give no output, only among each other."""

_STAGE_COLUMNS = (
    "ordinal, name, status, start_ns, duration_ns, attributed_ns, bytes, rate_bytes_s, ceiling_bytes_s, path, reason,"
    " extra_json"
)


class History:
    """A reader of the history at ``path``; may be used from any thread, and answers one question at a time.

    A run that events mention but none has described is not listed.
    Every method raises HistoryError where the file can't be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = connect(path, read_only=True)
        self._connection.row_factory = sqlite3.Row
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def runs(self, wanted: RunFilter | None = None) -> tuple[RunRow, ...]:
        """Return the runs that fit, newest first."""
        with self.snapshot() as connection:
            return tuple(_run(row) for row in _select_runs(connection, wanted or RunFilter()))

    def runs_with_stages(self, wanted: RunFilter | None = None) -> tuple[RunWithStages, ...]:
        """Return the runs that fit, newest first, each with its stages in order."""
        with self.snapshot() as connection:
            rows = _select_runs(connection, wanted or RunFilter())
            return tuple((_run(row), _stages(connection, row["run_id"])) for row in rows)

    def run(self, run_uid: str) -> RunWithStages | None:
        """Return the run of that uid, or whose uid alone begins with it (four characters or more).

        Raises: AmbiguousRunError naming the runs that fit.
        """
        with self.snapshot() as connection:
            row = _find_run(connection, run_uid)
            return (_run(row), _stages(connection, row["run_id"])) if row else None

    def previous_run(self, run_uid: str) -> RunWithStages | None:
        """Return the newest ready run of the same node, recipe and tier that started before that run.

        One that armed a process is compared with such a run alone, any other never with one.
        """
        with self.snapshot() as connection:
            this = _find_run(connection, run_uid)
            if this is None:
                return None
            row = connection.execute(
                f"{_RUNS} WHERE runs.node_id = (SELECT node_id FROM nodes WHERE name = ?) AND started_ns < ?"
                f" AND recipe_hash = ? AND tier_from = ? AND {_COMPARED} ORDER BY started_ns DESC LIMIT 1",
                (this["node"], this["started_ns"], this["recipe_hash"], this["tier_from"], this["tier_to"] == "armed"),
            ).fetchone()
            return (_run(row), _stages(connection, row["run_id"])) if row else None

    def baseline(
        self,
        node: str,
        recipe_hash: str,
        tier_from: str,
        count: int = 20,
        before: str | None = None,
        armed: bool = False,
    ) -> Baseline | None:
        """Return medians over the newest ``count`` ready runs of that recipe on that node from that tier.

        With ``armed`` they are of the runs that armed a process, otherwise of all the others.
        ``before`` names a run: only runs that started before it count. A stage's figure is the median of its
        ``duration_ns`` where it was done; ``recent_wall_ns`` is oldest first. None without any such run.
        """
        with self.snapshot() as connection:
            limit_ns = 2**63 - 1
            if before is not None and (this := _find_run(connection, before)) is not None:
                limit_ns = this["started_ns"]
            rows = connection.execute(
                "SELECT run_id, wall_ns, first_output_ns FROM runs"
                " WHERE node_id = (SELECT node_id FROM nodes WHERE name = ?) AND started_ns < ?"
                f" AND recipe_hash = ? AND tier_from = ? AND {_COMPARED} AND wall_ns IS NOT NULL"
                " ORDER BY started_ns DESC LIMIT ?",
                (node, limit_ns, recipe_hash, tier_from, armed, count),
            ).fetchall()
            stages = [stage for row in rows for stage in _stages(connection, row["run_id"])]
        return _baseline(rows, stages) if rows else None

    def events(self, run_uid: str) -> tuple[EventRow, ...]:
        """Return the run's events in the order the host wrote them; the run is named as for `run`."""
        with self.snapshot() as connection:
            run = _find_run(connection, run_uid)
            if run is None:
                return ()
            rows = connection.execute(
                "SELECT journal_uuid, seq, nodes.name AS node, t_mono_ns, t_wall_ns, kind, data_json"
                " FROM events CROSS JOIN nodes USING (node_id) WHERE run_id = ? ORDER BY seq",
                (run["run_id"],),
            )
            return tuple(EventRow(run_uid=run["run_uid"], **dict(row)) for row in rows)

    def last_end(self, node: str) -> EventRow | None:
        """Return the event that ended the newest run of that node that is over; None without one."""
        with self.snapshot() as connection:
            row = connection.execute(*last_end_statement(node)).fetchone()
            return EventRow(**dict(row)) if row else None

    def samples(self, run_uid: str) -> tuple[SampleRow, ...]:
        """Return what was sampled during the run, oldest first; the run is named as for `run`."""
        with self.snapshot() as connection:
            run = _find_run(connection, run_uid)
            if run is None:
                return ()
            rows = connection.execute(
                "SELECT nodes.name AS node, t_wall_ns, data_json FROM samples CROSS JOIN nodes USING (node_id)"
                " WHERE run_id = ? ORDER BY t_wall_ns",
                (run["run_id"],),
            )
            return tuple(SampleRow(run_uid=run["run_uid"], **dict(row)) for row in rows)

    def cursor(self, journal_uuid: str) -> int:
        """Return the highest seq up to which everything of that journal is stored or known to be lost; 0 for none."""
        with self.snapshot() as connection:
            row = connection.execute(
                "SELECT contiguous_seq FROM cursors WHERE journal_uuid = ?", (journal_uuid,)
            ).fetchone()
            return int(row[0]) if row else 0

    def count(self) -> int:
        """Return how many runs there are."""
        with self.snapshot() as connection:
            return int(connection.execute("SELECT count(*) FROM runs WHERE started_ns IS NOT NULL").fetchone()[0])

    def nodes(self) -> tuple[str, ...]:
        """Return the names of all nodes that ever sent something, sorted."""
        return self._names("SELECT name FROM nodes ORDER BY name")

    def recipes(self) -> tuple[str, ...]:
        """Return the names of all recipes that were ever run, sorted."""
        return self._names("SELECT name FROM recipes ORDER BY name")

    def _names(self, statement: str) -> tuple[str, ...]:
        with self.snapshot() as connection:
            return tuple(row[0] for row in connection.execute(statement))

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """One read transaction, so that a run and its stages belong together."""
        with self._lock, explained(self._path):
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            finally:
                self._connection.execute("ROLLBACK")


def runs_statement(wanted: RunFilter) -> tuple[str, tuple[object, ...]]:
    """Return the SELECT for a filter and its values; an index serves every combination."""
    conditions: list[str] = ["started_ns IS NOT NULL"]
    values: list[object] = []
    for condition, value in (
        ("runs.node_id = (SELECT node_id FROM nodes WHERE name = ?)", wanted.node),
        ("runs.recipe_id = (SELECT recipe_id FROM recipes WHERE name = ?)", wanted.recipe),
        ("state = ?", wanted.state),
        ("started_ns >= ?", wanted.since_ns),
        ("started_ns < ?", wanted.before_ns),
    ):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    where = " AND ".join(conditions)
    return f"{_RUNS} WHERE {where} ORDER BY started_ns DESC, runs.run_id DESC LIMIT ?", (*values, wanted.limit)


def last_end_statement(node: str) -> tuple[str, tuple[object, ...]]:
    """Return the SELECT of `History.last_end` and its values."""
    return (
        "SELECT journal_uuid, events.seq, nodes.name AS node, run_uid, t_mono_ns, t_wall_ns, kind, data_json"
        " FROM runs CROSS JOIN events USING (run_id) CROSS JOIN nodes ON nodes.node_id = runs.node_id"
        " WHERE runs.node_id = (SELECT node_id FROM nodes WHERE name = ?) AND final = 1 AND kind = 'run.finished'"
        " ORDER BY started_ns DESC LIMIT 1",
        (node,),
    )


def _select_runs(connection: sqlite3.Connection, wanted: RunFilter) -> list[sqlite3.Row]:
    if not all(map(is_text, filter(None, (wanted.node, wanted.recipe, wanted.state)))):
        return []
    return connection.execute(*runs_statement(wanted)).fetchall()


def is_text(value: str) -> bool:
    """Return whether SQLite can be asked for ``value``: what a shell hands over need not be UTF-8."""
    try:
        return "\0" not in value and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _find_run(connection: sqlite3.Connection, run_uid: str) -> sqlite3.Row | None:
    """Return the one described run that ``run_uid`` names, whole or by its beginning."""
    if not is_text(run_uid):
        return None
    exact: sqlite3.Row | None = connection.execute(f"{_RUNS} WHERE run_uid = ?", (run_uid,)).fetchone()
    if exact is not None or len(run_uid) < SHORTEST_PREFIX:
        return exact
    past = f"{run_uid}\U0010ffff"  # sorts after whatever else begins so
    rows = connection.execute(
        f"{_RUNS} WHERE run_uid >= ? AND run_uid < ? ORDER BY run_uid LIMIT 10", (run_uid, past)
    ).fetchall()
    if len(rows) > 1:
        raise AmbiguousRunError(run_uid, tuple(row["run_uid"] for row in rows))
    return rows[0] if rows else None


def _run(row: sqlite3.Row) -> RunRow:
    fields = dict(row)
    del fields["run_id"]
    devices = json.loads(fields.pop("devices_json"))
    return RunRow(devices=tuple(devices), **fields)


def _stages(connection: sqlite3.Connection, run_id: int) -> tuple[StageRow, ...]:
    rows = connection.execute(f"SELECT {_STAGE_COLUMNS} FROM stages WHERE run_id = ? ORDER BY ordinal", (run_id,))
    return tuple(StageRow(**dict(row)) for row in rows)


def _baseline(rows: list[sqlite3.Row], stages: Iterable[StageRow]) -> Baseline:
    durations_ns: dict[str, list[int]] = {}
    for stage in stages:
        if stage.status == "done" and stage.duration_ns is not None:
            durations_ns.setdefault(stage.name, []).append(stage.duration_ns)
    first_ns = [row["first_output_ns"] for row in rows if row["first_output_ns"] is not None]
    return Baseline(
        count=len(rows),
        wall_ns=int(statistics.median(row["wall_ns"] for row in rows)),
        stages_ns={name: int(statistics.median(values)) for name, values in durations_ns.items()},
        first_output_ns=int(statistics.median(first_ns)) if first_ns else None,
        recent_wall_ns=tuple(row["wall_ns"] for row in reversed(rows)),
    )
