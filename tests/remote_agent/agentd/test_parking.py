"""Standbys that are parked and unparked: what is refused, what is told, and whatever dies in between."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remote_agent.agentd.lock_file import LockFile
from remote_agent.errors import RefusedError
from remote_agent.keeper.client import KeeperAddress, ask, list_residents
from remote_agent.protocol.messages import (
    Event,
    Finding,
    Hold,
    ParkParams,
    ParkResult,
    ReleaseParams,
    ReleaseResult,
    Resident,
    ResidentChanged,
    RunRecord,
    RunState,
    StageStatus,
    StandbyStopParams,
    StandbyStopResult,
    Tier,
)
from tests.remote_agent.agentd.agents import (
    DEADLINE_S,
    Agent,
    Watcher,
    eventually,
    failure_of,
    is_running,
    parts_sum_to_wall,
    stage_of,
)

GPU = "cuda:0"


ORDERS = ("driver-park", "driver-unpark", "worker-map", "worker-unmap", "gate", "at-the-gate")
HOST: dict[str, Any] = {"devices": ("nvidiactl", "nvidia0"), "orders": {"sampler": "ok 1000000000"}}


def knows_its_gpus(agent: Agent) -> Agent:
    with agent.client() as client:
        eventually(lambda: client.status().probe.gpus, "the sampler reports")  # type: ignore[union-attr]
    return agent


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """One agent of a host with two GPUs for all tests that leave it running."""
    agent = Agent(tmp_path_factory.mktemp("agent"), heartbeat_s=0.1, **HOST)
    yield knows_its_gpus(agent.start())
    agent.close()


@pytest.fixture
def agent(lasting: Agent) -> Iterator[Agent]:
    """Return the agent, on which nothing is warm and whose children do as they should."""
    yield lasting
    for name in ORDERS:
        lasting.order(name, None)
    with lasting.client() as client:
        client.call("resident.release", ReleaseParams(everything=True, force=True), ReleaseResult)


@pytest.fixture
def mortal(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent of the test's own."""
    return knows_its_gpus(make_agent(**HOST))


def follow(agent: Agent) -> Watcher:
    """Return a client that is told what happens from now on."""
    with agent.client() as client:
        return agent.client("", client.greeting.newest_seq)


def warm(agent: Agent, client: Watcher, stub: str = "keeps", **recipe: Any) -> RunRecord:
    run = client.warm(agent.params(stub, (GPU,), **recipe))
    assert run.state is RunState.READY, run.failure
    return run


def park(client: Watcher, run_uid: str | None, name: str | None = None, method: str = "park") -> Resident:
    (resident,) = client.call(method, ParkParams(run_uid, name), ParkResult).residents
    return resident


def unpark(client: Watcher, run_uid: str) -> Resident:
    return park(client, run_uid, method="unpark")


