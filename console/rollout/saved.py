"""A rollout as the history keeps it: what it was started with, its state, and its timeline's entries."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from console.clean import clean_record
from console.rollout.events import Event, Intent
from console.rollout.settings import Rollout
from console.rollout.states import RolloutState
from db.rollout_records import Entry, Kind, RolloutNodeRow
from remote_agent.protocol.codec import Unknown, decode, encode
from remote_agent.protocol.messages import Recipe

_OWN_COLUMNS = ("node", "attempt")


@dataclass(frozen=True)
class Settings:
    """What a rollout was started with and keeps, whatever becomes of ``fleet.toml``."""

    rollout: Rollout
    recipe: Recipe


def settings_json(settings: Settings) -> str:
    return json.dumps(encode(settings))


def read_settings(text: str) -> Settings:
    """Return the settings that were written so. Raises: ValueError for anything else."""
    return decode(Settings, json.loads(text), Unknown.REFUSE)


def state_json(state: RolloutState) -> str:
    return json.dumps(encode(state))


def read_state(text: str) -> RolloutState:
    """Return the state that was written so. Raises: ValueError for anything else."""
    return decode(RolloutState, json.loads(text), Unknown.REFUSE)


def run_uid(rollout_uid: str, node: str, attempt: int) -> str:
    """Return the uid of an attempt's run: the same one each time, so that asking again starts nothing twice."""
    return uuid.uuid5(uuid.UUID(rollout_uid), f"{node}/{attempt}").hex


def node_rows(state: RolloutState, before: RolloutState | None = None) -> tuple[RolloutNodeRow, ...]:
    """Return the nodes that are not as they were ``before``, all without it."""
    rows = []
    for ordinal, row in enumerate(state.nodes):
        if before is not None and row is before.nodes[ordinal]:
            continue
        reason = row.skip_reason or row.reason
        rows.append(RolloutNodeRow(ordinal, row.name, row.batch, row.state.value, reason, row.attempt, row.is_out))
    return tuple(rows)


def entry(
    kind: Kind, what: Event | Intent | str, data: Mapping[str, object] | None = None, intent_id: int | None = None
) -> Entry:
    """Return the entry for what happened, is wanted, or came of it; node and attempt stand in columns of their own."""
    if isinstance(what, str):
        return Entry(kind, what, intent_id=intent_id, data_json=_json(data or {}))
    fields = {field.name: getattr(what, field.name) for field in dataclasses.fields(what)}
    content = {key: value for key, value in fields.items() if key not in _OWN_COLUMNS and value not in ("", ())}
    return Entry(
        kind,
        type(what).__name__,
        fields.get("node"),
        fields.get("attempt"),
        intent_id,
        _json({**content, **(data or {})}),
    )


def _json(data: Mapping[str, object]) -> str:
    return json.dumps(clean_record(encode(data)))
