"""A watch over hosts that live in the test, with a real history: events in, warm-ups out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from console.errors import HistoryError
from console.fleet import Fleet
from console.watch.leases import Leases
from console.watch.machine import Limits, Told
from console.watch.standing import Wanted
from console.watch.watch import Watch
from db.database import open_history
from db.rollout_store import RolloutStore
from db.watch_store import WatchStore
from remote_agent.protocol.messages import ResidentChanged, RunStartParams, RunState, Tier
from tests.console.fake_host import FakeHost, eventually
from tests.console.fleet_world import RECIPES, World
from tests.console.happenings import ACTOR
from tests.db.test_rollouts import NODES as ROLLOUT_NODES
from tests.db.test_rollouts import UID, rollout_row, turn

WANTED = Wanted(RECIPES["llama"], Tier.STANDBY)
LIMITS = Limits(Tier.STANDBY, first_s=0.02, limit_s=0.04, again_s=0.02)


class Scene:
    """Hosts, a fleet on them, and watches of its nodes."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self.world = world
        self.fleet = fleet
        self.told: list[tuple[str, str]] = []
        self.all: list[tuple[str, Told]] = []
        self._stack = contextlib.ExitStack()

    def store(
        self, holder: str = "one", lease_s: float = 10.0, clock_ns: Callable[[], int] | None = None
    ) -> WatchStore:
        store = WatchStore(self.world.history_path, holder, ("llama", "standby"), ("ada", "desk"), lease_s, clock_ns)
        return self._stack.enter_context(contextlib.closing(store))

    @contextlib.asynccontextmanager
    async def watching(self, *nodes: str, lease_s: float = 10.0, limits: Limits = LIMITS) -> AsyncIterator[Watch]:
        store = self.store(lease_s=lease_s)
        store.take(nodes)
        watch = Watch(self.fleet, nodes, WANTED, limits, Leases(store, self.fleet.history, nodes), self._tell)
        running = asyncio.ensure_future(watch.run())
        try:
            yield watch
        finally:
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.result()

    def close(self) -> None:
        self._stack.close()

    def _tell(self, node: str, told: Told) -> None:
        self.told.append((node, told.event))
        self.all.append((node, told))

    async def until_told(self, *events: tuple[str, str]) -> None:
        await eventually(lambda: all(self.told.count(event) >= events.count(event) for event in events))

    async def warm(self, node: str) -> None:
        """Let the host's run come to its end, well."""
        host = self.world.hosts[node]
        await eventually(lambda: running(host))
        host.finish(running(host)[-1])


def running(host: FakeHost) -> list[str]:
    return [uid for uid, run in host.runs.items() if not run.state.is_terminal]


def release(host: FakeHost, reason: str = "released by request") -> None:
    gone, host.residents = host.residents, []
    for one in gone:
        host.emit(ResidentChanged(one, "gone", reason), one.run_uid)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    world = World(tmp_path)
    async with world.fleet() as fleet:
        scene = Scene(world, fleet)
        try:
            yield scene
        finally:
            scene.close()


async def test_a_node_is_warmed_falls_and_is_warmed_again(scene: Scene) -> None:
    """The fall is told with its cause, without anybody asking the host in between."""
    host = scene.world.hosts["n1"]
    async with scene.watching("n1"):
        await scene.warm("n1")
        await scene.until_told(("n1", "back"))
        asked = host.asked.count("status")
        release(host)
        await scene.until_told(("n1", "fell"))
        await scene.warm("n1")
        await scene.until_told(("n1", "back"), ("n1", "back"))

    assert scene.told == [("n1", event) for event in ("below", "warming", "back", "fell", "warming", "back")]
    (fell,) = [one for _, one in scene.all if one.event == "fell"]
    assert (fell.tier, fell.cause, fell.reason) == (Tier.COLD, "released", "released by request")
    assert host.asked.count("status") == asked + 2, "one to be sure of the fall, one after the run"


async def test_what_is_warm_already_is_left_as_it_is(scene: Scene) -> None:
    """Nothing is asked but for what it is."""
    host = scene.world.hosts["n1"]
    uid = await scene.fleet.warm("n1", "llama")
    host.finish(uid)
    async with scene.watching("n1"):
        await scene.until_told(("n1", "held"))

    assert host.asked.count("run.start") == 1


async def test_a_lost_node_has_not_fallen_and_what_became_of_it_is_told_when_it_is_back(scene: Scene) -> None:
    """It is not warmed while it is away; the event of its fall comes with the replay."""
    host, uid = scene.world.hosts["n1"], await scene.fleet.warm("n1", "llama")
    host.finish(uid)
    async with scene.watching("n1"):
        await scene.until_told(("n1", "held"))
        link = scene.world.links["n1"]
        link.lose("connection reset")
        await scene.until_told(("n1", "unreachable"))
        release(host, "run 9 needed its room")
        link.connect()
        await scene.until_told(("n1", "warming"))

    assert scene.told == [("n1", event) for event in ("held", "unreachable", "reachable", "fell", "warming")]
    assert next(one.cause for _, one in scene.all if one.event == "fell") == "evicted"


async def test_a_try_that_fails_is_told_and_made_again(scene: Scene) -> None:
    """A refusal, a run that fails and one that somebody cancels alike, after a wait."""
    host = scene.world.hosts["n1"]
    host.is_refusing = True
    async with scene.watching("n1"):
        await scene.until_told(("n1", "failed"))
        host.is_refusing = False
        await eventually(lambda: running(host))
        host.finish(running(host)[0], RunState.FAILED)
        await scene.until_told(("n1", "failed"), ("n1", "failed"))
        await scene.warm("n1")
        await scene.until_told(("n1", "back"))

    reasons = [one.reason for _, one in scene.all if one.event == "failed"]
    assert reasons[0] == "/models/llama: no such directory"
    assert reasons[-1] == "killed by signal 9"


