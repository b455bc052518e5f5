"""The rules of a rollout, one by one."""

from __future__ import annotations

import pytest

from console.rollout import events as e
from console.rollout.advance import waiting_for
from console.rollout.states import BackOut, GateRule, NodeState, Phase, Verdict
from tests.console.rollout.world import World, gate, rules

THREE = (("a",), ("b", "c"))


def ready(world: World, *names: str) -> None:
    """Bring nodes that have been started to the end of their attempt."""
    world.warm(*names)
    for name in names:
        while world.row(name).hook is not None:
            world.end_hook(name)


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


# --- gates -----------------------------------------------------------------------


def gated(*gates: GateRule, **changes: object) -> World:
    """Return a rollout whose first node is warm, and looked at."""
    world = World(rules(gates=gates or (gate(),), **changes), THREE)
    world.warm("a")
    return world


def test_a_gate_takes_its_samples_at_its_interval_and_then_lets_nodes_be_shifted() -> None:
    """Not before the last one."""
    world = gated(gate(count=2, interval_s=5.0))
    assert world.last == (e.TakeSample(1, 0, ("a",)),)
    world.sample(Verdict.PASS)
    world.tick(4)
    assert world.last == ()
    assert waiting_for(world.state) == ("a: verifying", "gate 1: sample 2 of 2")
    world.tick(1)
    assert world.last == (e.TakeSample(1, 0, ("a",)),)
    world.sample(Verdict.PASS)

    assert world.last == (e.RunHook("a", 1, "shift"),)


def test_a_failed_gate_that_makes_too_many_failures_aborts_and_backs_out() -> None:
    """One sample may fail here, two may not, and one node may not fail; it was never shifted."""
    world = gated(gate(count=5, interval_s=1.0, failure_limit=1))
    world.sample(Verdict.FAIL)
    world.tick(1)
    world.sample(Verdict.FAIL)

    assert world.state.phase is Phase.ABORTING
    assert world.state.reason.startswith("gate 1 failed: as told (0 passed, 2 failed, 0 inconclusive)")
    assert world.last == (e.BackOutNode("a", 1),)
    world.do(e.BackedOut("a", True))
    assert world.state.phase is Phase.ABORTED
    assert not world.wanted(e.RunHook)


def test_a_failed_gate_pauses_and_backs_out_where_more_nodes_may_fail() -> None:
    """The canary is fixed and tried again: a new attempt, a new analysis, and the rollout comes to its end."""
    world = gated(max_failures=2, max_unavailable=2, retries=3)
    world.sample(Verdict.FAIL)
    assert world.state.phase is Phase.PAUSED
    assert world.state.reason.startswith("gate 1 failed")
    assert world.last == (e.Paused(world.state.reason), e.BackOutNode("a", 1))
    assert world.row("a").state is NodeState.FAILED
    world.do(e.BackedOut("a", True), e.Retry("a"))
    assert world.last == ()
    world.do(e.Promote())
    assert world.last == (e.StartNode("a", 2, ("before_shift", "warm")),)
    world.warm("a")
    assert world.last == (e.TakeSample(2, 0, ("a",)),)
    world.sample(Verdict.PASS)
    world.end_hook("a")
    world.end_hook("a")
    world.warm("b", "c")
    world.sample(Verdict.PASS)
    for name in ("b", "c"):
        world.end_hook(name)
        world.end_hook(name)

    assert world.last == (e.Finish(False, "3 ready"),)
    assert world.state.failures == 1


def test_a_gate_fails_every_node_that_it_looked_at_and_each_counts_once() -> None:
    """Three at once reach three; one that fails there again does not count again."""
    together = World(rules(max_failures=3, max_unavailable=3, gates=(gate(),)), (("a", "b", "c"),))
    together.warm("a", "b", "c")
    together.sample(Verdict.FAIL)
    assert together.state.phase is Phase.ABORTING
    again = gated(max_failures=2)
    for _ in range(3):
        again.sample(Verdict.FAIL)
        again.do(e.BackedOut("a", True), e.Retry("a"), e.Resume())
        again.warm("a")

    assert again.state.failures == 1
    assert again.state.analysis is not None
    assert again.state.analysis.number == 4


def test_resume_does_not_lead_past_a_failed_gate() -> None:
    """Only the operator's word for it does: the node is tried again, skipped, or left as it is by a promotion."""
    for word in (e.Retry("a"), e.Skip("a", "broken"), None):
        world = gated(max_failures=2)
        world.sample(Verdict.FAIL)
        world.do(e.BackedOut("a", True), e.Resume())
        assert world.state.reason == "a failed at a gate: retry or skip what failed, or promote without it"
        world.do(*((word, e.Resume()) if word else (e.Promote(),)))

        assert world.state.phase is Phase.RUNNING


def test_successes_in_a_row_pass_a_gate_before_its_count() -> None:
    """A failure within the limit begins the row anew; without a row in the end it is inconclusive."""
    rule = gate(count=4, interval_s=1.0, failure_limit=2, consecutive_success=2)
    passing, never = gated(rule), gated(rule)
    for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.PASS, Verdict.PASS):
        passing.sample(verdict)
        passing.tick(1)
    for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.PASS, Verdict.FAIL):
        never.sample(verdict)
        never.tick(1)

    assert passing.row("a").state is NodeState.SHIFTING
    assert never.state.phase is Phase.PAUSED


