"""What an entry of a rollout's timeline says to a person: one line, or nothing where another entry says it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from db.rollout_records import Entry, TimelineRow

Data = Mapping[str, Any]


def line(entry: Entry | TimelineRow) -> str | None:
    """Return the entry's line; its texts were cleaned when they were stored, and are again where they are shown."""
    try:
        data = json.loads(entry.data_json)
    except ValueError:
        return None
    if entry.kind == "command":
        return f"{data.get('by', '?')}: {entry.what}: {data.get('answer', '')}"
    words = _WORDS.get((entry.kind, entry.what))
    if words is None or not isinstance(data, dict):
        return None
    said = words(data)
    node = f"{entry.node}: " if entry.node else ""
    return f"{node}{said}" if said else None


def _with_reason(text: str, data: Data) -> str:
    return f"{text}: {data['reason']}" if data.get("reason") else text


def _hook_ended(data: Data) -> str:
    return f"hook {data.get('hook')} done" if data.get("succeeded") else _with_reason(f"hook {data.get('hook')}", data)


def _sampled(data: Data) -> str:
    return _with_reason(f"gate {int(data.get('gate', 0)) + 1}, sample: {data.get('verdict')}", data)


_WORDS: dict[tuple[str, str], Callable[[Data], str]] = {
    ("event", "Begin"): lambda data: "begun",
    ("event", "Restarted"): lambda data: "taken over; what was under way is read from its nodes",
    ("event", "NodeReached"): lambda data: _with_reason(str(data.get("state")), data),
    ("event", "HookEnded"): _hook_ended,
    ("event", "BackedOut"): lambda data: _with_reason(
        "backed out" if data.get("succeeded") else "not backed out", data
    ),
    ("event", "StopEnded"): lambda data: _with_reason(
        "its run has ended" if data.get("succeeded") else "its run may go on there", data
    ),
    ("event", "GateSampled"): _sampled,
    ("event", "AvailabilityChanged"): lambda data: "out of reach" if data.get("is_down") else "can be reached again",
    ("intent", "StartNode"): lambda data: " then ".join(data.get("steps", ())),
    ("intent", "StopNode"): lambda data: "called off",
    ("intent", "RunHook"): lambda data: f"hook {data.get('hook')}",
    ("intent", "BackOutNode"): lambda data: "is backed out",
    ("intent", "ReadNode"): lambda data: "is asked what became of it",
    ("controller", "Paused"): lambda data: _with_reason("paused", data),
    ("controller", "Finish"): lambda data: _with_reason("aborted" if data.get("aborted") else "done", data),
}
