"""What gates do to a rollout, one rule after the other."""

from __future__ import annotations

from console.rollout import events as e
from console.rollout.advance import waiting_for
from console.rollout.states import NodeState, Phase, Verdict
from tests.console.rollout.world import World, gate, gated, rules


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
