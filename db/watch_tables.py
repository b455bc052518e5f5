"""The table of migration 0003: who keeps a recipe warm on a node."""

from __future__ import annotations

WATCH_TABLES = (
    # A row is a lease: it is somebody's until `expires_ns`, which is wall time. Names as the configuration has them.
    """
    CREATE TABLE watches (
        node TEXT NOT NULL,
        recipe TEXT NOT NULL,
        tier TEXT NOT NULL,
        holder TEXT NOT NULL,
        actor_user TEXT NOT NULL,
        actor_host TEXT NOT NULL,
        since_ns INTEGER NOT NULL,
        expires_ns INTEGER NOT NULL,
        PRIMARY KEY (node, recipe)
    ) STRICT, WITHOUT ROWID
    """,
)
