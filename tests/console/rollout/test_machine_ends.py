"""What an abort, a skip, a restart and a node out of sight do to a rollout."""

from __future__ import annotations

import pytest

from console.rollout import events as e
from console.rollout.advance import waiting_for
from console.rollout.states import BackOut, NodeState, Phase, Verdict
from tests.console.rollout.world import THREE, World, gate, gated, ready, rules


def test_an_abort_leaves_what_is_ready_and_backs_out_what_is_not() -> None:
    """The one that is ready is never drained."""
    world = World(rules(), THREE)
    ready(world, "a")
    world.do(e.Abort())

    assert world.last == (e.StopNode("b", 1), e.BackOutNode("b", 1))
    assert world.row("a").state is NodeState.READY


def test_a_second_abort_asks_again_for_what_could_not_be_backed_out() -> None:
    """Until then it waits for the operator, by name."""
    world = World(rules())
    world.do(e.Abort(), e.BackedOut("a", False, "no socket"))
    assert world.row("a").back_out is BackOut.FAILED
    assert waiting_for(world.state) == ("the operator: a is out of traffic and could not be backed out",)
    world.do(e.Abort())
    assert world.last == (e.BackOutNode("a", 1),)
    world.do(e.BackedOut("a", True))

    assert world.state.phase is Phase.ABORTED


def test_an_abort_asks_again_for_what_could_not_be_backed_out_before_it() -> None:
    """Else the node would stay out of traffic, and the rollout aborting, until somebody thinks of a second one."""
    world = World(rules(max_failures=2))
    world.fail("a")
    world.do(e.BackedOut("a", False, "haproxy does not answer"), e.Abort())
    assert world.last[-1] == e.BackOutNode("a", 1)
    world.do(e.BackedOut("a", True))

    assert world.state.phase is Phase.ABORTED


@pytest.mark.parametrize("reason", ["", "   "])
def test_a_skip_needs_a_reason(reason: str) -> None:
    """Without one nothing happens."""
    world = World(rules(), THREE)
    world.do(e.Skip("b", reason))

    assert world.row("b").state is NodeState.PENDING


def test_a_skip_keeps_its_reason_and_backs_out_what_it_stops() -> None:
    """The rollout goes on with the others once the node is back."""
    world = World(rules(), THREE)
    world.do(e.Skip("a", "bad disk"))
    assert world.last == (e.StopNode("a", 1), e.BackOutNode("a", 1))
    world.do(e.BackedOut("a", True))

    assert world.row("a").skip_reason == "bad disk"
    assert world.row("b").state is NodeState.DRAINING


def test_after_a_restart_it_stays_paused_until_every_state_was_read() -> None:
    """Resume and promote only say what is missing; then it goes on from what was read."""
    world = World(rules(), THREE)
    world.do(e.NodeReached("a", 1, NodeState.WARMING))
    wanted = world.do(e.Restarted(0.0))
    assert wanted == (e.ReadNode("a", 1), e.Paused("restarted"))
    assert world.row("a").state is NodeState.UNKNOWN
    world.do(e.Resume())
    assert world.last == (e.Paused("the state of a is not known yet"),)
    world.warm("a")
    assert world.last == ()
    world.do(e.Resume())

    assert world.last == (e.RunHook("a", 1, "shift"),)


def test_a_node_read_as_ready_that_was_never_verified_is_looked_at_first() -> None:
    """What a host says does not take the place of the gates."""
    world = World(rules(gates=(gate(),)), THREE)
    world.do(e.Restarted(0.0), e.NodeReached("a", 1, NodeState.READY), e.Resume())

    assert world.last == (e.TakeSample(1, 0, ("a",)),)


def test_an_abort_asks_a_node_that_nobody_can_see_before_it_is_backed_out() -> None:
    """It may have become ready, and what is ready is not drained; one that never answers is backed out."""
    became, never = World(rules()), World(rules(node_timeout_s=60.0, retries=3))
    for world in (became, never):
        world.warm("a")
        world.do(e.Restarted(0.0), e.Abort())
        assert world.last == (e.ReadNode("a", 1),)
    became.do(e.NodeReached("a", 1, NodeState.READY))
    never.tick(60)

    assert became.state.phase is Phase.ABORTED
    assert not became.wanted(e.BackOutNode)
    assert never.last == (e.StopNode("a", 1), e.BackOutNode("a", 1))
    assert never.row("a").state is NodeState.FAILED


