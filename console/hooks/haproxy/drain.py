"""Takes servers out of traffic and waits until nothing is left on them."""

from __future__ import annotations

from collections.abc import Sequence

from console.errors import HookRetry
from console.format import counted
from console.hooks.haproxy.memory import Memory
from console.hooks.haproxy.places import Place, Seen, Tell, look_at, remember, watch
from console.hooks.haproxy.protocol import State

FORCED_S = 5.0
"""What HAProxy may take to end sessions; it needs milliseconds."""


def drain(places: Sequence[Place], memory: Memory, out: State, timeout_s: float, is_forced: bool, tell: Tell) -> Seen:
    """Return once no server has a session or a queued request; ``is_forced`` ends what is left after ``timeout_s``.

    All are asked, and remembered, before the first is changed. Raises: HookRetry with the number of sessions left, or
    where HAProxy can't be asked or was reloaded; HookFailed where it refuses or somebody else changes a server.
    """
    before = look_at(places)
    remember(before, memory, tell)
    for place in places:
        place.change(out)
    seen = _wait(places, before, out, timeout_s, tell)
    if is_forced and (left := _busy(seen)):
        tell(f"after {timeout_s:g} s: {_text(left)}; they are ended")
        for place in left:
            place.end_sessions()
        seen = _wait(places, before, out, FORCED_S, tell)
    left = _busy(seen)
    if left:
        raise HookRetry(f"after {timeout_s:g} s not drained: {_text(left)}")
    return seen


def _wait(places: Sequence[Place], before: Seen, out: State, timeout_s: float, tell: Tell) -> Seen:
    seen, is_told = before, False
    for seen in watch(places, before, out, timeout_s):
        busy = _busy(seen)
        if not busy:
            break
        if not is_told:
            tell(f"waits at most {timeout_s:g} s: {_text(busy)}")
            is_told = True
    return seen


def _busy(seen: Seen) -> Seen:
    return {place: server for place, server in seen.items() if server.sessions or server.queued}


def _text(left: Seen) -> str:
    return "; ".join(
        f"{place} has {counted(server.sessions, 'session')}, {server.queued} queued" for place, server in left.items()
    )
