"""The fleet over hosts that live in the test, with a real history."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from console.config import Config
from console.config_nodes import Node
from console.errors import NodeUnreachable, RequestRefused, UsageError
from console.fleet import Fleet
from console.links import real_links
from console.state import NodeState
from console.transports import Gate
from db.database import open_history
from db.queries import History
from remote_agent.protocol.messages import Failure, RunState, Tier
from tests.console.fake_host import eventually
from tests.console.fleet_world import NODES, RECIPES, World, view
from tests.console.happenings import ACTOR

DEADLINE_S = 30.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
async def fleet(world: World) -> AsyncIterator[Fleet]:
    async with world.fleet() as fleet:
        yield fleet


async def test_a_node_is_asked_what_it_is_and_does_when_it_connects(fleet: Fleet, world: World) -> None:
    """Probe and residents are known without anyone asking, and the panel is told to redraw."""
    await eventually(lambda: all(fleet.state(name).probe for name in NODES))

    assert fleet.nodes == NODES
    assert fleet.state("n1").residents == ()
    assert fleet.take_dirty() == set(NODES)
    assert fleet.take_dirty() == set()


async def test_a_warm_up_runs_to_ready_and_into_the_history(fleet: Fleet, world: World) -> None:
    """warm answers with the uid, wait with the ready run, and the history has all of it, acknowledged."""
    uid = await fleet.warm("n1", "llama")
    host = world.hosts["n1"]
    host.begin(uid)
    assert view(fleet, "n1", uid).state is RunState.RUNNING
    assert fleet.elapsed_ns("n1") is not None
    host.finish(uid)

    run = await fleet.wait("n1", uid, timeout_s=10)

    assert run.state is RunState.READY
    assert await fleet.flush()
    stored = fleet.history.run(uid)
    assert stored is not None
    row, stages = stored
    assert (row.state, row.node, row.recipe, row.actor_user, row.wall_ns) == ("ready", "n1", "llama", "ada", 100)
    assert sum(stage.attributed_ns or 0 for stage in stages) + (row.unattributed_ns or 0) == row.wall_ns
    assert [one.kind for one in fleet.history.events(uid)] == [
        "run.accepted",
        "run.started",
        "run.finished",
        "resident",
    ]
    await eventually(lambda: world.links["n1"].acked[-1:] == [("journal-n1", 4)])


async def test_a_run_under_way_is_cancelled_by_its_node(fleet: Fleet, world: World) -> None:
    """The node's answer is what the state shows."""
    uid = await fleet.warm("n1", "llama")

    await fleet.cancel("n1", uid)

    assert view(fleet, "n1", uid).state is RunState.CANCELLED


async def test_a_lost_link_is_not_a_failed_run(fleet: Fleet, world: World) -> None:
    """wait outlives the link; what happened meanwhile is replayed, and stored once."""
    uid = await fleet.warm("n1", "llama")
    waiting = asyncio.ensure_future(fleet.wait("n1", uid))
    world.links["n1"].lose()
    assert view(fleet, "n1", uid).state is RunState.QUEUED
    assert not fleet.state("n1").is_known
    world.hosts["n1"].begin(uid)
    world.hosts["n1"].finish(uid)
    assert not waiting.done()

    world.links["n1"].connect()

    assert (await waiting).state is RunState.READY
    await fleet.flush()
    assert [one.seq for one in fleet.history.events(uid)] == [1, 2, 3, 4]


async def test_a_run_is_not_asked_for_again_when_the_replay_tells_of_it(fleet: Fleet, world: World) -> None:
    """The answer was lost with the link; what the host replays once the link is back answers as well."""
    world.hosts["n1"].loses_answers = 1
    warming = asyncio.ensure_future(fleet.warm("n1", "llama", run_uid="run-00000009"))
    await eventually(lambda: world.hosts["n1"].runs and not world.links["n1"].is_connected)
    assert not warming.done()

    world.links["n1"].connect()

    assert await warming == "run-00000009"
    assert world.hosts["n1"].asked.count("run.start") == 1
    assert [one.kind for one in world.hosts["n1"].journal] == ["run.accepted"]


async def test_a_run_is_not_started_twice_when_it_is_asked_for_again(fleet: Fleet, world: World) -> None:
    """Without a replay yet, the same run_uid is asked for once more, and the host has it already."""
    world.hosts["n1"].loses_answers = 1
    world.hosts["n1"].holds_replay_back = True
    warming = asyncio.ensure_future(fleet.warm("n1", "llama", run_uid="run-00000009"))
    await eventually(lambda: world.hosts["n1"].runs and not world.links["n1"].is_connected)

    world.links["n1"].connect()

    assert await warming == "run-00000009"
    assert world.hosts["n1"].asked.count("run.start") == 2
    assert [one.kind for one in world.hosts["n1"].journal] == ["run.accepted"]


