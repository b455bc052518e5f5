"""A watched node's machine, told what is seen, at times that the test makes up."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from console.watch.machine import (
    HOUR_S,
    Limits,
    Phase,
    Step,
    Told,
    Want,
    Watched,
    checked,
    look,
    stood_down,
    wake_s,
    warmed,
)
from console.watch.standing import Seen
from remote_agent.protocol.messages import ResidentChanged, Tier
from tests.console.happenings import resident

LIMITS = Limits(Tier.RESIDENT, tries=3, first_s=10.0, limit_s=60.0, again_s=5.0)
KEY = ("run-00000001", "cpu")
UP = Seen(True, None, False, Tier.STANDBY, frozenset({KEY}), "boot-1", 7)
GONE = ResidentChanged(resident().resident, "gone", "released by request")
DOWN = Seen(True, None, False, Tier.COLD, frozenset(), "boot-1", 7, (GONE,))
LOST = replace(UP, is_known=False, unreachable="connection refused")
HELD = Watched(Phase.HELD, held=UP)
FALLEN = Watched(Phase.FALLEN, held=UP)


def events(step: Step) -> list[str]:
    return [one.event for one in step[1]]


def test_what_is_at_its_tier_or_warmer_is_held_and_nothing_is_done() -> None:
    """It is told once, after the node's own answer."""
    watched, told, want = look(Watched(), UP, 0.0, LIMITS)
    assert (told, want) == ((), Want.CHECK)
    watched, told, want = checked(watched, UP, "", 0.0, LIMITS)
    assert (told, want) == ((Told("held", Tier.STANDBY),), None)

    assert look(watched, UP, 1.0, LIMITS) == (watched, (), None)
    assert wake_s(watched, 1.0) is None


def test_what_is_cold_in_the_beginning_is_warmed() -> None:
    """It did not fall: nobody saw it warm."""
    watched, _, _ = look(Watched(), DOWN, 0.0, LIMITS)
    watched, told, want = checked(watched, DOWN, "", 0.0, LIMITS)

    assert told == (Told("below", Tier.COLD), Told("warming"))
    assert want is Want.WARM


def test_a_fall_is_asked_once_more_then_told_with_its_cause_and_warmed() -> None:
    """Between the two events of a model that changes hands nothing is told."""
    watched, told, want = look(HELD, DOWN, 0.0, LIMITS)
    assert (told, want) == ((), Want.CHECK)
    assert look(watched, DOWN, 0.1, LIMITS) == (watched, (), None)
    assert checked(watched, UP, "", 0.2, LIMITS)[1:] == ((), None)

    watched, told, want = checked(watched, DOWN, "", 0.2, LIMITS)
    assert told == (Told("fell", Tier.COLD, "released", "released by request"), Told("warming"))
    assert want is Want.WARM
    assert look(watched, DOWN, 0.3, LIMITS)[2] is None
    watched, told, _ = warmed(watched, UP, "", 9.0, 0.5, LIMITS)
    assert told == (Told("back", Tier.STANDBY),)
    assert watched.phase is Phase.HELD


def test_an_unreachable_node_has_not_fallen() -> None:
    """It is told once that it can't be reached, and what it is once it can; tries to connect say nothing."""
    watched, told, want = look(HELD, LOST, 0.0, LIMITS)
    assert (told, want) == ((Told("unreachable", reason="connection refused"),), None)
    connecting = replace(LOST, unreachable=None)
    assert look(watched, connecting, 1.0, LIMITS) == (watched, (), None)
    assert look(watched, LOST, 2.0, LIMITS) == (watched, (), None)

    watched, told, want = look(watched, UP, 3.0, LIMITS)
    assert (told, want) == ((), Want.CHECK)
    assert checked(watched, UP, "", 3.0, LIMITS)[1] == (Told("reachable", Tier.STANDBY),)
    rebooted = replace(DOWN, boot_id="boot-2", gone=())
    assert checked(watched, rebooted, "", 3.0, LIMITS)[1][:2] == (
        Told("reachable", Tier.COLD),
        Told("fell", Tier.COLD, "host_rebooted", "the host was booted since"),
    )


def test_a_node_that_is_lost_while_it_is_asked_is_asked_again() -> None:
    """Nothing is concluded from no answer, be the link seen to be lost or not."""
    watched, _, _ = look(HELD, DOWN, 0.0, LIMITS)
    silent, told, want = checked(watched, Seen(), "", 0.0, LIMITS)
    assert (told, want, wake_s(silent, 0.0)) == ((), None, 5.0)
    assert look(silent, DOWN, 4.9, LIMITS)[2] is None
    assert look(silent, DOWN, 5.0, LIMITS)[2] is Want.CHECK
    assert events(checked(watched, LOST, "", 0.0, LIMITS)) == ["unreachable"]