def refusal(act: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(RefusedError) as refused:
        act()
    return refused.value.code, str(refused.value)


def only(client: Watcher) -> Resident:
    (resident,) = client.status().residents
    return resident


def changed(client: Watcher, wanted: Callable[[ResidentChanged], bool]) -> ResidentChanged:
    """Return the next change of an entry that is wanted."""

    def is_it(event: Event) -> bool:
        return isinstance(event.data, ResidentChanged) and wanted(event.data)

    data = client.next_event(is_it).data
    assert isinstance(data, ResidentChanged)
    return data


def why_gone(client: Watcher) -> str | None:
    return changed(client, lambda change: change.state == "gone").reason


def test_a_standby_is_parked_and_put_back(agent: Agent) -> None:
    """Its tier changes by one event each way, with the times; again changes nothing; its name does as well."""
    with follow(agent) as client:
        run = warm(agent, client)
        standby = only(client)
        parked = park(client, run.run_uid)
        there = changed(client, lambda change: change.resident.tier is Tier.PARKED)
        assert park(client, None, parked.name) == parked
        back = unpark(client, run.run_uid)
        again = changed(client, lambda change: change.resident.tier is Tier.STANDBY)
        assert unpark(client, run.run_uid) == back

    assert (parked.tier, parked.host_bytes, parked.pid) == (Tier.PARKED, 3000, standby.pid)
    assert (there.resident, there.state) == (parked, "held")
    assert there.steps.keys() == {"unmap_ns", "lock_ns", "checkpoint_ns", "park_ns"}
    assert back == standby
    assert again.steps.keys() == {"restore_ns", "unlock_ns", "map_ns", "unpark_ns"}


def test_a_run_finds_its_standby_parked_and_wakes_it(agent: Agent) -> None:
    """What that took is in its ``context`` stage; the parts sum to the wall time, and it has a tier of its own."""
    with follow(agent) as client:
        run = warm(agent, client)
        pid = park(client, run.run_uid).pid
        params = agent.params("keeps", (GPU,))
        assert client.begin(params).tier_from is Tier.PARKED
        second = client.finished(params.run_uid)

        context = stage_of(second, "context")
        assert (second.state, second.tier_from) == (RunState.READY, Tier.PARKED)
        assert (context.status, context.reason) == (StageStatus.REUSED, "unparked; the standby has it")
        assert context.extra["restore_ns"] == 3
        assert context.extra["map_ns"] == 5
        assert parts_sum_to_wall(second)
        assert (only(client).tier, only(client).pid, only(client).run_uid) == (Tier.STANDBY, pid, second.run_uid)


@pytest.mark.parametrize("left", ["lost", "die"])
def test_a_run_whose_standby_is_lost_goes_on_with_a_fresh_worker(agent: Agent, left: str) -> None:
    """The driver refuses the restore, or its child dies twice: said as a finding; the weights are attached."""
    with follow(agent) as client:
        run = warm(agent, client)
        pid = park(client, run.run_uid).pid or 0
        agent.order("driver-unpark", left)
        params = agent.params("keeps", (GPU,))
        client.begin(params)
        finding = client.next_event(lambda event: isinstance(event.data, Finding) and "lost" in event.data.text).data
        second = client.finished(params.run_uid)
        new = only(client)

    assert isinstance(finding, Finding)
    assert (finding.code, finding.text[:14]) == ("unpark_failed", "lost: reload: ")
    assert (second.state, second.tier_from) == (RunState.READY, Tier.RESIDENT)
    assert stage_of(second, "weights").status is StageStatus.REUSED
    assert (stage_of(second, "context").reason or "").startswith("lost: reload: ")
    assert parts_sum_to_wall(second)
    assert not is_running(pid)
    assert new.pid != pid


def fill_gpus(agent: Agent, client: Watcher, used_bytes: int) -> None:
    """Have the sampler say so, and wait until it is known."""
    agent.order("sampler", f"ok {used_bytes}")
    eventually(
        lambda: client.status().probe.gpus[0].memory_used_bytes == used_bytes,  # type: ignore[union-attr]
        "the sampler reports again",
    )


def test_a_run_whose_standby_has_no_room_to_come_back_fails_and_leaves_it(agent: Agent) -> None:
    """A restore without room is final, so it is not tried: the refusal names who holds the memory."""
    with follow(agent) as client:
        run = warm(agent, client)
        park(client, run.run_uid)
        fill_gpus(agent, client, 7999999000)
        second = client.warm(agent.params("keeps", (GPU,)))
        by_hand = refusal(lambda: unpark(client, run.run_uid))
        left = only(client)
        fill_gpus(agent, client, 1000000000)

    assert (failure_of(second).code, failure_of(second).stage) == ("no_memory", "context")
    assert "needs 3000 bytes, free are 1000 bytes; held by" in failure_of(second).detail
    assert by_hand == ("no_memory", failure_of(second).detail)
    assert left.tier is Tier.PARKED


def test_changed_files_replace_a_parked_standby(agent: Agent) -> None:
    """It is not put back first; its process is gone, and nothing of the old files stays."""
    with follow(agent) as client:
        run = warm(agent, client)
        pid = park(client, run.run_uid).pid or 0
        agent.model.write_bytes(b"other weights")
        second = warm(agent, client)

        assert second.tier_from is Tier.COLD
        assert not is_running(pid)
        assert only(client).run_uid == second.run_uid


def test_what_can_be_parked_is_said_to_whoever_asks_for_something_else(agent: Agent) -> None:
    """A resident has no process, an armed one no weights, one on a CPU nothing that the driver could take."""
    with follow(agent) as client:
        resident = client.warm(agent.params("", (GPU,), target_tier="resident"))
        armed = client.arm(agent.params("armed", (GPU,)))
        on_cpu = client.warm(agent.params())
        uids = (resident.run_uid, armed.run_uid, on_cpu.run_uid, "0" * 8)
        refused = [refusal(lambda uid=uid: park(client, uid)) for uid in uids]

    assert [code for code, _ in refused] == ["not_a_standby", "not_a_standby", "unsupported", "no_such_resident"]
    assert "is resident: only a standby can be parked" in refused[0][1]
    assert "is armed: only a standby can be parked" in refused[1][1]
    assert refused[2][1] == "tiny on cpu has nothing on a GPU: the driver parks processes on NVIDIA GPUs alone"


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        ("keeps gate:first_request", "tiny on {device} serves run {run}"),
        ("keeps gate:assign", "tiny on {device}: its device is taken by run {run}"),
    ],
)
def test_a_standby_whose_device_is_busy_is_not_parked(agent: Agent, stub: str, words: str) -> None:
    """With a run of its own, or while another model loads there; the run is named."""
    with follow(agent) as client:
        run = warm(agent, client, "keeps gate:first_request")
        agent.order("gate", "shut")
        params = agent.params(stub, (GPU,))
        client.begin(params)
        client.stage(params.run_uid, stub.partition(":")[2])
        refused = refusal(lambda: park(client, run.run_uid))
        device = client.status().residents[0].device
        agent.order("gate", None)
        client.finished(params.run_uid)

    assert refused == ("busy", words.format(device=device, run=params.run_uid))


