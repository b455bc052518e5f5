"""Brings servers back to what they were before a rollout touched them."""

from __future__ import annotations

from console.errors import HookFailed, HookRetry
from console.hooks.haproxy.admin_socket import AdminSocket
from console.hooks.haproxy.memory import Former, Memory
from console.hooks.haproxy.places import Place, Seen
from console.hooks.haproxy.protocol import Server, State


def restore(memory: Memory) -> Seen:
    """Return what servers are, all as they were; then nothing is remembered any more. Idempotent.

    One that can't be brought back keeps none of the others from it, and all stay remembered.
    Raises: HookRetry, HookFailed with every problem.
    """
    seen: dict[Place, Server] = {}
    problems: list[HookFailed] = []
    for place, former in remembered(memory):
        try:
            for change in changes(former, place.look()):
                place.change(change)
            seen[place] = place.look()
        except HookFailed as error:
            problems.append(error)
    if problems:
        kind = HookRetry if all(isinstance(error, HookRetry) for error in problems) else HookFailed
        raise kind("; ".join(map(str, problems)))
    memory.forget()
    return seen


def remembered(memory: Memory) -> list[tuple[Place, Former]]:
    """Return what there is to be brought back. Raises: HookFailed where the record can't be read."""
    return [(Place(AdminSocket(former.socket), former.server), former) for former in memory.recall().servers]


def changes(former: Former, now: Server) -> tuple[State | int, ...]:
    """Return what is to be set, in the order in which a server has too much traffic at no time."""
    state = (former.state,) if now.state is not former.state else ()
    weight = (former.weight,) if now.weight != former.weight else ()
    return (*weight, *state) if former.state is State.READY else (*state, *weight)