def test_a_wave_of_a_batch_is_looked_at_together_and_shifted_before_the_next() -> None:
    """Where a batch is larger than what may be unavailable, each wave has an analysis of its own."""
    world = World(rules(max_unavailable=2, gates=(gate(),)), (("a", "b", "c"),))
    world.warm("a")
    assert world.state.analysis is None
    world.warm("b")
    assert world.last == (e.TakeSample(1, 0, ("a", "b")),)
    world.sample(Verdict.PASS)
    for name in ("a", "b"):
        world.end_hook(name)
        world.end_hook(name)
    world.warm("c")

    assert world.last == (e.TakeSample(2, 0, ("c",)),)


def test_a_gate_may_be_for_some_batches_alone() -> None:
    """The canary's gate does not hold up the others."""
    world = gated(gate(batches=(1,)))
    world.sample(Verdict.PASS)
    world.end_hook("a")
    world.end_hook("a")
    world.warm("b")

    assert world.last == (e.RunHook("b", 1, "shift"),)


# --- mistakes that others shipped ---------------------------------------------------


def test_an_inconclusive_gate_is_not_promoted_by_itself() -> None:
    """It pauses, whatever time passes, and also when all later pauses were promoted (argo#3873)."""
    world = World(rules(gates=(gate(),)), THREE)
    world.do(e.Promote(everything=True))
    world.warm("a")
    world.sample(Verdict.INCONCLUSIVE)
    assert world.state.phase is Phase.PAUSED
    world.tick(100_000)

    assert world.row("a").state is NodeState.VERIFYING
    assert not world.wanted(e.RunHook)
    assert "gate 1 is inconclusive" in world.state.reason


def test_a_promoted_rollout_is_not_stuck() -> None:
    """Past an inconclusive gate and a pause it goes on to its end with no further word (argo#3015)."""
    world = gated(gate(), pause_after=(1,), max_unavailable=2)
    world.sample(Verdict.INCONCLUSIVE)
    world.do(e.Promote())
    assert world.last == (e.RunHook("a", 1, "shift"),)
    world.end_hook("a")
    world.end_hook("a")
    assert world.state.reason == "after batch 1"
    world.do(e.Promote())
    world.warm("b", "c")
    world.sample(Verdict.PASS)
    for name in ("b", "c"):
        world.end_hook(name)
        world.end_hook(name)

    assert world.state.phase is Phase.DONE


def test_a_retry_makes_a_new_analysis() -> None:
    """With a new number and no sample; what still comes of the old one counts for nothing (argo#2897)."""
    world = gated(gate(count=2, interval_s=1.0))
    world.sample(Verdict.PASS)
    world.tick(1)
    world.sample(Verdict.INCONCLUSIVE)
    world.do(e.Retry("a"), e.Resume())
    assert e.StartNode("a", 2, ("before_shift", "warm")) in world.last
    world.warm("a")
    assert world.last == (e.TakeSample(2, 0, ("a",)),)
    world.do(e.GateSampled(1, 0, Verdict.PASS), e.GateSampled(1, 0, Verdict.PASS))
    assert world.state.analysis is not None
    assert world.state.analysis.gates[0].taken == 0


def test_a_resume_past_an_inconclusive_gate_makes_a_new_analysis_too() -> None:
    """Resume is no promotion."""
    world = gated()
    world.sample(Verdict.INCONCLUSIVE)
    world.do(e.Resume())

    assert world.last == (e.TakeSample(2, 0, ("a",)),)


def test_an_abort_after_everything_was_promoted_aborts() -> None:
    """Abort beats promote-all, in either order (argo#4461)."""
    world = World(rules(max_unavailable=2), THREE)
    world.do(e.Promote(everything=True), e.Abort("wrong model"), e.Promote(everything=True), e.Resume())
    assert world.state.phase is Phase.ABORTING
    world.do(e.BackedOut("a", True))

    assert world.state.phase is Phase.ABORTED
    assert world.last == (e.Finish(True, "wrong model"),)
    assert [intent.node for intent in world.wanted(e.StartNode)] == ["a"]


def test_nothing_is_tried_again_after_an_abort() -> None:
    """Neither by itself, with tries left, nor by the operator (argo#2929)."""
    world = World(rules(retries=5, backoff_s=1.0))
    world.fail("a")
    world.do(e.Abort())
    world.tick(1000)
    world.do(e.Retry("a"), e.Resume())
    world.do(e.BackedOut("a", True), e.Retry("a"))

    assert len(world.wanted(e.StartNode)) == 1


def test_a_failure_in_each_batch_aborts_where_the_whole_rollout_may_have_fewer() -> None:
    """The threshold is the rollout's, not begun anew with each batch (as Ansible's is)."""
    world = World(rules(max_failures=3, hooks=()), (("a",), ("b",), ("c",), ("d",)))
    for name in ("a", "b", "c"):
        world.fail(name)

    assert world.state.phase is Phase.ABORTED
    assert [intent.node for intent in world.wanted(e.StartNode)] == ["a", "b", "c"]


# --- abort, skip, restart -----------------------------------------------------------


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
    assert waiting_for(world.state) == ("a: its state",)


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
