"""Mistakes that others shipped: none of them is one of this rollout."""

from __future__ import annotations

from console.rollout import events as e
from console.rollout.states import NodeState, Phase, Verdict
from tests.console.rollout.world import THREE, World, gate, gated, rules


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
