"""Does to a rollout that nobody carries out what needs no carrying out."""

from __future__ import annotations

from collections.abc import Mapping

from console.rollout.commands import event_of, judge
from console.rollout.events import Finish, Paused
from console.rollout.machine import step
from console.rollout.saved import entry, node_rows, read_state, state_json
from db.rollout_records import Turn
from db.rollout_store import RolloutStore

WITHOUT_CONTROLLER = ("pause", "skip")
"""Verbs that may need no carrying out."""


def apply_idle(
    store: RolloutStore, rollout_uid: str, verb: str, arguments: Mapping[str, object], who: str
) -> tuple[bool, str] | None:
    """Store what a verb leads to and return what came of it; None, and nothing stored, where something is to be done.

    The lease is taken for that moment. Raises: LeaseHeldError, HistoryError.
    """
    row = store.take(rollout_uid)
    try:
        before, event = read_state(row.state_json), event_of(verb, arguments, who)
        if event is None:
            return False, f"nothing is known of {verb!r}"
        after, wanted = step(before, event)
        if not all(isinstance(one, Paused | Finish) for one in wanted):
            return None
        done, text = judge(event, before, after)
        entries = [
            entry("command", verb, {**arguments, "by": who, "done": done, "answer": text}),
            entry("event", event),
            *(entry("controller", one) for one in wanted),
        ]
        store.record(
            rollout_uid,
            Turn(
                state_json(after),
                after.phase.value,
                after.reason,
                after.phase.is_over,
                node_rows(after, before),
                tuple(entries),
            ),
        )
        return done, text
    finally:
        store.give_back(rollout_uid)
