"""The controller, on a real history: stored before it is done, done in order, and taken over by the next one."""

from __future__ import annotations

import asyncio
import json

import pytest

from console.rollout import events as e
from console.rollout.effects import Outcome
from console.rollout.states import NodeState, Phase, RolloutState, Verdict
from db.errors import LeaseLostError
from tests.console.fake_host import eventually
from tests.console.rollout.fakes import Desk, FakeEffects, MakeDesk, failed_sample, running
from tests.console.rollout.world import gate, rules


async def ask(desk: Desk, verb: str, **arguments: object) -> tuple[bool | None, str | None]:
    """Ask the running controller, and return its answer."""
    ident = desk.ask(verb, **arguments)
    await eventually(lambda: desk.answer(ident)[1] is not None)
    return desk.answer(ident)


async def test_a_rollout_is_carried_out_and_every_intent_stands_before_its_outcome(make_desk: MakeDesk) -> None:
    """The timeline tells the whole way, and a run's uid before the run is begun."""
    desk, effects = make_desk(rules(gates=(gate(),))), FakeEffects()
    state = await desk.controller(effects).run()
    record = desk.read()
    intents = {one.entry_id: one for one in record.timeline if one.kind == "intent"}
    outcomes = {one.intent_id: one for one in record.timeline if one.kind == "outcome"}

    assert state.phase is Phase.DONE
    assert (record.row.phase, record.row.reason) == ("done", "3 ready")
    assert record.row.finished_ns is not None
    assert [(node.node, node.state, node.is_out) for node in record.nodes] == [(n, "ready", False) for n in "abc"]
    assert intents.keys() == outcomes.keys()
    assert all(outcomes[ident].entry_id > ident for ident in intents)  # type: ignore[index]
    assert len(intents) == len(effects.done)
    uids = [json.loads(one.data_json)["run_uid"] for one in intents.values() if one.what == "StartNode"]
    assert len(set(uids)) == 3


async def test_what_is_acted_on_is_stored_already(make_desk: MakeDesk) -> None:
    """At the moment of acting the intent is in the file, without an outcome."""
    desk = make_desk(rules(), (("a",),))
    seen = []

    class Looking(FakeEffects):
        async def carry_out(self, intent: e.Intent, state: RolloutState, tell: object) -> Outcome:
            open_intents = desk.store("reader").open_intents(desk.uid)
            seen.append(type(intent).__name__ in [one.what for one in open_intents])
            return await super().carry_out(intent, state, tell)  # type: ignore[arg-type]

    await desk.controller(Looking()).run()

    assert seen == [True] * 3


async def test_a_failed_canary_is_fixed_tried_again_and_promoted(make_desk: MakeDesk) -> None:
    """From another process each time; resume says why it does not lead past the gate."""
    desk, effects = make_desk(rules(gates=(gate(),), max_failures=2, max_unavailable=2)), FakeEffects()
    effects.answers[e.TakeSample] = [failed_sample(1)]
    async with running(desk.controller(effects)) as task:
        await eventually(lambda: desk.state().phase is Phase.PAUSED)
        assert await ask(desk, "resume") == (
            False,
            "a failed at a gate: retry or skip what failed, or promote without it",
        )
        assert await ask(desk, "retry", node="b") == (False, "b is pending; it can be tried again once it has failed")
        assert await ask(desk, "retry", node="x") == (False, "no node x is in this rollout")
        assert await ask(desk, "retry", node="a") == (
            True,
            "a is tried again; the rollout is paused: resume or promote it",
        )
        assert await ask(desk, "promote") == (True, "it goes on")
        state = await task

    assert (state.phase, state.failures) == (Phase.DONE, 1)
    assert e.BackOutNode("a", 1) in effects.done
    assert [one.attempt for one in effects.done if isinstance(one, e.StartNode) and one.node == "a"] == [1, 2]
    assert [one.analysis for one in effects.done if isinstance(one, e.TakeSample)] == [1, 2, 3]
    commands = [one for one in desk.read().timeline if one.kind == "command"]
    assert json.loads(commands[-1].data_json)["by"] == "ada@desk"


