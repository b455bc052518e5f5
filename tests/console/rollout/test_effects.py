"""Intents carried out on a fleet of fake hosts: runs, hooks, back-outs, and what nodes are read to be."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from console.errors import RequestRefused
from console.rollout import events as e
from console.rollout.effects import Data, FleetEffects, Outcome
from console.rollout.saved import Settings, run_uid
from console.rollout.settings import Hook, Hooks, Rollout
from console.rollout.states import NodeState, RolloutState, begin
from remote_agent.protocol.messages import RunState
from tests.console.fake_host import eventually
from tests.console.fleet_world import RECIPES, World
from tests.console.rollout.world import rules

UID = uuid.uuid4().hex
START = e.StartNode("n1", 1, ("before_shift", "warm"))
READ = e.ReadNode("n1", 1)
RUN = run_uid(UID, "n1", 1)


class Acting:
    """A fleet of fake hosts, what acts on it, and what was told on the way."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self.host = self.world.hosts["n1"]
        self.fleet = self.world.fleet()
        hook = folder / "hook"
        hook.write_text(
            f'#!/bin/sh\necho "$GLOWPLUG_ROLLOUT_PHASE $GLOWPLUG_ROLLOUT_ATTEMPT" >> {folder}/hooks\nexit $1\n'
        )
        hook.chmod(0o755)
        self.hooks = folder / "hooks"
        made = Hooks(*(Hook((str(hook), code), 30.0) for code in ("0", "0", "3", "0")))
        settings = Settings(Rollout("pre-warm", "all", "llama", hooks=made), RECIPES["llama"])
        self.effects = FleetEffects(self.fleet, UID, settings, os.environ)
        self.state: RolloutState = begin(rules(), (("n1", "n2"),))
        self.told: list[tuple[e.Event, Data]] = []

    async def act(self, intent: e.Intent) -> Outcome:
        return await self.effects.carry_out(intent, self.state, lambda event, data: self.told.append((event, data)))

    async def run_ends(self, state: RunState = RunState.READY) -> None:
        await eventually(lambda: RUN in self.host.runs)
        self.host.begin(RUN)
        self.host.finish(RUN, state)


@pytest.fixture
async def acting(tmp_path: Path) -> AsyncIterator[Acting]:
    acting = Acting(tmp_path)
    async with acting.fleet:
        yield acting


async def test_an_attempt_drains_and_then_warms_under_a_uid_of_its_own(acting: Acting) -> None:
    """The run's uid is the attempt's, whoever asks; its figures go to the timeline."""
    outcome, _ = await asyncio.gather(acting.act(START), acting.run_ends())

    assert outcome.event == e.NodeReached("n1", 1, NodeState.VERIFYING)
    assert outcome.data["run_uid"] == RUN
    assert outcome.data["wall_ns"] == 100
    assert [event for event, _ in acting.told] == [e.NodeReached("n1", 1, NodeState.WARMING)]
    assert acting.hooks.read_text() == "before_shift 1\n"
    assert run_uid(UID, "n1", 2) != RUN != run_uid(UID, "n2", 1)


async def test_a_run_that_fails_fails_the_attempt_with_its_reason(acting: Acting) -> None:
    """As the host tells it."""
    outcome, _ = await asyncio.gather(acting.act(START), acting.run_ends(RunState.FAILED))

    assert outcome.event == e.NodeReached("n1", 1, NodeState.FAILED, "killed by signal 9")


async def test_a_node_out_of_reach_counts_as_serving_nobody(acting: Acting) -> None:
    """It is no failed run."""
    acting.world.links["n1"].lose("no route to host", failures=5, final=True)
    outcome = await acting.act(START)

    assert isinstance(outcome.event, e.NodeReached)
    assert (outcome.event.state, outcome.event.unreachable) == (NodeState.FAILED, True)
    assert "no route to host" in outcome.event.reason
    assert acting.effects.down()["n1"] == "no route to host"
    assert acting.effects.down()["n2"] is None


async def test_a_refused_run_fails_the_attempt(acting: Acting) -> None:
    """With the agent's words."""
    acting.host.is_refusing = True
    outcome = await acting.act(START)

    assert outcome.event == e.NodeReached("n1", 1, NodeState.FAILED, "/models/llama: no such directory")


async def test_a_stop_cancels_the_attempts_run_or_says_that_there_is_none(acting: Acting) -> None:
    """Nothing of it is raised."""
    nothing = await acting.act(e.StopNode("n1", 1))
    await acting.fleet.warm("n1", "llama", run_uid=RUN)
    ended = await acting.act(e.StopNode("n1", 1))

    assert nothing.event == e.StopEnded("n1", 1, True, f"no run {RUN}")
    assert ended.event == e.StopEnded("n1", 1, True)
    assert acting.host.runs[RUN].state is RunState.CANCELLED


async def test_a_node_that_can_not_be_asked_may_go_on_with_its_run(acting: Acting) -> None:
    """The reason is the link's."""
    acting.world.links["n1"].lose("no route to host", failures=5, final=True)
    outcome = await acting.act(e.StopNode("n1", 1))

    assert isinstance(outcome.event, e.StopEnded)
    assert not outcome.event.succeeded
    assert "no route to host" in outcome.event.reason


