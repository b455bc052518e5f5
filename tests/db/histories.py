"""What hosts send, made up for the tests: whole runs as records, and a look at all that a history holds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from db.database import connect
from db.records import EventRow, Record, RunRow, StageRow

STAGES = ("queue", "probe", "weights", "first_request")


def run_row(run_uid: str, **changes: object) -> RunRow:
    """Return a queued run of the recipe ``llama``."""
    run = RunRow(
        run_uid=run_uid,
        node="gpu-1",
        recipe="llama",
        recipe_hash="abcdef0123456789",
        model="/models/llama",
        actor_user="ada",
        actor_host="desk",
        state="queued",
        tier_from="cold",
        tier_to=None,
        started_ns=1_000_000_000,
    )
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def event_row(seq: int, run_uid: str | None = None, journal: str = "journal-1", **changes: object) -> EventRow:
    """Return one event of a journal."""
    event = EventRow(journal, seq, "gpu-1", run_uid, 10 * seq, 1_000_000_000 + 10 * seq, "finding", '{"text": "hot"}')
    return dataclasses.replace(event, **changes)  # type: ignore[arg-type]


def whole_run(run_uid: str, first_seq: int = 1, journal: str = "journal-1", **changes: object) -> list[Record]:
    """Return every event of a run as a host sends them: accepted, each stage begun and over, finished.

    ``changes`` go into the finished run. The stages' events carry no run, the last one carries it all.
    """
    accepted = run_row(run_uid)
    ready: dict[str, object] = {"state": "ready", "tier_to": "standby", "wall_ns": 4_000, "unattributed_ns": 0}
    finished = run_row(run_uid, **{**ready, **changes})
    records = [Record(event_row(first_seq, run_uid, journal, kind="run.accepted"), accepted)]
    over = []
    for ordinal, name in enumerate(STAGES):
        begun = StageRow(ordinal, name, "running", start_ns=1_000 * ordinal)
        done = dataclasses.replace(begun, status="done", duration_ns=900)
        over.append(dataclasses.replace(done, attributed_ns=1_000))
        for stage in (begun, done):
            seq = first_seq + len(records)
            records.append(Record(event_row(seq, run_uid, journal, kind="run.stage"), stages=(stage,)))
    last = event_row(first_seq + len(records), run_uid, journal, kind="run.finished")
    return [*records, Record(last, finished, tuple(over))]


def contents(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return all that the history holds, by table, without the numbers SQLite gave out itself."""
    statements = {
        "nodes": "SELECT name FROM nodes",
        "recipes": "SELECT name FROM recipes",
        "cursors": "SELECT journal_uuid, contiguous_seq FROM cursors",
        "runs": "SELECT run_uid, nodes.name, recipes.name, recipe_hash, state, tier_to, started_ns, wall_ns, final, seq"
        " FROM runs JOIN nodes USING (node_id) LEFT JOIN recipes USING (recipe_id)",
        "stages": "SELECT run_uid, ordinal, stages.name, status, duration_ns, attributed_ns, stages.final, stages.seq"
        " FROM stages JOIN runs USING (run_id)",
        "events": "SELECT journal_uuid, events.seq, run_uid, kind, data_json FROM events LEFT JOIN runs USING (run_id)",
        "samples": "SELECT run_id, t_wall_ns, data_json FROM samples",
        "gaps": "SELECT journal_uuid, from_seq, to_seq FROM gaps",
    }
    with contextlib.closing(connect(path, read_only=True)) as connection:
        rows = {table: connection.execute(statement).fetchall() for table, statement in statements.items()}
    return {table: sorted(found, key=repr) for table, found in rows.items()}


def contiguous(seqs: Sequence[int]) -> int:
    """Return the highest seq up to which none is missing."""
    reached = 0
    for seq in sorted(set(seqs)):
        if seq != reached + 1:
            break
        reached = seq
    return reached
