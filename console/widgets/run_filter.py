"""The history's filter: ``node:gpu-eu-01 recipe:llama-7b state:failed since:7d``. Pure."""

from __future__ import annotations

import re

from console.widgets.node_filter import FilterError
from db.records import RunFilter
from remote_agent.protocol.messages import RunState

KEYS = ("node", "recipe", "state", "since")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
STATES = tuple(state.value for state in RunState)


def parse_run_filter(text: str, now_ns: int, limit: int) -> RunFilter:
    """Return the filter that ``text`` means; a bare word is a node.

    Raises: FilterError for a key, a state or an age that there is not.
    """
    found: dict[str, str] = {}
    for word in text.split():
        key, colon, value = word.partition(":")
        key, value = (key.casefold(), value) if colon else ("node", word)
        if key not in KEYS:
            raise FilterError(f"{key}: is not a key; keys are {', '.join(f'{known}:' for known in KEYS)}")
        if value:
            found[key] = value
    since = found.get("since")
    return RunFilter(
        node=found.get("node"),
        recipe=found.get("recipe"),
        state=_state(found["state"]) if "state" in found else None,
        since_ns=now_ns - _age_ns(since) if since is not None else None,
        limit=limit,
    )


def _state(value: str) -> str:
    fits = [state for state in STATES if state.startswith(value.casefold())]
    if value.casefold() in fits:
        return value.casefold()
    if len(fits) != 1:
        raise FilterError(f"state:{value}: states are {', '.join(STATES)}")
    return fits[0]


def _age_ns(value: str) -> int:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", value)
    if match is None:
        raise FilterError(f"since:{value}: write an age like 30m, 12h, 7d or 2w")
    return int(match[1]) * _UNITS_S[match[2]] * 1_000_000_000
