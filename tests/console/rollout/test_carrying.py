"""Rollouts that this console begins, carries out, takes over and steers: a real history, a world as a test tells it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from console.config import parse
from console.errors import HistoryError, UsageError
from console.rollout import events as e
from console.rollout.carrying import TAKEN_OVER, Carrier
from console.rollout.effects import Outcome
from console.rollout.others import Other
from console.rollout.states import NodeState, Phase
from db.database import connect
from db.rollout_records import RolloutRow
from db.rollout_store import RolloutStore
from remote_agent.protocol.messages import Actor
from tests.console.fake_host import eventually
from tests.console.rollout.fakes import NAME, Desk, FakeEffects
from tests.console.rollout.world import rules

CONFIG = """
[nodes.a]
[nodes.b]
[nodes.c]
[recipes.llama]
model = { path = "/models/llama" }
[[rollout]]
name = "pre-warm"
selector = "all"
recipe = "llama"
canary = 1
"""
ANNA = Actor("anna", "laptop")


class Console:
    """A carrier over a history of its own; ``effects`` is the world of all its rollouts."""

    def __init__(self, folder: Path, config: str = CONFIG) -> None:
        self.history_file = folder / "history.db"
        self.effects = FakeEffects()
        self.reached: list[Sequence[str]] = []
        config_file = folder / "fleet.toml"
        self.carrier = Carrier(
            parse(config, config_file), self.history_file, ANNA, lambda uid, settings: self.effects, self._reach
        )

    async def _reach(self, nodes: Sequence[str]) -> None:
        self.reached.append(nodes)

    async def start(self) -> str:
        return await self.carrier.start(await self.carrier.plan(NAME))


@pytest.fixture
async def console(tmp_path: Path) -> AsyncIterator[Console]:
    console = Console(tmp_path)
    yield console
    await console.carrier.close()


@pytest.fixture
async def desk(console: Console) -> AsyncIterator[Desk]:
    """A rollout in the console's history that nobody carries out."""
    with contextlib.closing(Desk(console.history_file, rules(), (("a",), ("b", "c")))) as desk:
        yield desk


async def ends(console: Console) -> None:
    await eventually(lambda: not console.carrier.carried)


async def test_a_rollout_is_planned_begun_and_carried_out_in_the_background(console: Console) -> None:
    """Nodes are reached first; its end is a notice, and nobody has its lease after."""
    assert await console.carrier.listed() == ()
    uid = await console.start()
    assert console.carrier.carried.keys() == {NAME}
    await ends(console)
    view = await console.carrier.read(uid)

    assert console.reached == [["a", "b", "c"]]
    assert view is not None
    assert (view.state.phase, view.holder, view.row.actor_user) == (Phase.DONE, None, "anna")
    assert [notice.text for notice in console.carrier.take_notices()] == [f"rollout {NAME} done: 3 ready"]
    assert console.carrier.take_notices() == []


async def test_a_second_one_of_the_same_name_is_refused(console: Console) -> None:
    """In one line, and the first goes on."""
    console.effects.held = {e.StartNode}
    await console.start()
    with pytest.raises(HistoryError, match=f"rollout {NAME} .* is running; resume or abort it"):
        await console.start()
    await console.effects.let_go(e.StartNode)
    await ends(console)


async def test_what_it_carries_out_is_steered_through_its_own_commands(console: Console) -> None:
    """The answer is the controller's; a pause holds what is not begun."""
    console.effects.held = {e.StartNode}
    uid = await console.start()
    await eventually(lambda: bool(console.effects.begun))
    assert await console.carrier.ask(uid, "pause", {}) == (True, "paused")
    view = await console.carrier.read(uid)
    assert view is not None
    assert (view.is_here, view.state.phase) == (True, Phase.PAUSED)
    assert await console.carrier.ask(uid, "resume", {}) == (True, "it goes on")
    await console.effects.let_go(e.StartNode)
    await ends(console)


async def test_one_that_another_process_carries_out_is_steered_from_here(console: Console, desk: Desk) -> None:
    """Its lease stays where it is."""
    effects = FakeEffects()
    effects.held = {e.StartNode}
    task = asyncio.ensure_future(desk.controller(effects, "elsewhere").run())
    await eventually(lambda: bool(effects.begun))

    assert await console.carrier.ask(desk.uid, "skip", {"node": "b", "reason": "bad disk"}) == (True, "b is skipped")
    view = await console.carrier.read(desk.uid)
    assert view is not None
    assert (view.holder, view.is_here, console.carrier.carried) == ("elsewhere", False, {})
    await effects.let_go(e.StartNode)
    await task


