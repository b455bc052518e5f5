"""One watched node, from what is seen of it to what is to be done. Pure: the time and the chance are handed in.

A node that can't be reached has not fallen. What looks fallen is asked once more before it is said, and nothing is
loaded where a rollout or anybody else is at work. One thing at a time is wanted: `Want.CHECK` is answered by `checked`,
`Want.WARM` by `warmed`; everything else that changes is told by `look`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from console.watch.causes import why_fell
from console.watch.standing import Seen, is_at
from remote_agent.protocol.messages import Tier

HOUR_S = 3600.0


class Phase(str, enum.Enum):
    UNKNOWN = "unknown"
    HELD = "held"
    FALLEN = "fallen"
    WARMING = "warming"


class Want(enum.Enum):
    CHECK = "check"
    WARM = "warm"


@dataclass(frozen=True)
class Limits:
    """``tier``: what is kept. After the n-th failure in a row a try waits between half and all of ``first_s`` · 2ⁿ⁻¹,
    at most ``limit_s``. ``tries``: at most so many in an hour. ``again_s``: when to look again at what is in the way.
    """

    tier: Tier
    tries: int = 6
    first_s: float = 10.0
    limit_s: float = 600.0
    again_s: float = 5.0


@dataclass(frozen=True)
class Watched:
    """``held``: as the node was seen last while it was at its tier. ``tried_s``: when tries began, within an hour.

    ``wait_s``: nothing is wanted before. ``is_lost``: that it can't be reached was told. ``in_the_way``: what was told.
    """

    phase: Phase = Phase.UNKNOWN
    is_checking: bool = False
    is_lost: bool = False
    held: Seen = field(default_factory=Seen)
    failures: int = 0
    tried_s: tuple[float, ...] = ()
    wait_s: float = 0.0
    in_the_way: str = ""


@dataclass(frozen=True)
class Told:
    """Something to say of a node: ``event`` is stable, the rest as it applies. ``again_s``: from now on."""

    event: str
    tier: Tier | None = None
    cause: str | None = None
    reason: str | None = None
    again_s: float | None = None


Step = tuple[Watched, tuple[Told, ...], Want | None]


def look(watched: Watched, seen: Seen, now_s: float, limits: Limits) -> Step:
    """Return what follows from a change, or from the time that passed."""
    if not seen.is_known:
        return _not_known(watched, seen)
    if watched.is_checking or watched.phase is Phase.WARMING or seen.tier is None:
        return watched, (), None
    is_up = is_at(seen.tier, limits.tier)
    if watched.phase is Phase.HELD and is_up and not watched.is_lost:
        return replace(watched, held=seen), (), None
    if now_s < watched.wait_s and not (watched.phase is Phase.FALLEN and is_up):
        return watched, (), None
    return replace(watched, is_checking=True), (), Want.CHECK


def checked(watched: Watched, seen: Seen, in_the_way: str, now_s: float, limits: Limits) -> Step:
    """Return what follows from the node's own answer. ``in_the_way``: who else is at work on it, or nothing."""
    watched = replace(watched, is_checking=False, wait_s=now_s + limits.again_s)
    if not seen.is_known or seen.tier is None:
        return _not_known(watched, seen)
    told = (Told("reachable", seen.tier),) if watched.is_lost else ()
    watched = replace(watched, is_lost=False)
    if is_at(seen.tier, limits.tier):
        event = {Phase.UNKNOWN: "held", Phase.FALLEN: "back"}.get(watched.phase)
        return _at_tier(watched, seen), (*told, *((Told(event, seen.tier),) if event else ())), None
    if watched.phase is not Phase.FALLEN:
        told = (*told, _fell(watched, seen))
        watched = replace(watched, phase=Phase.FALLEN)
    if in_the_way:
        news = (Told("left_alone", reason=in_the_way),) if in_the_way != watched.in_the_way else ()
        return replace(watched, in_the_way=in_the_way), (*told, *news), None
    return _try(replace(watched, in_the_way=""), told, now_s, limits)


def stood_down(watched: Watched, seen: Seen, in_the_way: str, now_s: float, limits: Limits) -> Step:
    """Return what follows where a try's turn came, and ``in_the_way`` by then was somebody: it was none."""
    watched = replace(watched, phase=Phase.FALLEN, tried_s=watched.tried_s[:-1])
    return checked(watched, seen, in_the_way, now_s, limits)


def warmed(watched: Watched, seen: Seen, failure: str, now_s: float, chance: float, limits: Limits) -> Step:
    """Return what follows from a try that is over. ``failure``: why it came to nothing; ``chance``: within 0..1."""
    told = (Told("reachable", seen.tier),) if watched.is_lost and seen.is_known else ()
    watched = replace(watched, is_lost=watched.is_lost and not seen.is_known)
    if not failure and seen.tier is not None and is_at(seen.tier, limits.tier):
        return _at_tier(watched, seen), (*told, Told("back", seen.tier)), None
    if not failure:
        failure = f"the run is ready, and it is {seen.tier.value if seen.tier else 'not known'} only"
    wait_s = min(limits.limit_s, limits.first_s * 2 ** min(watched.failures, 30)) * (1 + chance) / 2
    watched = replace(watched, phase=Phase.FALLEN, failures=watched.failures + 1, wait_s=now_s + wait_s)
    return watched, (*told, Told("failed", reason=failure, again_s=wait_s)), None


def wake_s(watched: Watched, now_s: float) -> float | None:
    """Return when to look again though nothing changes; None where only a change can lead further."""
    return watched.wait_s if watched.wait_s > now_s and watched.phase is not Phase.WARMING else None


def _not_known(watched: Watched, seen: Seen) -> Step:
    if seen.unreachable is None or watched.is_lost:
        return watched, (), None
    return replace(watched, is_lost=True), (Told("unreachable", reason=seen.unreachable),), None


def _at_tier(watched: Watched, seen: Seen) -> Watched:
    return replace(watched, phase=Phase.HELD, held=seen, failures=0, wait_s=0.0, in_the_way="")


def _fell(watched: Watched, seen: Seen) -> Told:
    if watched.phase is Phase.UNKNOWN:
        return Told("below", seen.tier)
    cause, reason = why_fell(watched.held, seen)
    return Told("fell", seen.tier, cause, reason)


def _try(watched: Watched, told: tuple[Told, ...], now_s: float, limits: Limits) -> Step:
    tried_s = tuple(at_s for at_s in watched.tried_s if at_s > now_s - HOUR_S)
    if len(tried_s) >= limits.tries:
        again_s = tried_s[0] + HOUR_S - now_s
        watched = replace(watched, tried_s=tried_s, wait_s=now_s + again_s)
        return watched, (*told, Told("spent", again_s=again_s)), None
    watched = replace(watched, phase=Phase.WARMING, tried_s=(*tried_s, now_s))
    return watched, (*told, Told("warming")), Want.WARM
