"""The history's schema as numbered migrations, oldest first; one that has been released is never edited.

``PRAGMA user_version`` holds the number of the newest one applied.
"""

from __future__ import annotations

import sqlite3
import uuid

from sqlite_utils import Database, Migrations

from db.errors import HistoryError
from db.rollout_tables import ROLLOUT_TABLES
from db.watch_tables import WATCH_TABLES

APPLICATION_ID = 0x474C4F57
"""``GLOW``: marks the file as a history of ours."""

migrations = Migrations("glowplug")

TABLES = (
    """
    CREATE TABLE meta (
        key TEXT PRIMARY KEY,
        value TEXT NOT NULL
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE nodes (
        node_id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE
    ) STRICT
    """,
    """
    CREATE TABLE recipes (
        recipe_id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE
    ) STRICT
    """,
    """
    CREATE TABLE cursors (
        cursor_id INTEGER PRIMARY KEY,
        journal_uuid TEXT NOT NULL UNIQUE,
        node_id INTEGER NOT NULL REFERENCES nodes,
        contiguous_seq INTEGER NOT NULL DEFAULT 0
    ) STRICT
    """,
    # A run that events mention before one describes it has only its uid and node; `state` is then NULL.
    # `final`, `cursor_id` and `seq` say which event described it last.
    """
    CREATE TABLE runs (
        run_id INTEGER PRIMARY KEY,
        run_uid TEXT NOT NULL UNIQUE,
        node_id INTEGER NOT NULL REFERENCES nodes,
        recipe_id INTEGER REFERENCES recipes,
        recipe_hash TEXT,
        model TEXT,
        actor_user TEXT,
        actor_host TEXT,
        state TEXT,
        tier_from TEXT,
        tier_to TEXT,
        started_ns INTEGER,
        devices_json TEXT NOT NULL DEFAULT '[]',
        wall_ns INTEGER,
        unattributed_ns INTEGER,
        first_output_ns INTEGER,
        output TEXT,
        failure_code TEXT,
        failure_stage TEXT,
        failure_detail TEXT,
        final INTEGER NOT NULL DEFAULT 0,
        cursor_id INTEGER REFERENCES cursors,
        seq INTEGER,
        CHECK ((state IS NULL) = (started_ns IS NULL) AND (state IS NULL) = (recipe_id IS NULL))
    ) STRICT
    """,
    """
    CREATE TABLE stages (
        run_id INTEGER NOT NULL REFERENCES runs,
        ordinal INTEGER NOT NULL,
        name TEXT NOT NULL,
        status TEXT NOT NULL,
        start_ns INTEGER,
        duration_ns INTEGER,
        attributed_ns INTEGER,
        bytes INTEGER,
        rate_bytes_s REAL,
        ceiling_bytes_s REAL,
        path TEXT,
        reason TEXT,
        extra_json TEXT NOT NULL DEFAULT '{}',
        final INTEGER NOT NULL,
        cursor_id INTEGER NOT NULL REFERENCES cursors,
        seq INTEGER NOT NULL,
        PRIMARY KEY (run_id, ordinal)
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE events (
        event_id INTEGER PRIMARY KEY,
        journal_uuid TEXT NOT NULL,
        seq INTEGER NOT NULL,
        node_id INTEGER NOT NULL REFERENCES nodes,
        run_id INTEGER REFERENCES runs,
        t_mono_ns INTEGER NOT NULL,
        t_wall_ns INTEGER NOT NULL,
        kind TEXT NOT NULL,
        data_json TEXT NOT NULL,
        UNIQUE (journal_uuid, seq)
    ) STRICT
    """,
    # `run_id` 0: taken while no run of ours was going. A sample is its content, so the same one is stored once.
    """
    CREATE TABLE samples (
        run_id INTEGER NOT NULL,
        t_wall_ns INTEGER NOT NULL,
        node_id INTEGER NOT NULL REFERENCES nodes,
        data_json TEXT NOT NULL,
        PRIMARY KEY (run_id, t_wall_ns, node_id, data_json)
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE gaps (
        journal_uuid TEXT NOT NULL,
        from_seq INTEGER NOT NULL,
        to_seq INTEGER NOT NULL,
        node_id INTEGER NOT NULL REFERENCES nodes,
        PRIMARY KEY (journal_uuid, from_seq, to_seq),
        CHECK (from_seq <= to_seq)
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE INDEX runs_by_start ON runs (started_ns)",
    "CREATE INDEX runs_by_node ON runs (node_id, started_ns)",
    "CREATE INDEX runs_by_recipe ON runs (recipe_id, started_ns)",
    "CREATE INDEX runs_by_state ON runs (state, started_ns)",
    "CREATE INDEX events_by_run ON events (run_id, seq)",
)


@migrations(name="0001_first")
def create_tables(db: Database) -> None:
    """Create every table and name this history, for the hosts that will keep a cursor for it."""
    for statement in TABLES:
        db.execute(statement)
    db.execute("INSERT INTO meta (key, value) VALUES ('history_uuid', ?)", [str(uuid.uuid4())])


@migrations(name="0002_rollouts")
def create_rollout_tables(db: Database) -> None:
    """Create what a rollout is stored in."""
    for statement in ROLLOUT_TABLES:
        db.execute(statement)


@migrations(name="0003_watches")
def create_watch_tables(db: Database) -> None:
    """Create what says who watches a node."""
    for statement in WATCH_TABLES:
        db.execute(statement)


NEWEST = 3
"""The schema that this program writes: the number of the newest migration."""


def migrate(connection: sqlite3.Connection) -> bool:
    """Bring the schema up to date in one transaction; whether anything changed.

    The write lock is taken first, so of two processes one migrates and the other finds it done.

    Raises: HistoryError if a migration is missing or unknown here.
    """
    database = Database(connection, execute_plugins=False)
    connection.execute("BEGIN IMMEDIATE")
    try:
        pending = migrations.pending(database)
        migrations.apply(database)
        applied = len(migrations.applied(database))
        if applied != NEWEST:
            raise HistoryError(f"{applied} migrations are recorded where {NEWEST} are known")
        if pending:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {NEWEST}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return bool(pending)
