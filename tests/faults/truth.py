"""What really happened, past every console: an agent's journal, and what a history made of it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from remote_agent.agentd.paths import StateDir
from remote_agent.client import connect_running, open_client
from remote_agent.protocol.messages import Event, SubscribeParams, SubscribeResult

Row = tuple[int, str, str | None, object]
"""An event's seq, kind, run and data."""


def replay(state: StateDir, after_seq: int = 0) -> tuple[str, list[tuple[Event, object]]]:
    """Return the journal's uuid and all of it after a seq, each event with its data as it was sent.

    As a subscriber that acknowledges nothing: the agent keeps it all from then on.
    """
    with open_client(state, "replay", connect_running) as client:
        hello = client.hello("replay")
        client.call("subscribe", SubscribeParams("replay", after_seq, samples=False), SubscribeResult)
        told: list[tuple[Event, object]] = []
        if hello.newest_seq <= after_seq:
            return hello.journal_uuid, told
        for notification in client.notifications():
            if isinstance(notification.params, Event):
                told.append((notification.params, notification.raw))
                if notification.params.seq >= hello.newest_seq:
                    break
    return hello.journal_uuid, told


def rows(told: list[tuple[Event, object]]) -> list[Row]:
    return [(event.seq, event.kind, event.run_uid, raw) for event, raw in told]


def stored(history: Path, journal_uuid: str) -> tuple[list[Row], int]:
    """Return every event of a journal that a history holds, and how many gaps it knows of."""
    connection = sqlite3.connect(f"file:{history}?mode=ro", uri=True)
    try:
        found = connection.execute(
            "SELECT events.seq, kind, run_uid, data_json FROM events LEFT JOIN runs USING (run_id)"
            " WHERE journal_uuid = ? ORDER BY events.seq",
            (journal_uuid,),
        ).fetchall()
        (gaps,) = connection.execute("SELECT count(*) FROM gaps").fetchone()
    finally:
        connection.close()
    return [(seq, kind, run_uid, json.loads(data)) for seq, kind, run_uid, data in found], int(gaps)
