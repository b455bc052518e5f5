"""What the history knows of a node, for the session that follows it; where it can't be asked, nothing is known."""

from __future__ import annotations

import asyncio
import json
import logging

import db.errors
from console.clean import clean_record
from console.session import Session
from console.state import BaselineKey, StageBaseline
from db.queries import History
from remote_agent.protocol.codec import decode
from remote_agent.protocol.messages import RunFinished, Tier

log = logging.getLogger(__name__)


async def recall(history: History, session: Session) -> None:
    """Tell a session the last run of its node that the history has the end of: the node need not tell it again."""
    try:
        event = await asyncio.to_thread(history.last_end, session.node.name)
        run = clean_record(decode(RunFinished, json.loads(event.data_json)).run) if event is not None else None
    except (db.errors.HistoryError, ValueError) as error:
        log.warning("%s: its last run is not known from the history: %s", session.node.name, error)
        return
    if run is not None:
        key = (run.recipe_hash, run.tier_from, run.tier_to is Tier.ARMED)
        session.recall(run, await baseline(history, session.node.name, key, before=run.run_uid))


async def baseline(history: History, node: str, key: BaselineKey, before: str | None = None) -> StageBaseline | None:
    """Return the medians of a node's runs of one kind, of those before a run where it is named."""
    recipe_hash, tier, armed = key
    try:
        found = await asyncio.to_thread(history.baseline, node, recipe_hash, tier.value, before=before, armed=armed)
    except db.errors.HistoryError as error:
        log.warning("no baseline: %s", error)
        return None
    if found is None:
        return None
    return StageBaseline(found.count, found.wall_ns, found.stages_ns, found.recent_wall_ns)