async def test_a_node_that_cannot_be_reached_says_why(world: World) -> None:
    """warm waits for the link up to its time-out, then names the node and the link's reason."""
    world.hosts["n1"].is_reachable = False
    async with world.fleet() as fleet:
        with pytest.raises(NodeUnreachable, match=r"n1.*connection refused"):
            await fleet.warm("n1", "llama")

        assert fleet.state("n1").runs == {}
        fleet.retry_now("n1")
        assert world.links["n1"].retries == 1


@pytest.mark.parametrize("verb", ["probe", "status", "warm", "cancel", "release", "park", "unpark"])
async def test_a_transport_that_ends_at_once_is_not_waited_for(world: World, tmp_path: Path, verb: str) -> None:
    """Two tries that find no agent are enough, however long connect_timeout_s is."""
    node = Node("n1", transport=("/bin/false",), connect_timeout_s=600.0)
    fleet = Fleet(
        Config((node,), RECIPES),
        world.history_path,
        actor=ACTOR,
        links=real_links(Gate(tmp_path / "known_hosts", tmp_path)),
    )
    arguments = {"warm": ("n1", "llama"), **dict.fromkeys(("cancel", "park", "unpark"), ("n1", "run-00000009"))}.get(
        verb, ("n1",)
    )

    async with fleet, asyncio.timeout(DEADLINE_S):
        with pytest.raises(NodeUnreachable, match=r"n1.*/bin/false ended with 1"):
            await getattr(fleet, verb)(*arguments)


async def test_a_server_that_says_nothing_is_told_by_the_login_s_own_words(world: World, tmp_path: Path) -> None:
    """A verb waits as long as the login may take, and for the moment that it needs to say what became of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        node = Node("n1", host="127.0.0.1", port=port, user="ann", connect_timeout_s=0.3)
        links = real_links(Gate(tmp_path / "known_hosts", tmp_path))
        async with Fleet(Config((node,), RECIPES), world.history_path, actor=ACTOR, links=links) as fleet:
            with pytest.raises(
                NodeUnreachable, match=rf"n1 \(127\.0\.0\.1 port {port}\) gave no SSH login within 0\.3 s"
            ):
                await fleet.status("n1")


async def test_a_node_that_was_out_of_reach_gets_one_more_try(fleet: Fleet, world: World) -> None:
    """What failed often before anyone asked says nothing about the try that comes next."""
    link = world.links["n1"]
    link.lose("connection refused", failures=17)
    asking = asyncio.ensure_future(fleet.probe("n1"))
    await asyncio.sleep(0)
    assert not asking.done()

    link.connect()

    assert (await asking).hostname


async def test_waiting_ends_when_no_retry_will_be_made(fleet: Fleet, world: World) -> None:
    """A changed host key is final: the run can't be followed, and that is no failed run."""
    uid = await fleet.warm("n1", "llama")
    waiting = asyncio.ensure_future(fleet.wait("n1", uid))

    world.links["n1"].lose("the host key has changed", final=True)

    with pytest.raises(NodeUnreachable, match="host key"):
        await waiting
    assert view(fleet, "n1", uid).state is RunState.QUEUED


async def test_a_wait_that_times_out_says_whether_the_node_is_there(fleet: Fleet, world: World) -> None:
    """Out of reach is NodeUnreachable, still working is TimeoutError."""
    uid = await fleet.warm("n1", "llama")

    with pytest.raises(TimeoutError):
        await fleet.wait("n1", uid, timeout_s=0.01)
    world.links["n1"].lose("cable pulled")
    with pytest.raises(NodeUnreachable, match="cable pulled"):
        await fleet.wait("n1", uid, timeout_s=0.01)


async def test_unknown_names_are_usage_errors(fleet: Fleet) -> None:
    """A wrong recipe or node is refused before anything is sent."""
    with pytest.raises(UsageError, match="lama"):
        await fleet.warm("n1", "lama")
    with pytest.raises(UsageError, match="n9"):
        await fleet.warm("n9", "llama")


async def test_what_is_warm_is_released(fleet: Fleet, world: World) -> None:
    """By run, or everything; the node's list is asked again."""
    uid = await fleet.warm("n1", "llama")
    world.hosts["n1"].finish(uid)
    assert [one.run_uid for one in fleet.state("n1").residents or ()] == [uid]

    released = await fleet.release("n1", uid)

    assert [one.run_uid for one in released] == [uid]
    assert fleet.state("n1").residents == ()


async def test_a_standby_is_parked_and_put_back(fleet: Fleet, world: World) -> None:
    """By run; the node's state follows."""
    uid = await fleet.warm("n1", "llama")
    world.hosts["n1"].finish(uid)
    parked = (await fleet.park("n1", uid)).residents
    between = fleet.state("n1").residents
    back = (await fleet.unpark("n1", uid)).residents

    assert (parked, [one.tier for one in parked]) == (between, [Tier.PARKED])
    assert ([one.tier for one in back], fleet.state("n1").residents) == ([Tier.STANDBY], back)


