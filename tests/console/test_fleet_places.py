"""How many runs load at once, who waits for a place, and who gives one up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from console.errors import RequestRefused
from console.fleet import Fleet
from console.places import Places
from remote_agent.protocol.messages import RunState
from tests.console.fake_host import eventually
from tests.console.fleet_world import NODES, World, view


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
async def fleet(world: World) -> AsyncIterator[Fleet]:
    async with world.fleet() as fleet:
        yield fleet


async def test_no_more_than_parallel_runs_load_at_once(world: World) -> None:
    """The others are visible as queued, and start one by one as places become free."""
    async with world.fleet(parallel=1) as fleet:
        uids = {name: await fleet.warm(name, "llama") for name in NODES}
        assert [name for name in NODES if world.hosts[name].runs] == ["n1"]
        waiting = view(fleet, "n3", uids["n3"])
        assert (waiting.state, waiting.is_accepted) == (RunState.QUEUED, False)

        world.hosts["n1"].finish(uids["n1"])
        await eventually(lambda: world.hosts["n2"].runs)
        assert not world.hosts["n3"].runs

        fleet.parallel = 2
        await eventually(lambda: world.hosts["n3"].runs)


async def test_nodes_that_share_storage_load_from_it_one_after_the_other(world: World) -> None:
    """Who waits for it says so, keeps no place from a node of other storage, and begins once the one before is over."""
    shared = [dataclasses.replace(node, storage_group="nas-1") for node in world.config.nodes[:2]]
    world.config = dataclasses.replace(
        world.config, nodes=(*shared, world.config.nodes[2]), storage_groups={"nas-1": 1}
    )
    async with world.fleet(parallel=2) as fleet:
        uids = {name: await fleet.warm(name, "llama") for name in NODES}
        assert [name for name in NODES if world.hosts[name].runs] == ["n1", "n3"]
        assert view(fleet, "n2", uids["n2"]).waits_among == "the loads from nas-1"

        world.hosts["n3"].finish(uids["n3"])
        fleet.parallel = 1
        world.hosts["n1"].finish(uids["n1"])
        await eventually(lambda: world.hosts["n2"].runs)
        assert (await fleet.accepted("n2", uids["n2"])).is_accepted


async def test_who_has_a_place_at_its_storage_waits_among_all_loads_next(world: World) -> None:
    """The line that says what a run waits for is told anew."""
    nodes = tuple(dataclasses.replace(node, storage_group="nas-1") for node in world.config.nodes[:2])
    world.config = dataclasses.replace(world.config, nodes=(*nodes, world.config.nodes[2]), storage_groups={"nas-1": 1})
    async with world.fleet(parallel=1) as fleet:
        uids = {name: await fleet.warm(name, "llama") for name in ("n1", "n2")}
        assert view(fleet, "n2", uids["n2"]).waits_among == "the loads from nas-1"
        uids["n3"] = await fleet.warm("n3", "llama")
        world.hosts["n1"].finish(uids["n1"])
        await eventually(lambda: world.hosts["n3"].runs)
        assert view(fleet, "n2", uids["n2"]).waits_among == "the parallel loads"

        world.hosts["n3"].finish(uids["n3"])
        await eventually(lambda: world.hosts["n2"].runs)


async def test_a_failed_run_gives_its_place_to_the_next(world: World) -> None:
    """A place is held until a run is over, however it ends."""
    async with world.fleet(parallel=1) as fleet:
        first, second = await fleet.warm("n1", "llama"), await fleet.warm("n2", "llama")
        world.hosts["n1"].finish(first, RunState.FAILED)

        await eventually(lambda: second in world.hosts["n2"].runs)
        assert (await fleet.wait("n1", first)).state is RunState.FAILED


async def test_a_queued_run_can_be_withdrawn_before_it_is_sent(world: World) -> None:
    """Cancelling what waits here never reaches the node and frees nothing that others hold."""
    async with world.fleet(parallel=1) as fleet:
        first, second, third = [await fleet.warm(name, "llama") for name in NODES]

        await fleet.cancel("n2", second)
        assert (await fleet.wait("n2", second)).state is RunState.CANCELLED
        world.hosts["n1"].finish(first)

        await eventually(lambda: third in world.hosts["n3"].runs)
        assert not world.hosts["n2"].runs


async def test_a_run_withdrawn_before_its_node_was_asked_is_over_at_once(fleet: Fleet, world: World) -> None:
    """Whoever started it is not left waiting, nor told that its fate is unknown."""
    await eventually(lambda: fleet.state("n1").is_known)
    warming = asyncio.ensure_future(fleet.warm("n1", "llama", run_uid="run-00000009"))
    for _ in range(100):  # one step at a time, so that the request has not gone out yet
        if "run-00000009" in fleet.state("n1").runs:
            break
        await asyncio.sleep(0)

    await fleet.cancel("n1", "run-00000009")

    assert await warming == "run-00000009"
    assert not world.hosts["n1"].runs
    assert view(fleet, "n1", "run-00000009").state is RunState.CANCELLED


async def test_a_refused_run_says_so_and_frees_its_place(world: World) -> None:
    """The node's own words reach the caller and the node's log."""
    async with world.fleet(parallel=1) as fleet:
        world.hosts["n1"].is_refusing = True
        with pytest.raises(RequestRefused, match="no such directory"):
            await fleet.warm("n1", "llama", run_uid="run-00000009")

        refused = view(fleet, "n1", "run-00000009")
        assert (refused.state, refused.failure and refused.failure.code) == (RunState.FAILED, "no_such_model")
        await fleet.warm("n2", "llama")


async def test_places_are_given_in_order_and_not_lost_by_who_gives_up() -> None:
    """First come, first served; a cancelled waiter does not swallow a place."""
    places = Places(1)
    order: list[str] = []

    async def take(name: str) -> None:
        async with places:
            order.append(name)

    async with places:
        tasks = [asyncio.ensure_future(take(name)) for name in "abc"]
        await asyncio.sleep(0)
        assert places.is_full
        tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert order == ["b", "c"]
    assert not places.is_full
