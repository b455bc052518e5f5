"""Gives servers their traffic, in steps; what does not hold at a step is taken out of traffic again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from console.errors import HookFailed
from console.hooks.haproxy.memory import Memory
from console.hooks.haproxy.places import Place, Seen, Tell, look_at, remember, watch, whose
from console.hooks.haproxy.protocol import Server, State, Weight, grown

UNCHECKED = "no check"


@dataclass(frozen=True)
class Steps:
    """``weights`` in order, each held for ``step_s``; without any, servers get traffic by the weight they have.

    ``timeout_s``: what a server may take until it is ``UP``. ``max_errors``: by so many its counters of errors may grow
    from the first step to the last. ``needs_check`` refuses servers of which nothing says whether they are up.
    """

    weights: tuple[Weight, ...]
    step_s: float
    timeout_s: float
    max_errors: int
    needs_check: bool


def shift(places: Sequence[Place], memory: Memory, steps: Steps, out: State, tell: Tell) -> Seen:
    """Return once all servers are ``UP`` and held every step.

    All are asked, and remembered, before the first is changed. Raises: HookFailed at a step that does not hold,
    HookRetry where HAProxy can't be asked or was reloaded; either way, and whatever else ends it once the first change
    was begun, servers are put to ``out`` again.
    """
    before = look_at(places)
    check_possible(before, steps)
    remember(before, memory, tell)
    try:
        seen = _shift(places, before, steps, tell)
    except BaseException as error:
        outcome = _put_back(places, out)
        if isinstance(error, HookFailed):
            raise type(error)(f"{error}; {outcome}") from error
        tell(outcome)
        raise
    memory.note_shifted()
    return seen


def check_possible(before: Seen, steps: Steps) -> None:
    """Raises: HookFailed where a server has no check that is needed, or a step comes to no weight at all."""
    for place, server in before.items():
        if steps.needs_check and not server.is_checked:
            raise HookFailed(f"{place}: nothing checks its health: add `check`, or say --allow-unchecked")
        for weight in steps.weights:
            if weight.of(server.configured_weight) < 1:
                raise HookFailed(
                    f"{place}: {weight} of its weight {server.configured_weight} is below 1: "
                    "give it `weight 100` in haproxy.cfg"
                )


def _shift(places: Sequence[Place], before: Seen, steps: Steps, tell: Tell) -> Seen:
    if not steps.weights:
        return _enter(places, before, steps)
    for number, weight in enumerate(steps.weights):
        for place in places:  # before it is ready: it must not see more than the step's share for a moment
            place.change(weight.of(before[place].configured_weight))
        if number == 0:
            _enter(places, before, steps)
        seen = _hold(places, before, steps, weight)
        tell(f"weight {weight}: " + "; ".join(f"{place} is {server}" for place, server in seen.items()))
    return seen


def _enter(places: Sequence[Place], before: Seen, steps: Steps) -> Seen:
    for place in places:
        place.change(State.READY)
    return _wait_up(places, before, steps)


def _hold(places: Sequence[Place], before: Seen, steps: Steps, weight: Weight) -> Seen:
    """Look at servers for a whole step, and until none is about to go down."""
    for seen in watch(places, before, State.READY, steps.step_s):
        for place, server in seen.items():
            expected = weight.of(before[place].configured_weight)
            if server.weight != expected:
                raise HookFailed(f"{place}: has weight {server.weight}, no longer {expected}{whose(server)}")
            if not (server.status.startswith("UP") or _is_up(server, steps)):
                raise HookFailed(f"{place}: went {server.status} at weight {weight}")
            _check_errors(place, server, before, steps)
    return _wait_up(places, before, steps)


def _wait_up(places: Sequence[Place], before: Seen, steps: Steps) -> Seen:
    """Wait for a plain ``UP``: ``UP 1/2`` has failed its last check, or had none yet since it left maintenance."""
    for seen in watch(places, before, State.READY, steps.timeout_s):
        for place, server in seen.items():
            _check_errors(place, server, before, steps)
        missing = [f"{place} is {server.status}" for place, server in seen.items() if not _is_up(server, steps)]
        if not missing:
            return seen
    raise HookFailed(f"after {steps.timeout_s:g} s not UP: {'; '.join(missing)}")


def _is_up(server: Server, steps: Steps) -> bool:
    return server.status == "UP" or (server.status == UNCHECKED and not steps.needs_check)


def _check_errors(place: Place, server: Server, before: Seen, steps: Steps) -> None:
    errors = grown(server.errors, before[place].errors)
    if errors > steps.max_errors:
        raise HookFailed(
            f"{place}: {errors} failed connections, broken answers and 5xx since it got traffic, "
            f"at most {steps.max_errors} may"
        )


def _put_back(places: Sequence[Place], out: State) -> str:
    """Take all out of traffic, whoever of them can be; say how that went."""
    problems = []
    for place in places:
        try:
            place.change(out)
        except HookFailed as error:
            problems.append(str(error))
    return f"could not be put back to {out.value}: {'; '.join(problems)}" if problems else f"back to {out.value}"