FAILURES = [
    ("driver-park", "unsupported", "unsupported", "cuInit failed: CUDA_ERROR_NO_DEVICE (100)"),
    ("driver-park", "running", "park_failed", "the driver refuses: CUDA_ERROR_NOT_SUPPORTED"),
    ("driver-park", "die", "park_failed", "the park child killed (SIGKILL) without a report"),
    ("worker-unmap", "the keeper has them not", "cannot_park", "the keeper has them not"),
]


def test_a_park_that_fails_leaves_the_standby(agent: Agent) -> None:
    """Whatever failed it is refused by its reason; the next run is served by the same process."""
    refused, after = [], []
    with follow(agent) as client:
        run = warm(agent, client)
        before = only(client)
        for order, answer, _, _ in FAILURES:
            agent.order(order, answer)
            refused.append(refusal(lambda: park(client, run.run_uid)))
            agent.order(order, None)
            after.append(only(client))
        second = warm(agent, client)

    assert refused == [(code, words) for _, _, code, words in FAILURES]
    assert after == [before] * len(FAILURES)
    assert (second.tier_from, stage_of(second, "context").extra) == (Tier.STANDBY, {})


def test_a_host_without_room_for_it_is_named_with_the_numbers(agent: Agent) -> None:
    """Asked before anything is touched."""
    with follow(agent) as client:
        run = warm(agent, client, f"keeps device-bytes:{1 << 60}")
        code, text = refusal(lambda: park(client, run.run_uid))

        assert (code, only(client).tier) == ("cannot_park", Tier.STANDBY)
    assert text.startswith(f"needs {1 << 60} bytes of host memory, ")


@pytest.mark.parametrize(
    ("order", "answer", "words"),
    [
        ("driver-park", "lost", "lost: reload: the driver refuses: CUDA_ERROR_NOT_SUPPORTED"),
        ("worker-unmap", "die", "lost: reload: its worker killed (SIGKILL)"),
        ("worker-unmap", "fail", "lost: reload: no resident llama is held"),
    ],
)
def test_a_standby_lost_on_its_way_off_leaves_its_weights(agent: Agent, order: str, answer: str, words: str) -> None:
    """Its process is ended; the keeper's part is a resident."""
    with follow(agent) as client:
        run = warm(agent, client)
        pid = only(client).pid or 0
        agent.order(order, answer)
        refused = refusal(lambda: park(client, run.run_uid))
        left = only(client)

    assert refused == ("lost", words)
    assert not is_running(pid)
    assert (left.tier, left.pid) == (Tier.RESIDENT, None)