async def test_a_pause_from_elsewhere_leaves_what_is_under_way(make_desk: MakeDesk) -> None:
    """The attempt comes to its end and waits; resumed, it is shifted."""
    desk, effects = make_desk(rules()), FakeEffects()
    effects.held.add(e.StartNode)
    async with running(desk.controller(effects)) as task:
        await eventually(lambda: effects.begun)
        assert await ask(desk, "pause") == (True, "paused")
        await effects.let_go(e.StartNode)
        await eventually(lambda: desk.state().nodes[0].state is NodeState.VERIFYING)
        assert not [one for one in effects.begun if isinstance(one, e.RunHook)]
        assert await ask(desk, "skip", node="c", reason="bad disk") == (True, "c is skipped")
        assert await ask(desk, "dance") == (False, "nothing is known of 'dance'")
        assert await ask(desk, "resume") == (True, "it goes on")
        state = await task

    assert state.phase is Phase.DONE
    assert desk.read().nodes[2].reason == "bad disk"


async def test_an_abort_ends_an_attempt_before_its_node_is_backed_out(make_desk: MakeDesk) -> None:
    """The hook that drains is really over when the one that brings back begins."""
    desk, effects = make_desk(rules()), FakeEffects()
    effects.held |= {e.StartNode, e.StopNode}
    async with running(desk.controller(effects)) as task:
        await eventually(lambda: effects.begun)
        assert await ask(desk, "abort") == (True, "it is aborting")
        await eventually(lambda: e.StopNode("a", 1) in effects.begun)
        assert effects.called_off == [e.StartNode("a", 1, ("before_shift", "warm"))]
        assert await ask(desk, "retry", node="a") == (False, "it is aborting")
        assert e.BackOutNode("a", 1) not in effects.begun
        await effects.let_go(e.StopNode)
        state = await task

    assert state.phase is Phase.ABORTED
    assert effects.begun[-1] == e.BackOutNode("a", 1)
    called_off = next(one for one in desk.read().timeline if one.kind == "outcome" and one.what == "StartNode")
    assert json.loads(called_off.data_json)["text"] == "called off"


async def test_an_abort_calls_off_samples_that_are_being_taken(make_desk: MakeDesk) -> None:
    """A gate's command does not keep a rollout that is over."""
    desk, effects = make_desk(rules(gates=(gate(),))), FakeEffects()
    effects.held.add(e.TakeSample)
    async with running(desk.controller(effects)) as task:
        await eventually(lambda: [one for one in effects.begun if isinstance(one, e.TakeSample)])
        await ask(desk, "abort")
        state = await task

    assert state.phase is Phase.ABORTED
    assert effects.called_off == [e.TakeSample(1, 0, ("a",))]


async def test_a_mistake_of_our_own_fails_the_node_and_not_the_controller(make_desk: MakeDesk) -> None:
    """The rollout goes on by its rules, with the mistake as the reason."""
    desk, effects = make_desk(rules(hooks=(), max_failures=2)), FakeEffects()
    effects.answers[e.StartNode] = [RuntimeError("oops")]
    state = await desk.controller(effects).run()

    assert state.phase is Phase.DONE
    assert state.nodes[0].reason == "internal error: RuntimeError: oops"


async def test_a_node_out_of_reach_is_down_and_its_warm_up_is_out_of_sight(make_desk: MakeDesk) -> None:
    """Neither is a failure: once the link is back it is warming again, and comes to its end."""
    desk, effects = make_desk(rules(), (("a",),)), FakeEffects()
    effects.held.add(e.StartNode)
    async with running(desk.controller(effects)) as task:
        await eventually(lambda: desk.state().nodes[0].state is NodeState.WARMING)
        effects.links["a"] = "no heartbeat"
        await eventually(lambda: desk.state().nodes[0].state is NodeState.UNKNOWN)
        assert desk.state().nodes[0].is_down
        effects.links["a"] = None
        await eventually(lambda: desk.state().nodes[0].state is NodeState.WARMING)
        assert not desk.state().nodes[0].is_down
        await effects.let_go(e.StartNode)
        state = await task

    assert (state.phase, state.failures) == (Phase.DONE, 0)


# --- one after the other -----------------------------------------------------------


