"""A stored rollout as a person reads it, and as a JSON document; pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from console.clean import clean, clean_record
from console.format import NS_PER_S, counted, date_text, short_uid
from console.rollout.advance import waiting_for
from console.rollout.commands import verb_to_go_on
from console.rollout.endings import may_go_on
from console.rollout.gates import describe_count
from console.rollout.saved import read_settings, read_state
from console.rollout.states import RolloutState
from console.rollout.words import line
from db.rollout_records import RolloutRecord, RolloutRow, TimelineRow
from db.rollout_store import lease_of
from remote_agent.protocol.codec import encode

TIMELINE_LINES = 20


def enough_lines() -> Callable[[TimelineRow], bool]:
    """Return what tells a reader, from the newest entry backwards, that `status_lines` needs no more than it has."""
    told = 0

    def is_enough(entry: TimelineRow) -> bool:
        nonlocal told
        told += line(entry) is not None
        return told > TIMELINE_LINES

    return is_enough


def one_line(row: RolloutRow, now_ns: int) -> str:
    """Return a line for a list of rollouts."""
    reason = f": {row.reason}" if row.reason else ""
    begun = date_text(row.created_ns)
    text = f"{begun}  {short_uid(row.rollout_uid)}  {row.name:<20} {row.phase}{reason}{_controller_note(row, now_ns)}"
    return clean(text, 1000)


def status_lines(record: RolloutRecord, now_ns: int) -> Iterator[str]:
    """Yield the rollout, its nodes, what it waits for, and the end of its timeline."""
    row, state = record.row, read_state(record.row.state_json)
    reason = f": {row.reason}" if row.reason else ""
    yield f"rollout {row.name} ({short_uid(row.rollout_uid)}), recipe {row.recipe}: {row.phase}{reason}"
    batches = 1 + max((node.batch for node in state.nodes), default=0)
    yield f"  batch {state.batch + 1} of {batches}, {counted(state.failures, 'failure')} of {state.rules.max_failures}"
    if not state.phase.is_over:
        yield f"  {_controller_line(row, state, now_ns)}"
    width = max(len(node.name) for node in state.nodes)
    for node in state.nodes:
        why = node.skip_reason or node.reason
        out = ", out of traffic" if node.is_out else ""
        attempt = f", attempt {node.attempt}" if node.attempt else ""
        reason = f": {why}" if why else ""
        yield f"  {node.name:{width}}  batch {node.batch + 1}  {state.word(node)}{attempt}{out}{reason}"
        yield from (f"  {'':{width}}  {text}" for text in may_go_on(state, node))
    yield from (f"  {text}" for text in _gate_lines(record, state))
    yield from (f"  waits for {text}" for text in waiting_for(state))
    told = [(entry, text) for entry in record.timeline if (text := line(entry))]
    if len(told) > TIMELINE_LINES:
        yield f"  earlier lines: glowplug rollout status {row.name} --json"
    yield from (f"  {date_text(entry.t_wall_ns)}  {text}" for entry, text in told[-TIMELINE_LINES:])


def status_document(record: RolloutRecord, now_ns: int) -> dict[str, Any]:
    """Return the rollout for machines, all of its timeline with it."""
    row, state = record.row, read_state(record.row.state_json)
    lease = _lease(row, now_ns)
    document = {
        **row_document(row),
        "controller": None if lease is None else {"holder": lease[0], "seconds_left": lease[1]},
        "batch": state.batch + 1,
        "failures": state.failures,
        "max_failures": state.rules.max_failures,
        "waiting_for": waiting_for(state),
        "nodes": [
            {
                "node": node.name,
                "batch": node.batch + 1,
                "state": state.word(node),
                "reason": node.skip_reason or node.reason,
                "attempt": node.attempt,
                "out_of_traffic": node.is_out,
                "may_go_on": [{"attempt": one.attempt, "reason": one.reason} for one in node.endings if one.reason],
            }
            for node in state.nodes
        ],
        "gates": [str(gate) for gate in read_settings(row.settings_json).rollout.gates],
        "analysis": encode(state.analysis),
        "timeline": [
            {**{key: value for key, value in vars(entry).items() if key != "data_json"}, "data": _data(entry.data_json)}
            for entry in record.timeline
        ],
    }
    return clean_record(document)


def row_document(row: RolloutRow) -> dict[str, Any]:
    return {
        "rollout": row.name,
        "rollout_uid": row.rollout_uid,
        "recipe": row.recipe,
        "actor": f"{row.actor_user}@{row.actor_host}",
        "phase": row.phase,
        "reason": row.reason,
        "created_ns": row.created_ns,
        "updated_ns": row.updated_ns,
        "finished_ns": row.finished_ns,
    }


def _gate_lines(record: RolloutRecord, state: RolloutState) -> Iterator[str]:
    if state.analysis is None:
        return
    gates = read_settings(record.row.settings_json).rollout.gates
    for count in state.analysis.gates:
        yield f"gate {count.gate + 1} ({gates[count.gate]}): {describe_count(count)}"


def _lease(row: RolloutRow, now_ns: int) -> tuple[str, float] | None:
    lease = lease_of(row, now_ns)
    return None if lease is None else (lease.holder, round((lease.expires_ns - now_ns) / NS_PER_S, 1))


def _controller_note(row: RolloutRow, now_ns: int) -> str:
    return "" if row.finished_ns is not None or _lease(row, now_ns) else "  (nobody carries it out)"


def _controller_line(row: RolloutRow, state: RolloutState, now_ns: int) -> str:
    lease = _lease(row, now_ns)
    if lease is None:
        return f"nobody carries it out: glowplug rollout {verb_to_go_on(state.phase)} {row.name}"
    return f"carried out by {lease[0]}"


def _data(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