@pytest.mark.parametrize(
    ("order", "answer", "words"),
    [
        ("driver-unpark", "lost", "lost: reload: the driver refuses: CUDA_ERROR_NOT_SUPPORTED"),
        ("worker-map", "die", "lost: reload: its worker killed (SIGKILL)"),
        ("worker-map", "fail", "lost: reload: no resident llama is held"),
    ],
)
def test_a_standby_lost_on_its_way_back_leaves_its_weights(agent: Agent, order: str, answer: str, words: str) -> None:
    """Gone by that reason, or by how it ended if it ended by itself."""
    with follow(agent) as client:
        run = warm(agent, client)
        pid = park(client, run.run_uid).pid or 0
        agent.order(order, answer)
        refused = refusal(lambda: unpark(client, run.run_uid))
        reason = why_gone(client)

        assert refused == ("lost", words)
        assert reason == (words if answer != "die" else "its worker killed (SIGKILL)")
        assert not is_running(pid)
        assert only(client).tier is Tier.RESIDENT


def test_what_was_not_begun_on_the_way_back_is_tried_again(agent: Agent) -> None:
    """A driver that can't just now leaves it parked; a park child that dies once is followed by another."""
    with follow(agent) as client:
        run = warm(agent, client)
        park(client, run.run_uid)
        agent.order("driver-unpark", "unsupported")
        code, _ = refusal(lambda: unpark(client, run.run_uid))
        assert (code, only(client).tier) == ("unpark_failed", Tier.PARKED)
        agent.order("driver-unpark", "die-once")

        assert unpark(client, run.run_uid).tier is Tier.STANDBY


def test_a_standby_is_put_back_when_no_other_agent_loads_there(agent: Agent) -> None:
    """Else both would count on the same free memory: it waits and says for whom; stopped as any standby, it goes."""
    with follow(agent) as client:
        run = warm(agent, client)
        device, pid = park(client, run.run_uid).device, only(client).pid or 0
        lock = LockFile(agent.orders / "locks" / f"glowplug-{device}.lock")
        assert lock.try_take({"pid": 1, "user": "bob", "run": "b"})
        with agent.client() as other:
            asking = threading.Thread(target=lambda: unpark(other, run.run_uid))
            asking.start()
            waiting = client.next_event(lambda event: isinstance(event.data, Finding)).data
            meanwhile = only(client).tier
            lock.release(was_used=True)
            asking.join(DEADLINE_S)
        back = park(client, run.run_uid, method="unpark").tier
        park(client, run.run_uid)
        stopped = client.call("standby.stop", StandbyStopParams("tiny"), StandbyStopResult).stopped

        assert isinstance(waiting, Finding)
        assert waiting.text == f"waits for run b of bob (agent process 1), which loads onto {device}"
        assert (meanwhile, back) == (Tier.PARKED, Tier.STANDBY)
        assert [one.tier for one in stopped] == [Tier.PARKED]
        assert only(client).tier is Tier.RESIDENT
    assert not is_running(pid)


def test_a_run_s_standbys_on_two_gpus_move_side_by_side(agent: Agent) -> None:
    """Each in the slot of its own device; nothing is held of either afterwards."""
    with follow(agent) as client:
        run = client.warm(agent.params("keeps", (GPU, "cuda:1")))
        parked = client.call("park", ParkParams(run.run_uid), ParkResult)
        second = client.warm(agent.params("keeps", (GPU, "cuda:1")))

    assert [one.tier for one in parked.residents] == [Tier.PARKED] * 2
    assert (second.state, second.tier_from) == (RunState.READY, Tier.PARKED)
    assert len(parked.steps) == 2


def test_a_client_that_goes_away_leaves_no_process_half_parked(agent: Agent) -> None:
    """The move goes on; whoever asks for it again waits for the same one; the way back and release are refused."""
    agent.order("gate", "shut")
    agent.order("driver-park", "gate")
    with follow(agent) as client:
        run = warm(agent, client)
        with agent.client() as gone:
            asking = threading.Thread(target=lambda: refusal_or_end(gone, run.run_uid))
            asking.start()
            eventually(lambda: (agent.orders / "at-the-gate").exists(), "the driver is asked")
        asking.join(DEADLINE_S)
        refused = [
            refusal(lambda: unpark(client, run.run_uid)),
            refusal(lambda: client.call("resident.release", ReleaseParams(run.run_uid), ReleaseResult)),
        ]
        agent.order("gate", None)

        assert refused == [("busy", f"tiny on {only(client).device} is being parked or unparked")] * 2
        assert park(client, run.run_uid).tier is Tier.PARKED