async def test_a_rollout_of_others_is_told_with_who_carries_it_out_and_what_is_out_of_traffic(
    console: Console, desk: Desk
) -> None:
    """Another process, then nobody; what this console carries out is not among them, nor what is over."""
    effects = FakeEffects()
    effects.held = {e.RunHook}
    task = asyncio.ensure_future(desk.controller(effects, "elsewhere").run())
    await eventually(lambda: any(isinstance(one, e.RunHook) for one in effects.begun))
    held = await console.carrier.others()
    desk.store("elsewhere").give_back(desk.uid)
    left = await console.carrier.others()
    task.cancel()
    await effects.let_go(e.RunHook)
    await asyncio.wait({task})
    await eventually(lambda: desk.read().row.lease is None)
    console.effects.held = {e.ReadNode, e.StartNode, e.RunHook}
    await console.carrier.ask(desk.uid, "abort", {})

    assert held == (Other(desk.uid, NAME, "running", "elsewhere", 1),)
    assert left == (Other(desk.uid, NAME, "running", None, 1),)
    assert await console.carrier.others() == ()


async def test_one_that_another_process_takes_at_the_same_moment_is_steered_from_here(
    console: Console, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between this console's look and its take: what was asked goes to who was faster."""
    loop, take, carried = asyncio.get_running_loop(), RolloutStore.take, list[asyncio.Future[None]]()
    effects = FakeEffects()
    effects.held = {e.StartNode}  # it is not to be over before it is asked

    def carry() -> None:
        carried.append(asyncio.ensure_future(desk.controller(effects, "elsewhere").run()))

    def late(store: RolloutStore, rollout_uid: str) -> RolloutRow:
        monkeypatch.setattr(RolloutStore, "take", take)
        desk.store("elsewhere").take(rollout_uid)
        loop.call_soon_threadsafe(carry)
        return take(store, rollout_uid)

    monkeypatch.setattr(RolloutStore, "take", late)
    done, _ = await console.carrier.ask(desk.uid, "abort", {})
    await effects.let_go(e.StartNode)
    await asyncio.gather(*carried)

    assert (done, console.carrier.carried, desk.state().phase) == (True, {}, Phase.ABORTED)


async def test_one_that_nobody_carries_out_becomes_this_consoles_when_resumed(console: Console, desk: Desk) -> None:
    """After a pause, which needs nobody."""
    assert await console.carrier.ask(desk.uid, "pause", {}) == (True, "paused")
    assert console.carrier.carried == {}
    assert await console.carrier.ask(desk.uid, "resume", {}) == (True, f"it goes on; {TAKEN_OVER}")
    await ends(console)

    assert [notice.text for notice in console.carrier.take_notices()] == [f"rollout {NAME} done: 3 ready"]


async def test_resuming_after_a_crash_is_said_once(console: Console, desk: Desk) -> None:
    """By the answer; that it was paused to be read anew, which that very verb ends, is no news."""
    desk.lease_s = 1.0  # it is found lost at the next renewal
    effects = FakeEffects()
    effects.held = {e.StartNode}
    task = asyncio.ensure_future(desk.controller(effects, "elsewhere").run())
    await eventually(lambda: bool(effects.begun))
    desk.store("elsewhere").give_back(desk.uid)  # as a lease that ran out: nothing was paused
    await asyncio.wait({task})
    assert desk.state().phase is Phase.RUNNING
    console.effects.held = {e.RunHook}
    answer = await console.carrier.ask(desk.uid, "resume", {})
    notices = console.carrier.take_notices()
    await console.effects.let_go(e.RunHook)
    await ends(console)

    assert answer == (True, f"it goes on; {TAKEN_OVER}")
    assert notices == []


async def test_of_two_verbs_at_one_moment_one_takes_the_rollout_over(console: Console, desk: Desk) -> None:
    """The other is answered by that controller: there are no two of them, and each lease is its own."""
    console.effects.held = {e.StartNode}
    skip = {"node": "c", "reason": "bad disk"}
    await console.carrier.ask(desk.uid, "pause", {})
    answers = await asyncio.gather(
        console.carrier.ask(desk.uid, "skip", skip),
        console.carrier.ask(desk.uid, "resume", {}),
        console.carrier.ask(desk.uid, "resume", {}),
    )
    assert list(console.carrier.carried) == [NAME]
    await console.effects.let_go(e.StartNode)
    await ends(console)

    assert answers == [(True, "c is skipped"), (True, f"it goes on; {TAKEN_OVER}"), (False, "it is running already")]
    assert [intent.node for intent in console.effects.begun if isinstance(intent, e.StartNode)] == ["a", "b"]


async def test_a_lease_that_ran_out_in_a_sleep_makes_no_second_controller(console: Console, desk: Desk) -> None:
    """A verb that is asked before the own controller has renewed it goes to that one."""
    console.effects.held = {e.StartNode}
    await console.carrier.ask(desk.uid, "resume", {})
    await eventually(lambda: bool(console.effects.begun))
    with contextlib.closing(connect(desk.path, read_only=False)) as connection:
        connection.execute("UPDATE rollouts SET lease_expires_ns = 1")

    assert await console.carrier.ask(desk.uid, "skip", {"node": "c", "reason": "bad disk"}) == (True, "c is skipped")
    assert await console.carrier.ask(desk.uid, "abort", {}) == (True, "it is aborting")
    await console.effects.let_go(e.StartNode)
    await ends(console)
    assert not [intent for intent in console.effects.begun if isinstance(intent, e.ReadNode)]


async def test_what_is_over_is_not_taken_over(console: Console) -> None:
    """And nobody is told that it was."""
    uid = await console.start()
    await ends(console)
    with pytest.raises(UsageError, match=f"rollout {NAME} is over: done"):
        await console.carrier.ask(uid, "resume", {})
    assert [notice.text for notice in console.carrier.take_notices()] == [f"rollout {NAME} done: 3 ready"]


async def test_one_with_nodes_that_are_not_in_the_fleet_is_not_taken_over(tmp_path: Path) -> None:
    """It stays free for whoever has them."""
    console = Console(tmp_path, CONFIG.replace("[nodes.b]\n[nodes.c]\n", ""))
    with contextlib.closing(Desk(console.history_file, rules(), (("a",), ("b", "c")))) as desk:
        with pytest.raises(UsageError, match="has node b and 1 more, which this fleet has not"):
            await console.carrier.ask(desk.uid, "resume", {})
        await console.carrier.close()

        assert desk.read().row.lease is None


async def test_what_a_hook_of_this_console_says_is_shown_while_it_carries_the_rollout_out(
    console: Console, desk: Desk
) -> None:
    """Beside what the history has; of another's hooks nothing is known here."""
    console.effects.lines = {"a": "weight 10%"}
    before = await console.carrier.read(desk.uid)
    console.effects.held = {e.RunHook}
    await console.carrier.ask(desk.uid, "resume", {})
    during = await console.carrier.read(desk.uid)
    await console.effects.let_go(e.RunHook)
    await ends(console)
    after = await console.carrier.read(desk.uid)

    assert [dict(view.said) for view in (before, during, after) if view is not None] == [{}, {"a": "weight 10%"}, {}]


async def test_closing_pauses_what_it_carries_out_and_waits_for_hooks(console: Console, desk: Desk) -> None:
    """As Ctrl-C does in the verb: a warm-up is called off, a hook is not, and the next controller may come at once."""
    console.effects.held = {e.RunHook}
    await console.carrier.ask(desk.uid, "resume", {})
    await eventually(lambda: any(isinstance(one, e.RunHook) for one in console.effects.begun))
    closing = asyncio.ensure_future(console.carrier.close())
    await eventually(lambda: desk.state().phase is Phase.PAUSED)
    assert not closing.done()
    await console.effects.let_go(e.RunHook)
    await closing

    assert desk.state().reason == "interrupted"
    assert desk.read().row.lease is None
    assert not any(isinstance(one, e.RunHook) for one in console.effects.called_off)


async def test_in_a_hurry_no_hook_is_waited_for(console: Console, desk: Desk) -> None:
    """It is killed, and the lease is given back all the same."""
    console.effects.held = {e.RunHook}
    await console.carrier.ask(desk.uid, "resume", {})
    await eventually(lambda: any(isinstance(one, e.RunHook) for one in console.effects.begun))
    closing = asyncio.ensure_future(console.carrier.close())
    await eventually(lambda: desk.state().phase is Phase.PAUSED)
    console.carrier.hurry()
    await closing

    assert any(isinstance(one, e.RunHook) for one in console.effects.called_off)
    assert desk.read().row.lease is None


async def test_a_mistake_of_ours_ends_that_rollouts_controller_and_is_said(console: Console) -> None:
    """The console goes on, and the rollout can be resumed."""

    def broken() -> dict[str, str | None]:
        raise RuntimeError("odd")

    console.effects.held = {e.StartNode}
    uid = await console.start()
    console.effects.down = broken  # type: ignore[method-assign]
    await ends(console)
    view = await console.carrier.read(uid)

    assert view is not None
    assert view.holder is None
    assert [(one.text, one.is_bad) for one in console.carrier.take_notices()] == [
        (f"rollout {NAME} stopped: internal error: RuntimeError: odd", True)
    ]


async def test_a_node_that_failed_makes_its_notices_stand_out(console: Console) -> None:
    """Whatever screen is open."""
    console.effects.answers[e.StartNode] = [Outcome(e.NodeReached("a", 1, NodeState.FAILED, "no memory"))]
    await console.start()
    await ends(console)
    notices = console.carrier.take_notices()

    assert [(one.text, one.is_bad) for one in notices] == [
        (f"rollout {NAME} aborted: 1 failed, max_failures 1: a", True)
    ]
