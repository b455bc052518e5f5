"""What a fleet has from the history, and what becomes of one that is damaged or closed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from console.errors import HistoryError
from db.queries import History
from remote_agent.protocol.messages import RunState, Tier
from tests.console.fake_host import eventually
from tests.console.fleet_world import World, view


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_run_stored_while_the_fleet_closes_asks_the_closed_history_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last event is committed by the close itself: no baseline is looked up any more, and no complaint logged."""
    async with world.fleet() as fleet:
        uid = await fleet.warm("n1", "llama")
        world.hosts["n1"].finish(uid)
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    with History(world.history_path) as history:
        stored = history.run(uid)
    assert stored is not None
    assert stored[0].state == "ready"
    assert caplog.records == []


async def test_history_gives_the_baseline_of_the_next_run(world: World) -> None:
    """Medians are there before a run, from every tier, and follow each run that ended."""
    async with world.fleet() as fleet:
        for _ in range(2):
            uid = await fleet.warm("n1", "llama")
            world.hosts["n1"].finish(uid)
            await fleet.wait("n1", uid)
        await eventually(lambda: [one.count for one in fleet.state("n1").baselines.values()] == [2])

    async with world.fleet() as fleet:
        await eventually(lambda: fleet.state("n1").baselines)
        (key, baseline), *_ = fleet.state("n1").baselines.items()
        assert key[1] is Tier.COLD
        assert (baseline.count, baseline.wall_ns, baseline.stages_ns["weights"]) == (2, 100, 60)
        uid = await fleet.warm("n1", "llama")
        assert view(fleet, "n1", uid).baseline == baseline


async def test_a_newly_opened_fleet_shows_each_node_s_last_run_from_the_history(world: World) -> None:
    """The host replays nothing that was acknowledged and need not be reachable; the run is what it was, compared."""
    shown = {}
    async with world.fleet() as fleet:
        for state in (RunState.READY, RunState.FAILED, RunState.READY):
            uid = await fleet.warm("n1", "llama")
            world.hosts["n1"].finish(uid, state)
            shown[state] = await fleet.wait("n1", uid)
        await fleet.warm("n2", "llama")
        await fleet.flush()
    world.hosts["n1"].is_reachable = False

    async with world.fleet() as fleet:
        await eventually(lambda: (run := fleet.state("n1").run) is not None and run.baseline is not None)
        run, last = fleet.state("n1").run, shown[RunState.READY]
        assert run is not None
        assert (run.run_uid, run.state, run.output, run.stages) == (
            last.run_uid,
            last.state,
            last.output,
            last.stages,
        )
        assert run.baseline is not None
        assert run.baseline.count == 1
        assert fleet.state("n3").run is None


async def test_a_run_under_way_is_shown_before_the_one_that_the_history_knows(world: World) -> None:
    """Whichever is told first."""
    async with world.fleet() as fleet:
        over = await fleet.warm("n1", "llama")
        world.hosts["n1"].finish(over)
        await fleet.wait("n1", over)
        await fleet.flush()
    async with world.fleet() as fleet:
        await eventually(lambda: fleet.state("n1").latest_run == over)
        uid = await fleet.warm("n1", "llama")
        assert fleet.state("n1").latest_run == uid
        await fleet.flush()

    async with world.fleet() as fleet:
        await eventually(lambda: len(fleet.state("n1").runs) == 2)
        assert fleet.state("n1").latest_run == uid


async def test_a_damaged_history_is_moved_aside_and_said(world: World) -> None:
    """The console starts all the same, and its notice says where the damaged file went."""
    world.history_path.write_bytes(b"SQLite format 3\0" + b"\xff" * 8000)

    async with world.fleet() as fleet:
        assert "moved" in fleet.notices[0]


async def test_a_history_that_cannot_be_opened_is_one_error(tmp_path: Path, world: World) -> None:
    """What the database raises becomes the console's own error."""
    world.history_path = tmp_path

    with pytest.raises(HistoryError):
        await world.fleet().start()


async def test_two_consoles_with_one_history_store_each_event_once(world: World) -> None:
    """Two processes may share a history file; what both heard is there once."""
    async with world.fleet() as one, world.fleet() as other:
        uid = await one.warm("n1", "llama")
        world.hosts["n1"].finish(uid)
        await one.wait("n1", uid)
        await other.wait("n1", uid)
        assert await one.flush()
        assert await other.flush()
        assert [event.seq for event in one.history.events(uid)] == [1, 2, 3]
