"""The tables of migration 0002: rollouts, their nodes, what happened to them, and what operators ask of them."""

from __future__ import annotations

ROLLOUT_TABLES = (
    # `settings_json` stays; `state_json` is the machine's whole state. A rollout is carried out by whoever's lease it
    # is, until `lease_expires_ns`, which is wall time.
    """
    CREATE TABLE rollouts (
        rollout_id INTEGER PRIMARY KEY,
        rollout_uid TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        recipe TEXT NOT NULL,
        actor_user TEXT NOT NULL,
        actor_host TEXT NOT NULL,
        settings_json TEXT NOT NULL,
        state_json TEXT NOT NULL,
        phase TEXT NOT NULL,
        reason TEXT NOT NULL,
        created_ns INTEGER NOT NULL,
        updated_ns INTEGER NOT NULL,
        finished_ns INTEGER,
        lease_holder TEXT,
        lease_expires_ns INTEGER,
        CHECK ((lease_holder IS NULL) = (lease_expires_ns IS NULL))
    ) STRICT
    """,
    # Names as the configuration has them; a node need not be in `nodes`, which has what hosts sent.
    """
    CREATE TABLE rollout_nodes (
        rollout_id INTEGER NOT NULL REFERENCES rollouts,
        ordinal INTEGER NOT NULL,
        node TEXT NOT NULL,
        batch INTEGER NOT NULL,
        state TEXT NOT NULL,
        reason TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        is_out INTEGER NOT NULL,
        updated_ns INTEGER NOT NULL,
        PRIMARY KEY (rollout_id, ordinal),
        UNIQUE (rollout_id, node)
    ) STRICT, WITHOUT ROWID
    """,
    # An intent is here before it is acted on; its outcome names it by `intent_id`.
    """
    CREATE TABLE rollout_timeline (
        entry_id INTEGER PRIMARY KEY,
        rollout_id INTEGER NOT NULL REFERENCES rollouts,
        t_wall_ns INTEGER NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('event', 'intent', 'outcome', 'command', 'controller')),
        what TEXT NOT NULL,
        node TEXT,
        attempt INTEGER,
        intent_id INTEGER REFERENCES rollout_timeline,
        data_json TEXT NOT NULL,
        CHECK ((kind = 'outcome') = (intent_id IS NOT NULL))
    ) STRICT
    """,
    """
    CREATE TABLE rollout_commands (
        command_id INTEGER PRIMARY KEY,
        rollout_id INTEGER NOT NULL REFERENCES rollouts,
        asked_ns INTEGER NOT NULL,
        actor_user TEXT NOT NULL,
        actor_host TEXT NOT NULL,
        verb TEXT NOT NULL,
        arguments_json TEXT NOT NULL,
        answered_ns INTEGER,
        is_done INTEGER,
        answer TEXT,
        CHECK ((answered_ns IS NULL) = (answer IS NULL) AND (answered_ns IS NULL) = (is_done IS NULL))
    ) STRICT
    """,
    "CREATE UNIQUE INDEX rollouts_unfinished ON rollouts (name) WHERE finished_ns IS NULL",
    "CREATE INDEX rollouts_by_name ON rollouts (name, created_ns)",
    "CREATE INDEX rollouts_by_creation ON rollouts (created_ns)",
    "CREATE INDEX rollout_timeline_by_rollout ON rollout_timeline (rollout_id, entry_id)",
    "CREATE UNIQUE INDEX rollout_outcomes ON rollout_timeline (intent_id) WHERE intent_id IS NOT NULL",
    "CREATE INDEX rollout_commands_open ON rollout_commands (rollout_id) WHERE answered_ns IS NULL",
    """
    CREATE TRIGGER rollout_timeline_stays BEFORE UPDATE ON rollout_timeline
    BEGIN SELECT RAISE(ABORT, 'the timeline of a rollout is only appended to'); END
    """,
    """
    CREATE TRIGGER rollout_timeline_is_kept BEFORE DELETE ON rollout_timeline
    BEGIN SELECT RAISE(ABORT, 'the timeline of a rollout is only appended to'); END
    """,
)
