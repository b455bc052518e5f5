"""The rules of a rollout, one by one."""

from __future__ import annotations

from console.rollout import events as e
from console.rollout.advance import waiting_for
from console.rollout.states import NodeState, Phase
from tests.console.rollout.world import THREE, World, ready, rules

# --- the way of one node, and of batches ---------------------------------------


def test_a_node_is_drained_warmed_verified_shifted_and_then_ready() -> None:
    """Each hook is asked for in its turn, and the rollout ends with its last node."""
    world = World(rules())
    assert world.last == (e.StartNode("a", 1, ("before_shift", "warm")),)
    world.do(e.NodeReached("a", 1, NodeState.WARMING))
    assert world.row("a").is_out
    world.warm("a")
    assert world.last == (e.RunHook("a", 1, "shift"),)
    world.end_hook("a")
    assert world.last == (e.RunHook("a", 1, "after_shift"),)
    world.end_hook("a")

    assert world.row("a").state is NodeState.READY
    assert world.last == (e.Finish(False, "1 ready"),)
    assert world.state.phase is Phase.DONE


def test_without_hooks_a_node_is_ready_once_it_is_verified() -> None:
    """Nothing is drained, so nothing can be left out of traffic."""
    world = World(rules(hooks=()))
    assert world.last == (e.StartNode("a", 1, ("warm",)),)
    world.warm("a")

    assert world.state.phase is Phase.DONE


def test_the_next_batch_begins_when_every_node_of_the_one_before_is_over() -> None:
    """A batch at a time, and within it as many as may be unavailable."""
    world = World(rules(max_unavailable=2), THREE)
    assert [intent.node for intent in world.wanted(e.StartNode)] == ["a"]
    ready(world, "a")

    assert [intent.node for intent in world.wanted(e.StartNode)] == ["a", "b", "c"]


def test_a_node_that_is_down_already_counts_as_unavailable() -> None:
    """With max_unavailable 1 nobody else is started; the one that is down makes it no worse and may be."""
    world = World(rules(max_unavailable=1), (("a", "b"),), down=("b",))
    assert [intent.node for intent in world.wanted(e.StartNode)] == ["b"]
    assert waiting_for(world.state) == ("a: max_unavailable 1 is reached", "b: draining")
    ready(world, "b")

    assert [intent.node for intent in world.wanted(e.StartNode)] == ["b", "a"]


def test_a_pause_after_a_batch_waits_for_the_operator_once() -> None:
    """Resumed, the next batch begins; a restart in between does not make it pause again."""
    world = World(rules(pause_after=(1,)), THREE)
    ready(world, "a")
    assert world.last == (e.Paused("after batch 1"),)
    assert waiting_for(world.state) == ("the operator: after batch 1",)
    world.do(e.Restarted(0.0), e.Resume())

    assert world.row("b").state is NodeState.DRAINING


def test_a_paused_rollout_begins_nothing_and_notes_what_ends() -> None:
    """What is warm waits; resumed, it is shifted."""
    world = World(rules(), THREE)
    world.do(e.Pause("lunch"))
    world.warm("a")
    assert world.row("a").state is NodeState.VERIFYING
    assert not world.wanted(e.RunHook)
    world.do(e.Resume())

    assert world.last == (e.RunHook("a", 1, "shift"),)


# --- failures --------------------------------------------------------------------


def test_a_failed_try_is_made_again_after_a_backoff_that_doubles() -> None:
    """Each is a new attempt, and only the last one's failure is the node's."""
    world = World(rules(retries=2, backoff_s=10.0, max_failures=2))
    world.fail("a")
    assert world.row("a").state is NodeState.PENDING
    assert waiting_for(world.state) == ("a: attempt 2 in 10 s",)
    world.tick(9)
    assert len(world.wanted(e.StartNode)) == 1
    world.tick(1)
    assert world.last == (e.StartNode("a", 2, ("before_shift", "warm")),)
    world.fail("a")
    world.tick(19)
    assert len(world.wanted(e.StartNode)) == 2
    world.tick(1)
    world.fail("a")

    assert world.row("a").state is NodeState.FAILED
    assert world.state.failures == 1


def test_max_failures_holds_for_the_whole_rollout_not_for_a_batch() -> None:
    """One failure in each of two batches reaches 2."""
    world = World(rules(max_failures=2, hooks=()), (("a", "b"), ("c", "d")))
    world.fail("a")
    ready(world, "b")
    assert world.state.phase is Phase.RUNNING
    world.fail("c")

    assert world.state.phase is Phase.ABORTED
    assert world.last[-1] == e.Finish(True, "2 failed, max_failures 2: a, c")


def test_failed_unreachable_and_timed_out_all_count() -> None:
    """Three nodes, three ways, one count."""
    world = World(rules(max_failures=3, max_unavailable=3, node_timeout_s=60.0, hooks=()), (("a", "b", "c", "d"),))
    world.fail("a")
    world.fail("b", "no route to host", unreachable=True)
    ready(world, "d")
    assert world.state.failures == 2
    world.tick(60)

    assert world.row("c").reason == "warming took over 60 s"
    assert e.StopNode("c", 1) in world.asked
    assert world.state.phase is Phase.ABORTED


def test_a_node_that_fails_is_backed_out_at_once_and_its_place_is_free_after() -> None:
    """Without an abort too: nothing stays out of traffic because others go on."""
    world = World(rules(max_failures=2), (("a", "b"),))
    world.fail("a")
    assert world.last == (e.BackOutNode("a", 1),)
    assert waiting_for(world.state) == ("a: back into its traffic", "b: max_unavailable 1 is reached")
    world.do(e.BackedOut("a", True))

    assert world.last == (e.StartNode("b", 1, ("before_shift", "warm")),)


def test_a_node_that_can_not_be_backed_out_is_named_until_a_person_says_why_it_may_be_left() -> None:
    """It is not forgotten at the end of the rollout either."""
    world = World(rules(max_failures=2))
    world.fail("a")
    world.do(e.BackedOut("a", False, "haproxy does not answer"))
    assert world.state.phase is Phase.PAUSED
    assert "the operator: a is out of traffic and could not be backed out" in waiting_for(world.state)
    world.do(e.Resume())
    assert world.last == (e.Paused("out of traffic and not backed out: a"),)
    world.do(e.Skip("a", "put back by hand"), e.Resume())

    assert world.state.phase is Phase.DONE
    assert world.row("a").skip_reason == "put back by hand"


def test_no_progress_within_the_deadline_aborts() -> None:
    """The time counts from the last node that became ready, and not while it is paused."""
    world = World(rules(progress_deadline_s=100.0, node_timeout_s=5000.0), THREE)
    world.tick(99)
    ready(world, "a")
    world.do(e.Pause())
    world.tick(500)
    world.do(e.Resume())
    world.tick(99)
    assert world.state.phase is Phase.RUNNING
    world.tick(1)

    assert world.state.phase is Phase.ABORTING
    assert world.state.reason == "no progress for 100 s"