async def test_hooks_that_move_traffic_say_how_they_ended(acting: Acting) -> None:
    """One that fails has its code and output on the timeline."""
    shifted = await acting.act(e.RunHook("n1", 2, "shift"))
    failed = await acting.act(e.RunHook("n1", 2, "after_shift"))
    back = await acting.act(e.BackOutNode("n1", 2))

    assert shifted.event == e.HookEnded("n1", 2, "shift", True)
    assert failed.event == e.HookEnded("n1", 2, "after_shift", False, "ended with 3")
    assert (failed.data["code"], failed.data["tries"]) == (3, 1)
    assert back.event == e.BackedOut("n1", True)
    assert acting.hooks.read_text() == "shift 2\nafter_shift 2\non_abort 2\n"


async def test_what_a_hook_printed_last_is_known_while_it_runs(acting: Acting, tmp_path: Path) -> None:
    """By its node, and no longer."""
    wait = f'while ! [ -e "{tmp_path}/go" ]; do sleep 0.01; done'
    (tmp_path / "hook").write_text(f"#!/bin/sh\necho moving\n{wait}\n")
    shift = asyncio.ensure_future(acting.act(e.RunHook("n1", 2, "shift")))
    await eventually(lambda: bool(acting.effects.said()))
    during = dict(acting.effects.said())
    (tmp_path / "go").touch()
    await shift

    assert during == {"n1": "moving"}
    assert acting.effects.said() == {}


# --- what a node is read to be ------------------------------------------------------


async def test_an_attempt_whose_run_was_never_begun_is_pending(acting: Acting) -> None:
    """The controller died between the intent and the node."""
    outcome = await acting.act(READ)

    assert outcome.event == e.NodeReached("n1", 1, NodeState.PENDING, "its run was never begun")


async def test_a_run_that_goes_on_is_followed_to_its_end(acting: Acting) -> None:
    """The next controller sees it warm, and then warm enough."""
    await acting.fleet.warm("n1", "llama", run_uid=RUN)
    reading = asyncio.ensure_future(acting.act(READ))
    await eventually(lambda: acting.told)
    acting.host.finish(RUN)
    outcome = await reading

    assert [event for event, _ in acting.told] == [e.NodeReached("n1", 1, NodeState.WARMING)]
    assert outcome.event == e.NodeReached("n1", 1, NodeState.VERIFYING)


@pytest.mark.parametrize(("is_shifted", "state"), [(False, NodeState.VERIFYING), (True, NodeState.SHIFTING)])
async def test_a_ready_run_is_looked_at_or_its_shift_made_whole(
    acting: Acting, is_shifted: bool, state: NodeState
) -> None:
    """Never ready by itself: how far a shift came that was cut off nobody knows."""
    await acting.fleet.warm("n1", "llama", run_uid=RUN)
    acting.host.finish(RUN)
    row = acting.state.nodes[0]
    acting.state = RolloutState(acting.state.rules, (type(row)("n1", 0, NodeState.UNKNOWN, is_shifted=is_shifted),))
    outcome = await acting.act(READ)

    assert outcome.event == e.NodeReached("n1", 1, state)


async def test_a_model_that_is_gone_again_is_not_ready_whatever_its_run_was(acting: Acting) -> None:
    """The host was restarted meanwhile, or somebody let it go."""
    await acting.fleet.warm("n1", "llama", run_uid=RUN)
    acting.host.finish(RUN)
    acting.host.residents.clear()
    outcome = await acting.act(READ)

    assert outcome.event == e.NodeReached("n1", 1, NodeState.FAILED, "was standby, and is not warm any more")


async def test_a_node_is_read_once_it_can_be_reached(acting: Acting, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes; only a link that nothing mends is an answer."""
    monkeypatch.setattr("console.rollout.effects.AGAIN_S", 0.01)
    acting.world.links["n1"].lose("no route to host", failures=5)
    reading = asyncio.ensure_future(acting.act(READ))
    for _ in range(10):
        await asyncio.sleep(0.01)
    assert not reading.done()
    acting.world.links["n1"].connect()

    assert (await reading).event == e.NodeReached("n1", 1, NodeState.PENDING, "its run was never begun")
    acting.world.links["n1"].lose("the host key has changed", final=True)
    refused = (await acting.act(READ)).event
    assert isinstance(refused, e.NodeReached)
    assert (refused.state, refused.unreachable) == (NodeState.FAILED, True)


async def test_a_refusal_for_another_reason_is_no_answer_to_what_became_of_it(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only "no such run" means that nothing was begun."""

    async def refuse(*_: object, **__: object) -> object:
        raise RequestRefused("internal", "oops")

    monkeypatch.setattr(acting.fleet, "find_run", refuse)

    assert (await acting.act(READ)).event == e.NodeReached("n1", 1, NodeState.FAILED, "oops")