async def test_a_new_console_finds_the_run_that_an_earlier_one_left(world: World) -> None:
    """After a restart the cursor goes on where it was, status fills in the run, and each event is stored once."""
    async with world.fleet() as fleet:
        uid = await fleet.warm("n1", "llama")
        await fleet.flush()
    world.hosts["n1"].begin(uid)

    async with world.fleet() as fleet:
        await eventually(lambda: uid in fleet.state("n1").runs)
        assert view(fleet, "n1", uid).state is RunState.RUNNING
        world.hosts["n1"].finish(uid)
        assert (await fleet.wait("n1", uid)).state is RunState.READY
        await fleet.flush()
        assert [one.seq for one in fleet.history.events(uid)] == [1, 2, 3, 4]


async def test_a_run_that_ended_unseen_is_asked_for(fleet: Fleet, world: World) -> None:
    """When neither events nor status tell of a run someone waits for, run.get does."""
    await eventually(lambda: fleet.state("n1").probe)
    host = world.hosts["n1"]
    uid = await fleet.warm("n1", "llama")
    world.links["n1"].lose()
    host.finish(uid)
    host.journal.clear()  # trimmed before this console had it
    waiting = asyncio.ensure_future(fleet.wait("n1", uid))

    world.links["n1"].connect()

    assert (await waiting).state is RunState.READY
    assert "run.get" in host.asked


async def test_a_run_that_its_node_forgot_is_not_waited_for_for_ever(fleet: Fleet, world: World) -> None:
    """An agent that lost its records says so, and wait passes that on."""
    uid = await fleet.warm("n1", "llama")
    world.links["n1"].lose()
    world.hosts["n1"].runs.clear()
    waiting = asyncio.ensure_future(fleet.wait("n1", uid))

    world.links["n1"].connect()

    with pytest.raises(RequestRefused, match="no run"):
        await waiting


async def test_the_state_of_a_node_can_be_asked_before_the_start(world: World) -> None:
    """A screen draws before anything is connected."""
    assert world.fleet().state("n2").name == "n2"


async def test_closing_takes_a_bounded_time_and_stores_what_came(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that does not stop is left behind; the history is complete all the same."""
    monkeypatch.setattr("console.fleet.CLOSE_S", 2.0)
    fleet = world.fleet()
    await fleet.start()
    uid = await fleet.warm("n1", "llama")
    hanging = asyncio.Event()

    async def hang() -> None:
        await hanging.wait()

    world.links["n1"].stop = hang  # type: ignore[method-assign]
    before = time.monotonic()
    await fleet.close()

    assert time.monotonic() - before < 30
    with History(open_history(world.history_path).path) as history:
        assert history.run(uid) is not None


async def test_a_run_given_up_here_that_began_there_all_the_same_is_shown(fleet: Fleet, world: World) -> None:
    """When the answer was lost for good the run counts as not started, until its node says otherwise."""
    world.hosts["n1"].loses_answers = 1
    warming = asyncio.ensure_future(fleet.warm("n1", "llama", run_uid="run-00000009"))
    await eventually(lambda: not world.links["n1"].is_connected)
    world.links["n1"].lose("the host key has changed", final=True)
    with pytest.raises(NodeUnreachable):
        await warming
    assert "not known" in (view(fleet, "n1", "run-00000009").failure or Failure("", "")).detail

    world.links["n1"].connect()

    run = view(fleet, "n1", "run-00000009")
    assert (run.state, run.is_accepted, run.failure) == (RunState.QUEUED, True, None)


async def test_an_event_may_tell_what_a_lost_answer_did_not(fleet: Fleet, world: World) -> None:
    """A run whose acceptance was heard has begun, and warm does not ask again."""
    world.hosts["n1"].loses_answers, world.hosts["n1"].sends_events_first = 1, True

    uid = await fleet.warm("n1", "llama")

    assert view(fleet, "n1", uid).is_accepted
    assert world.hosts["n1"].asked.count("run.start") == 1


async def test_a_cancel_that_comes_with_the_answer_is_not_lost(fleet: Fleet, world: World) -> None:
    """Whoever was told to stop does, though what it waited for is there in the same moment."""
    host = world.hosts["n1"]
    await fleet.warm("n1", "llama", run_uid="run-00000009")
    waiting = asyncio.ensure_future(
        fleet.until("n1", lambda state: state.runs["run-00000009"].state.is_terminal or None, DEADLINE_S)
    )
    seen = asyncio.ensure_future(fleet.until("n1", partial(cancel_when_over, waiting, "run-00000009"), DEADLINE_S))
    await asyncio.sleep(0)
    host.finish("run-00000009")
    await seen

    with pytest.raises(asyncio.CancelledError):
        await waiting


def cancel_when_over(waiting: asyncio.Future[bool], uid: str, state: NodeState) -> bool | None:
    """Cancel in the same turn of the loop in which the state came."""
    if not state.runs[uid].state.is_terminal:
        return None
    waiting.cancel()
    return True
