"""The controller and its right to act: kept, lost, and what a history that can't be used does to it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from console.rollout import events as e
from console.rollout.controller import Controller
from console.rollout.states import Phase
from db.database import connect
from db.errors import DamagedError, LeaseHeldError, LeaseLostError, UnavailableError
from db.rollout_records import CommandRow, TimelineRow, Turn
from db.rollout_store import RolloutStore
from tests.console.fake_host import eventually
from tests.console.rollout.fakes import TICK_S, FakeEffects, MakeDesk, running
from tests.console.rollout.world import rules


async def test_a_controller_that_was_taken_over_ends_and_calls_off_what_it_does(make_desk: MakeDesk) -> None:
    """Its hooks too: the other one decides now."""
    desk, effects = make_desk(rules(), (("a",),)), FakeEffects()
    effects.held.add(e.StartNode)
    controller = desk.controller(effects, "stopped")
    with pytest.raises(
        LeaseHeldError, match=r"rollout pre-warm is carried out by stopped; its lease has \d+\.\d s left"
    ):
        desk.store("other").take(desk.uid)
    task = asyncio.ensure_future(controller.run())
    await eventually(lambda: effects.begun)
    with contextlib.closing(connect(desk.path, read_only=False)) as connection:
        connection.execute("UPDATE rollouts SET lease_holder = NULL, lease_expires_ns = NULL")
        desk.store("other").take(desk.uid)
    with pytest.raises(LeaseLostError, match="rollout pre-warm was taken over by other; nothing more is done here"):
        await task

    assert effects.called_off == effects.begun


async def test_a_controller_renews_its_lease_while_nothing_happens(make_desk: MakeDesk) -> None:
    """However long a run takes."""
    desk, effects = make_desk(rules(), (("a",),), lease_s=2.0), FakeEffects()
    effects.held.add(e.StartNode)
    async with running(desk.controller(effects)):
        await eventually(lambda: effects.begun)
        lease = desk.read().row.lease
        assert lease is not None
        await eventually(lambda: (now := desk.read().row.lease) and now.expires_ns > lease.expires_ns)


async def test_a_history_that_is_locked_for_a_moment_holds_the_rollout_up_and_no_more(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is begun that is not stored; then it goes on."""
    monkeypatch.setattr("db.database.BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr("console.rollout.controller.STORE_AGAIN_S", 0.01)
    desk, effects = make_desk(rules(), (("a",),)), FakeEffects()
    controller = desk.controller(effects)
    with contextlib.closing(connect(desk.path, read_only=False)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        async with running(controller) as task:
            for _ in range(20):
                await asyncio.sleep(0)
            assert effects.begun == []
            connection.execute("ROLLBACK")
            state = await task

    assert state.phase is Phase.DONE


class Unavailable(RolloutStore):
    """Can't be read the first time; ``refused`` tells what was asked."""

    refused: tuple[str, ...] = ()

    def open_intents(self, rollout_uid: str) -> tuple[TimelineRow, ...]:
        self._refuse("open_intents")
        return super().open_intents(rollout_uid)

    def asked(self, rollout_uid: str) -> tuple[CommandRow, ...]:
        self._refuse("asked")
        return super().asked(rollout_uid)

    def _refuse(self, what: str) -> None:
        if what not in self.refused:
            self.refused = (*self.refused, what)
            raise UnavailableError("the disk is away")


async def test_a_history_that_can_not_be_read_for_a_moment_holds_the_rollout_up_and_no_more(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the one before left open, and what operators ask, is read again."""
    monkeypatch.setattr("console.rollout.controller.STORE_AGAIN_S", 0.01)
    desk, effects = make_desk(rules(), (("a",),)), FakeEffects()
    effects.held.add(e.StartNode)
    async with running(desk.controller(effects, "before")):
        await eventually(lambda: effects.begun)
    desk.store("before").give_back(desk.uid)
    with contextlib.closing(Unavailable(desk.path, "next", desk.lease_s)) as store:
        async with running(Controller(store, store.take(desk.uid), FakeEffects(), tick_s=TICK_S)) as task:
            ident = desk.ask("resume")
            state = await task

    assert set(store.refused) == {"open_intents", "asked"}
    assert desk.answer(ident) == (True, "it goes on")
    assert state.phase is Phase.DONE


async def test_a_lease_counts_from_before_it_was_renewed(make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes most of a lease to store a turn leaves the rest of it, not a whole one."""
    monkeypatch.setattr("console.rollout.controller.STORE_AGAIN_S", 0.01)
    desk, effects = make_desk(rules(), (("a",),), lease_s=30.0), FakeEffects()
    spent_s: list[float] = []

    class Slow(RolloutStore):
        def record(self, rollout_uid: str, turn: Turn) -> tuple[int, ...]:
            spent_s.append(20.0)
            if len(spent_s) > 1:
                raise UnavailableError("the disk is away")
            return super().record(rollout_uid, turn)

    with contextlib.closing(Slow(desk.path, "one", desk.lease_s)) as store:
        controller = Controller(store, store.take(desk.uid), effects, clock=lambda: sum(spent_s), tick_s=TICK_S)
        with pytest.raises(UnavailableError, match="the disk is away"):
            await controller.run()

    assert len(spent_s) == 2


async def test_a_controller_that_can_not_store_for_a_whole_lease_ends(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then another may have it."""
    monkeypatch.setattr("db.database.BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr("console.rollout.controller.STORE_AGAIN_S", 0.01)
    desk, effects = make_desk(rules(), (("a",),), lease_s=0.1), FakeEffects()
    controller = desk.controller(effects)
    with contextlib.closing(connect(desk.path, read_only=False)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match=r"keeps .* locked"):
            await controller.run()
        connection.execute("ROLLBACK")

    assert effects.begun == []


async def test_a_controller_whose_history_is_gone_names_who_is_out_of_traffic(make_desk: MakeDesk) -> None:
    """With the history, nobody else would know of them."""
    desk, effects = make_desk(rules(), (("a",), ("b",)), lease_s=0.4), FakeEffects()
    effects.held.add(e.StartNode)
    async with running(desk.controller(effects)) as task:
        await eventually(lambda: effects.begun)
        desk.path.rename(desk.path.with_name("gone"))
        with pytest.raises(DamagedError, match=r"was moved or replaced while in use; .*; out of traffic: a$"):
            await task