async def test_an_interrupted_controller_pauses_and_lets_a_hook_come_to_its_end(make_desk: MakeDesk) -> None:
    """Half of a node's traffic is nobody's state; a run that is followed is left to its host."""
    desk, effects = make_desk(rules(max_unavailable=2, hooks=("shift", "on_abort")), (("a", "b"),)), FakeEffects()
    effects.held |= {e.StartNode, e.RunHook}
    task = asyncio.ensure_future(desk.controller(effects).run())
    await eventually(lambda: len(effects.begun) == 2)
    await effects.let_go(e.StartNode)
    await eventually(lambda: [one for one in effects.begun if isinstance(one, e.RunHook)])
    task.cancel()
    await eventually(lambda: desk.state().phase is Phase.PAUSED)
    assert not task.done()
    await effects.let_go(e.RunHook)
    await asyncio.wait({task})

    assert task.cancelled()
    assert [row.state for row in desk.state().nodes] == [NodeState.READY, NodeState.READY]
    assert desk.state().reason == "interrupted"


async def test_the_next_controller_reads_what_was_under_way_and_stays_paused(make_desk: MakeDesk) -> None:
    """What the last one had begun is cut off, and resume waits until all has been read."""
    desk, effects = make_desk(rules(), (("a",),)), FakeEffects()
    effects.held.add(e.StartNode)
    gone = asyncio.ensure_future(desk.controller(effects, "gone").run())
    await eventually(lambda: effects.begun)
    before = desk.state()
    gone.cancel()
    await asyncio.wait({gone})
    desk.store("gone").give_back(desk.uid)

    again = FakeEffects()
    again.held.add(e.ReadNode)
    async with running(desk.controller(again, "next")) as task:
        await eventually(lambda: again.begun)
        assert desk.state().nodes[0].state is NodeState.UNKNOWN
        assert desk.state().phase is Phase.PAUSED
        ident = desk.ask("resume")
        await eventually(lambda: e.ReadNode("a", 1) in again.begun)
        assert desk.answer(ident) == (None, None)
        await again.let_go(e.ReadNode)
        state = await task

    assert desk.answer(ident) == (True, "it goes on")
    assert before.nodes[0].attempt == state.nodes[0].attempt == 1
    assert state.phase is Phase.DONE
    assert [type(one) for one in again.done] == [e.ReadNode, e.RunHook, e.RunHook]


async def test_an_attempt_that_was_to_be_ended_is_ended_by_the_next_controller(make_desk: MakeDesk) -> None:
    """Nobody else would ask for it again; the intent of the one before gets its outcome."""
    desk, effects = make_desk(rules(hooks=(), max_failures=2), (("a",), ("b",))), FakeEffects()
    effects.held |= {e.StartNode, e.StopNode}
    gone = asyncio.ensure_future(desk.controller(effects, "gone").run())
    await eventually(lambda: effects.begun)
    ident = desk.ask("skip", node="a", reason="bad disk")
    await eventually(lambda: desk.answer(ident)[1] is not None)
    gone.cancel()
    await eventually(lambda: desk.state().phase is Phase.PAUSED)
    desk.store("gone").give_back(desk.uid)
    again = FakeEffects()
    async with running(desk.controller(again, "next")):
        await eventually(lambda: len(again.done) == 2)

    assert set(again.done) == {e.StopNode("a", 1), e.ReadNode("b", 1)}
    await effects.let_go(e.StopNode)
    with pytest.raises(LeaseLostError):
        await gone


async def test_an_inconclusive_sample_pauses_and_promote_takes_the_operators_word(make_desk: MakeDesk) -> None:
    """With the reason on the timeline."""
    desk, effects = make_desk(rules(gates=(gate(),), hooks=()), (("a",),)), FakeEffects()
    effects.answers[e.TakeSample] = [Outcome(e.GateSampled(1, 0, Verdict.INCONCLUSIVE, "no verify there"))]
    async with running(desk.controller(effects)) as task:
        await eventually(lambda: desk.state().phase is Phase.PAUSED)
        assert desk.read().row.reason.startswith("gate 1 is inconclusive: no verify there")
        assert await ask(desk, "promote") == (True, "it goes on")
        assert (await task).phase is Phase.DONE