def test_a_hook_that_a_restart_cut_off_is_run_again() -> None:
    """A shift half done is done whole, in the same attempt."""
    world = World(rules())
    world.warm("a")
    world.do(e.Restarted(0.0), e.NodeReached("a", 1, NodeState.SHIFTING), e.Resume())

    assert world.last == (e.RunHook("a", 1, "shift"),)


def test_a_back_out_that_a_restart_cut_off_is_asked_for_again() -> None:
    """At once, paused or not: the node is out of traffic."""
    world = World(rules(max_failures=2), (("a", "b"),))
    world.fail("a")
    world.do(e.Restarted(0.0))

    assert e.BackOutNode("a", 1) in world.last


def test_what_an_older_attempt_still_says_changes_nothing() -> None:
    """Neither its failure nor that it is warm."""
    world = World(rules(retries=1, backoff_s=1.0))
    world.fail("a")
    world.tick(1)
    before = world.state
    for state in (NodeState.FAILED, NodeState.VERIFYING):
        world.do(e.NodeReached("a", 1, state))

    assert world.state == before


def test_a_node_that_is_tried_again_is_still_out_of_traffic() -> None:
    """An abort between two tries, or in the second, backs it out."""
    for seconds in (0, 1):
        world = World(rules(retries=1, backoff_s=1.0))
        world.fail("a")
        world.tick(seconds)
        world.do(e.Abort())

        assert world.last[-1] == e.BackOutNode("a", 1 + seconds)


@pytest.mark.parametrize("said", [NodeState.READY, NodeState.SHIFTING])
def test_a_node_whose_shift_never_began_is_not_ready_because_its_host_says_so(said: NodeState) -> None:
    """Its gate passed in a pause, and then it was out of sight: it is looked at again, and shifted."""
    world = gated()
    world.do(e.Pause())
    world.sample(Verdict.PASS)
    assert world.row("a").is_verified
    world.do(e.NodeReached("a", 1, NodeState.UNKNOWN), e.NodeReached("a", 1, said), e.Resume())
    assert world.last == (e.TakeSample(2, 0, ("a",)),)
    world.sample(Verdict.PASS)

    assert world.last == (e.RunHook("a", 1, "shift"),)


def test_a_hook_of_a_node_out_of_sight_begins_no_other_after_an_abort() -> None:
    """Only what the node is read to be counts then."""
    world = World(rules())
    world.warm("a")
    world.do(e.NodeReached("a", 1, NodeState.UNKNOWN), e.Abort(), e.HookEnded("a", 1, "shift", True))

    assert world.last == ()
    assert waiting_for(world.state) == ("a: its state; skip leaves it out",)


def test_a_shift_that_fails_is_backed_out_though_nothing_was_drained() -> None:
    """Half of its traffic may be there already."""
    world = World(rules(hooks=("shift", "on_abort"), max_failures=2))
    world.warm("a")
    world.end_hook("a", succeeded=False)

    assert world.row("a").reason == "hook shift: exit 1"
    assert world.last == (e.BackOutNode("a", 1),)


def test_an_attempt_that_a_restart_cut_off_is_no_failed_try() -> None:
    """Its node is started again from the beginning, and has its one retry still."""
    world = World(rules(retries=1, backoff_s=1.0))
    world.do(e.Restarted(0.0), e.NodeReached("a", 1, NodeState.DRAINING), e.Resume())
    assert world.last == (e.StartNode("a", 2, ("before_shift", "warm")),)
    world.fail("a")
    world.tick(1)

    assert world.last == (e.StartNode("a", 3, ("before_shift", "warm")),)


def test_a_hook_that_ends_while_its_node_is_out_of_sight_counts() -> None:
    """The hook runs beside the console, not on the node."""
    world = World(rules())
    world.warm("a")
    world.do(e.NodeReached("a", 1, NodeState.UNKNOWN), e.HookEnded("a", 1, "shift", True))

    assert world.last == (e.RunHook("a", 1, "after_shift"),)


def test_a_node_that_waited_long_at_its_gate_has_its_whole_time_out_once_it_is_out_of_sight() -> None:
    """Waiting for others is not the node's own time."""
    world = World(rules(node_timeout_s=60.0), THREE)
    world.do(e.Pause())
    world.warm("a")
    world.tick(1000)
    world.do(e.NodeReached("a", 1, NodeState.UNKNOWN))
    world.tick(59)
    assert world.row("a").state is NodeState.UNKNOWN
    world.tick(1)

    assert world.row("a").state is NodeState.FAILED