def refusal_or_end(client: Watcher, run_uid: str) -> None:
    with pytest.raises((RefusedError, OSError, Exception)):
        park(client, run_uid)


def test_a_parked_standby_is_released_with_its_weights(agent: Agent) -> None:
    """At once, though its process hears nothing."""
    with follow(agent) as client:
        run = warm(agent, client)
        pid = park(client, run.run_uid).pid or 0
        released = client.call("resident.release", ReleaseParams(run.run_uid), ReleaseResult).released
        assert client.status().residents == ()

    assert [one.tier for one in released] == [Tier.PARKED]
    assert not is_running(pid)
    assert list_residents(KeeperAddress(agent.state)) == ()


def test_time_to_live_runs_on_while_parked(agent: Agent) -> None:
    """Over, the parked one goes by that reason, process and weights."""
    with follow(agent) as client:
        run = warm(agent, client, hold=Hold(ttl_s=1.5))
        pid = park(client, run.run_uid).pid or 0

        assert why_gone(client) == "its time to live of 1.5 s is over"
        assert client.status().residents == ()
    assert not is_running(pid)


def test_a_parked_process_that_dies_leaves_its_weights(agent: Agent) -> None:
    """As any standby's: gone by how it ended, its weights resident, and the next run attaches."""
    with follow(agent) as client:
        run = warm(agent, client)
        os.kill(park(client, run.run_uid).pid or 0, signal.SIGKILL)
        assert why_gone(client) == "its worker killed (SIGKILL)"
        left = only(client)
        second = warm(agent, client)

    assert (left.tier, left.host_bytes) == (Tier.RESIDENT, 0)
    assert second.tier_from is Tier.RESIDENT


def test_a_parked_standby_whose_weights_are_gone_is_lost_at_once(agent: Agent) -> None:
    """Nothing could be mapped into it again: it keeps no host memory until somebody asks."""
    with follow(agent) as client:
        run = warm(agent, client)
        parked = park(client, run.run_uid)
        ask(KeeperAddress(agent.state), f"drop! {parked.name}")

        assert why_gone(client) == "lost: reload: the keeper no longer has it"
        assert client.status().residents == ()
    assert not is_running(parked.pid or 0)


def test_a_stopped_agent_leaves_no_process_parked_or_half_parked(mortal: Agent) -> None:
    """Ended by a signal that none can miss, and the driver's child too; weights stay with the keeper."""
    agent = mortal
    with follow(agent) as client:
        parked = park(client, warm(agent, client).run_uid)
        run = client.warm(agent.params("keeps", ("cuda:1",)))
        pids = [one.pid or 0 for one in client.status().residents]
        agent.order("gate", "shut")
        agent.order("driver-park", "gate")
        asking = threading.Thread(target=lambda: refusal_or_end(client, run.run_uid))
        asking.start()
        eventually(lambda: (agent.orders / "at-the-gate").exists(), "the driver is asked")
        assert agent.process is not None
        agent.process.send_signal(signal.SIGTERM)
        agent.process.wait(DEADLINE_S)
        asking.join(DEADLINE_S)

    assert (len(pids), parked.pid in pids) == (2, True)
    assert not any(map(is_running, pids))
    assert len(list_residents(KeeperAddress(agent.state))) == 2


def test_an_error_of_its_gpu_drops_what_is_parked_there(agent: Agent) -> None:
    """Process and weights, by that reason: neither is what it was."""
    with follow(agent) as client:
        parked = park(client, warm(agent, client).run_uid)
        agent.order("sampler", "ok 1000000000 1")

        assert why_gone(client) == f"lost: 1 uncorrectable ECC error on {parked.device}: reload"
        assert client.status().residents == ()
    assert not is_running(parked.pid or 0)
    assert list_residents(KeeperAddress(agent.state)) == ()


def test_the_next_agent_ends_what_a_killed_one_had_parked(mortal: Agent) -> None:
    """Gone by name; its weights are found at the keeper."""
    agent = mortal
    with follow(agent) as client:
        run = warm(agent, client)
        pid = park(client, run.run_uid).pid or 0
    agent.kill()
    agent.start()
    with agent.client("later") as client:
        assert why_gone(client) == "the agent that held it has ended"
        eventually(lambda: client.status().residents, "the keeper is asked")
        left = only(client)

    assert not is_running(pid)
    assert left.tier is Tier.RESIDENT
