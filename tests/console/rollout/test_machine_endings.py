"""Attempts whose nodes do not say that they have ended: asked again, kept in sight, and held up by nothing."""

from __future__ import annotations

from console.rollout import events as e
from console.rollout.advance import waiting_for
from console.rollout.endings import MOST_ASKS, may_go_on
from console.rollout.states import Ending, NodeState, Phase
from tests.console.rollout.world import THREE, World, rules

WHY = "no answer within 10 s"
STOP = e.StopNode("a", 1)


def silent(again: int = 1) -> World:
    """Return a rollout whose first node was skipped, and has not answered so many times."""
    world = World(rules(hooks=(), max_failures=2, node_timeout_s=1e6, progress_deadline_s=1e6), THREE, ends=False)
    world.do(e.Skip("a", "bad disk"), e.StopEnded("a", 1, False, WHY))
    for _ in range(again - 1):
        world.tick(300)
        world.do(e.StopEnded("a", 1, False, WHY))
    return world


def test_a_node_that_does_not_answer_is_asked_again_with_growing_waits_while_the_rollout_goes_on() -> None:
    """The others are warmed meanwhile; once it answers nothing is left to say."""
    world = silent()
    assert world.row("b").state is NodeState.WARMING
    assert list(may_go_on(world.state, world.row("a"))) == [
        f"the run of attempt 1 may go on there: {WHY}; it is asked again"
    ]
    for wait_s in (10, 20, 40):
        world.tick(wait_s - 1)
        assert STOP not in world.last
        world.tick(1)
        assert STOP in world.last
        world.do(e.StopEnded("a", 1, False, WHY))
    world.tick(80)
    world.do(e.StopEnded("a", 1, True))

    assert world.row("a").endings == ()
    world.tick(1000)
    assert STOP not in world.last


def test_it_is_asked_so_often_and_anew_once_its_link_is_back_or_at_an_abort_or_a_restart() -> None:
    """For good it is never given up, and its answer to the last of them counts."""
    for event in (e.AvailabilityChanged("a", False), e.Abort(), e.Restarted(0.0)):
        world = silent(MOST_ASKS)
        assert world.wanted(e.StopNode).count(STOP) == MOST_ASKS
        assert list(may_go_on(world.state, world.row("a"))) == [
            f"the run of attempt 1 may go on there: {WHY}; asked 8 times, and again once its link is back"
        ]
        world.tick(5000)
        assert STOP not in world.last
        world.do(event)
        assert STOP in world.last
        world.do(e.StopEnded("a", 1, True))
        assert world.row("a").endings == ()


def test_an_end_that_a_restart_cut_off_is_asked_for_again() -> None:
    """Whoever asked is gone, and with it the answer."""
    world = World(rules(hooks=()), THREE, ends=False)
    world.do(e.Skip("a", "bad disk"), e.Restarted(0.0))

    assert STOP in world.last
    assert world.row("a").endings == (Ending(1),)


def test_a_rollout_waits_for_an_answer_before_it_is_over_and_for_no_second_one() -> None:
    """What is left then stands in its last state."""
    world = World(rules(hooks=()), ends=False)
    world.do(e.Abort())
    assert world.state.phase is Phase.ABORTING
    assert waiting_for(world.state) == ("a: the end of its run",)
    world.do(e.StopEnded("a", 1, False, WHY))

    assert world.state.phase is Phase.ABORTED
    assert list(may_go_on(world.state, world.row("a"))) == [f"the run of attempt 1 may go on there: {WHY}"]


def test_each_attempt_is_ended_for_itself() -> None:
    """The answer about one says nothing of another, and one that nobody waits for nothing at all."""
    world = silent()
    world.do(e.StopEnded("a", 1, True), e.StopEnded("a", 7, False, WHY), e.StopEnded("x", 1, False, WHY))
    assert world.row("a").endings == ()
    again = World(rules(hooks=(), retries=1, backoff_s=1.0, node_timeout_s=60.0), ends=False)
    again.tick(60)
    again.do(e.StopEnded("a", 1, False, WHY))
    again.tick(1)
    assert again.row("a").attempt == 2
    again.tick(60)
    again.do(e.StopEnded("a", 2, True))

    assert [one.attempt for one in again.row("a").endings] == [1]