async def test_a_node_on_which_somebody_else_loads_is_left_alone(scene: Scene) -> None:
    """Who it is is told; what they leave warm is what was wanted."""
    host = scene.world.hosts["n1"]
    params = RunStartParams("run-of-grace", RECIPES["llama"], replace(ACTOR, user="grace"))
    host.answer("run.start", params)
    async with scene.watching("n1"):
        await scene.until_told(("n1", "left_alone"))
        host.finish("run-of-grace")
        await scene.until_told(("n1", "back"))

    assert host.asked.count("run.start") == 1
    assert scene.all[1][1].reason == "grace@workstation has llama in work there, run run-of-g"


async def test_a_node_that_a_rollout_has_is_left_alone_until_it_is_given_back(scene: Scene) -> None:
    """Read from the history, which is where rollouts keep that."""
    nodes = tuple(replace(one, node=name) for one, name in zip(ROLLOUT_NODES, ("n1", "n2"), strict=True))
    with contextlib.closing(RolloutStore(scene.world.history_path, "rollout")) as store:
        store.create(rollout_row(), nodes)
        store.record(UID, turn(nodes=(replace(nodes[0], state="failed", is_out=True),)))
        async with scene.watching("n1"):
            await scene.until_told(("n1", "left_alone"))
            assert not running(scene.world.hosts["n1"])
            store.record(UID, turn(phase="aborted", is_over=True))
            await scene.until_told(("n1", "warming"))

    assert scene.all[1][1].reason == "rollout pre-warm is at it (failed) and has it out of traffic"


async def test_no_more_load_at_once_than_there_are_places_and_who_waited_looks_again(scene: Scene) -> None:
    """While n2 waited for n1's place somebody else began there: it is not loaded a second time."""
    scene.fleet.parallel = 1
    first, second = scene.world.hosts["n1"], scene.world.hosts["n2"]
    async with scene.watching("n1") as one:
        await eventually(lambda: running(first))
        async with scene.watching("n2") as other:
            await eventually(lambda: scene.fleet.state("n2").runs)
            assert (list(one.going), other.going) == (["n1"], {})
            second.answer("run.start", RunStartParams("run-of-grace", RECIPES["llama"], ACTOR))
            first.finish(running(first)[0])
            await scene.until_told(("n1", "back"), ("n2", "left_alone"))

    assert list(second.runs) == ["run-of-grace"]


async def test_a_watch_that_another_has_taken_over_does_nothing_more(scene: Scene) -> None:
    """As after a sleep in which its lease ran out; the nodes that are still its own go on."""
    hosts = scene.world.hosts
    for name in ("n1", "n2"):
        hosts[name].finish(await scene.fleet.warm(name, "llama"))
    async with scene.watching("n1", "n2", lease_s=0.2) as watch:
        await scene.until_told(("n1", "held"), ("n2", "held"))
        scene.store("other", clock_ns=lambda: 2**62).take(["n1"])  # it comes when every lease has run out
        await scene.until_told(("n1", "ended"))
        release(hosts["n1"])
        release(hosts["n2"])
        await scene.until_told(("n2", "warming"))

    assert str(watch.ended["n1"]) == "n1 is watched for llama by ada@desk (other) now"
    assert hosts["n1"].asked.count("run.start") == 1


async def test_a_node_that_no_retry_will_reach_ends_its_watch(scene: Scene) -> None:
    """And with the last one ends the whole."""
    await eventually(lambda: scene.fleet.state("n1").is_known)
    async with scene.watching("n1") as watch:
        await scene.until_told(("n1", "below"))
        scene.world.links["n1"].lose("permission denied", final=True)
        await scene.until_told(("n1", "ended"))

    assert watch.ended["n1"].exit_code == 3


async def test_while_leases_can_not_be_renewed_nothing_is_loaded(tmp_path: Path) -> None:
    """Once they may have run out; until then a busy disk is no hindrance."""
    path, now_s = open_history(tmp_path / "history.db").path, 0.0
    store = WatchStore(path, "one", ("llama", "standby"), ("ada", "desk"))
    store.take(["a"])
    world = World(tmp_path)
    async with world.fleet() as fleet:
        leases = Leases(store, fleet.history, ["a"], clock=lambda: now_s)
        assert await leases.in_the_way("a") == ""
        store.close()
        now_s = 9.0
        assert await leases.in_the_way("a") == ""
        now_s = 11.0
        assert "can't be kept up" in await leases.in_the_way("a")


async def test_a_lease_that_another_took_before_the_watch_began_is_not_loaded_on(tmp_path: Path) -> None:
    """The first look at a node asks whose it is: since it was taken, a long start may have outlasted the lease."""
    path = open_history(tmp_path / "history.db").path
    async with World(tmp_path).fleet() as fleet:
        with contextlib.ExitStack() as stack:
            stores = [WatchStore(path, holder, ("llama", "standby"), ("ada", "desk")) for holder in ("one", "two")]
            for store in stores:
                stack.callback(store.close)
            stores[1].take(["a"])
            leases = Leases(stores[0], fleet.history, ["a"])
            with pytest.raises(HistoryError, match=r"a is watched for llama by ada@desk \(two\) now"):
                await leases.in_the_way("a")