def test_nothing_is_loaded_where_somebody_else_is_at_work() -> None:
    """It is told once who, looked at again soon, and what they warm is back."""
    watched, _, _ = look(HELD, DOWN, 0.0, LIMITS)
    watched, told, want = checked(watched, DOWN, "rollout x is at it", 0.0, LIMITS)
    assert ([one.event for one in told], want, wake_s(watched, 0.0)) == (["fell", "left_alone"], None, 5.0)

    watched, _, want = look(watched, DOWN, 5.0, LIMITS)
    assert want is Want.CHECK
    again = checked(watched, DOWN, "rollout x is at it", 5.0, LIMITS)
    other = checked(watched, DOWN, "ada is at it", 5.0, LIMITS)
    assert (events(again), events(other)) == ([], ["left_alone"])
    assert checked(watched, DOWN, "", 5.0, LIMITS)[2] is Want.WARM
    watched, _, want = look(again[0], UP, 6.0, LIMITS)
    assert want is Want.CHECK, "before its time: it is warm"
    assert events(checked(watched, UP, "", 6.0, LIMITS)) == ["back"]


def test_each_failure_in_a_row_waits_longer_by_chance_up_to_a_limit() -> None:
    """Between half and all of 10, 20, 40, 60, 60 s; a success begins anew."""
    for failures, most_s in enumerate((10.0, 20.0, 40.0, 60.0, 60.0)):
        tried = replace(FALLEN, phase=Phase.WARMING, failures=failures)
        for chance, share in ((0.0, 0.5), (1.0, 1.0)):
            watched, told, _ = warmed(tried, DOWN, "no memory", 100.0, chance, LIMITS)
            assert told == (Told("failed", reason="no memory", again_s=most_s * share),)
            assert look(watched, DOWN, 100.0 + most_s * share - 0.1, LIMITS)[2] is None
            assert look(watched, DOWN, 100.0 + most_s * share, LIMITS)[2] is Want.CHECK
            assert (watched.failures, watched.phase) == (failures + 1, Phase.FALLEN)
    assert warmed(replace(FALLEN, phase=Phase.WARMING, failures=3), UP, "", 0.0, 0.0, LIMITS)[0].failures == 0


def test_a_run_that_is_ready_and_too_cold_is_a_failure() -> None:
    """Where the weights could not be kept, loading them again and again helps nobody."""
    cached = replace(DOWN, tier=Tier.CACHED)

    (told,) = warmed(replace(FALLEN, phase=Phase.WARMING), cached, "", 0.0, 0.0, LIMITS)[1]

    assert (told.event, told.reason) == ("failed", "the run is ready, and it is cached only")


def test_so_many_tries_are_made_in_an_hour() -> None:
    """Then it is told when the next one may be, and made then."""
    watched, now_s = FALLEN, 0.0
    for _ in range(LIMITS.tries):
        watched, _, want = checked(watched, DOWN, "", now_s, LIMITS)
        assert want is Want.WARM
        watched, now_s = warmed(watched, DOWN, "no memory", now_s, 0.0, LIMITS)[0], now_s + 100.0
    watched, told, want = checked(watched, DOWN, "", now_s, LIMITS)

    assert (told, want) == ((Told("spent", again_s=HOUR_S - now_s),), None)
    assert look(watched, DOWN, HOUR_S - 1, LIMITS)[2] is None
    assert checked(watched, DOWN, "", HOUR_S, LIMITS)[2] is Want.WARM


def test_a_try_that_was_called_off_when_its_turn_came_is_none() -> None:
    """It counts for nothing, and who was in the way is told."""
    watched, _, _ = checked(FALLEN, DOWN, "", 0.0, LIMITS)
    watched, told, want = stood_down(watched, DOWN, "rollout x is at it", 50.0, LIMITS)
    assert (told, want) == ((Told("left_alone", reason="rollout x is at it"),), None)
    assert (watched.tried_s, watched.failures) == ((), 0)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([UP, DOWN, LOST, replace(LOST, unreachable=None), Seen(), replace(DOWN, tier=Tier.CACHED)]),
            st.sampled_from(["", "", "somebody"]),
            st.sampled_from(["", "failed"]),
            st.floats(0.0, 1000.0),
        ),
        max_size=60,
    )
)
def test_whatever_happens_falls_and_returns_alternate_and_tries_keep_within_their_number(
    steps: list[tuple[Seen, str, str, float]],
) -> None:
    """Nothing is warmed twice at once, nothing without a right to it, and no two of a kind follow each other."""
    watched, want, now_s, told, tries = Watched(), None, 0.0, list[str](), list[float]()
    for seen, in_the_way, failure, later_s in steps:
        now_s += later_s
        before = want
        if want is Want.WARM:
            watched, news, want = warmed(watched, seen, failure, now_s, 0.5, LIMITS)
        elif want is Want.CHECK:
            watched, news, want = checked(watched, seen, in_the_way, now_s, LIMITS)
            assert want is not Want.WARM or not in_the_way
        else:
            watched, news, want = look(watched, seen, now_s, LIMITS)
            assert want is not Want.WARM
        assert look(watched, seen, now_s, LIMITS)[2] is None or want is None
        told += [one.event for one in news]
        if want is Want.WARM:
            assert before is Want.CHECK
            tries = [at_s for at_s in tries if at_s > now_s - HOUR_S] + [now_s]
            assert len(tries) <= LIMITS.tries

    falls = [event for event in told if event in ("held", "below", "fell", "back")]
    assert all(one != other for one, other in itertools.pairwise(falls))
    links = [event for event in told if event in ("unreachable", "reachable")]
    assert links == (["unreachable", "reachable"] * len(links))[: len(links)]
    assert told.count("warming") >= told.count("failed")
