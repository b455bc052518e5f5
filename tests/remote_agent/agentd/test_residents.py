"""What the keeper holds, as the agent shows it: found, attached, released, outliving whoever loaded it."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from remote_agent.errors import RefusedError
from remote_agent.keeper.client import KeeperAddress, ask, lease, list_residents
from remote_agent.protocol.messages import (
    Empty,
    Event,
    Hold,
    ReleaseParams,
    ReleaseResult,
    Resident,
    ResidentChanged,
    ResidentListResult,
    RunRecord,
    RunState,
    ShutdownParams,
    StageStatus,
    Tier,
)
from tests.remote_agent.agentd.agents import DEADLINE_S, Agent, Watcher, eventually, failure_of, is_running, stage_of
from tests.remote_agent.keeper.keepers import memory


def warm(agent: Agent, stub: str = "", **recipe: Any) -> Resident:
    """Warm a resident and return it."""
    with agent.client("") as client:
        run = client.warm(agent.params(stub, target_tier="resident", **recipe))
        assert (run.state, run.tier_to) == (RunState.READY, Tier.RESIDENT), run
        (resident,) = residents(client)
    return resident


def residents(client: Watcher) -> tuple[Resident, ...]:
    return client.call("resident.list", Empty(), ResidentListResult).residents


def release(client: Watcher, **what: Any) -> tuple[Resident, ...]:
    return client.call("resident.release", ReleaseParams(everything=True, **what), ReleaseResult).released


def keeper_pid(client: Watcher) -> int:
    return eventually(lambda: client.status().processes["keeper"], "the keeper is found") or 0


def gone(client: Watcher, name: str | None = None) -> str | None:
    """Return why a resident went, once it has."""

    def is_it(event: Event) -> bool:
        data = event.data
        return isinstance(data, ResidentChanged) and data.state == "gone" and name in (None, data.resident.name)

    data = client.next_event(is_it).data
    assert isinstance(data, ResidentChanged)
    return data.reason


@contextmanager
def attached(agent: Agent, name: str | None) -> Iterator[socket.socket]:
    """Have a resident attached by this process."""
    link, reply = lease(KeeperAddress(agent.state), name or "")
    reply.close()
    with link:
        yield link


@pytest.fixture
def with_keeper(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent of a host with device files, whose keeper runs."""
    agent = make_agent(devices=("nvidiactl", "nvidia0"))
    with agent.client() as client:
        keeper_pid(client)
    return agent


def test_a_resident_needs_no_worker(agent: Agent) -> None:
    """The run is ready, its worker ends, and the keeper's part is listed with everything that is known of it."""
    resident = warm(agent, hold=Hold("team-a", 3600.0))
    with agent.client() as client:
        eventually(lambda: not any("worker" in name for name in client.status().processes), "the worker ends")
        assert residents(client) == (resident,)

    assert (resident.tier, resident.pid, resident.owner, resident.ttl_s) == (Tier.RESIDENT, None, "team-a", 3600.0)
    assert (resident.device, resident.bytes, resident.attached) == ("cpu", 1000, 0)
    assert [one.name for one in list_residents(KeeperAddress(agent.state))] == [resident.name]


def test_the_next_run_starts_from_the_resident_and_takes_it_over(agent: Agent) -> None:
    """Its weights are reused; one resident stays, now of that run."""
    first = warm(agent)
    with agent.client("") as client:
        run = client.warm(agent.params(target_tier="resident"))
        (resident,) = residents(client)

    assert (run.tier_from, run.tier_to) == (Tier.RESIDENT, Tier.RESIDENT)
    assert stage_of(run, "weights").status is StageStatus.REUSED
    assert stage_of(run, "preflight").extra["tier_from"] == "resident"
    assert (resident.run_uid, resident.name) == (run.run_uid, first.name)


def test_changed_files_are_loaded_and_the_old_ones_go(agent: Agent) -> None:
    """A resident never answers for files that it is not; nobody is attached, so its memory is freed."""
    first = warm(agent)
    agent.model.write_bytes(b"other weights")
    second = warm(agent)

    assert second.name != first.name
    assert [one.name for one in list_residents(KeeperAddress(agent.state))] == [second.name]


def test_changed_files_leave_alone_what_is_attached(agent: Agent) -> None:
    """Whoever uses the old weights keeps them, and the operator is told."""
    first = warm(agent)
    agent.model.write_bytes(b"other weights")
    with attached(agent, first.name), agent.client("") as client:
        client.warm(agent.params(target_tier="resident"))
        names = {one.name: one.attached for one in residents(client)}

    assert names.pop(first.name) == 1
    assert list(names.values()) == [0]


def test_what_cannot_be_used_is_dropped_and_loaded_again(agent: Agent) -> None:
    """The run is ready all the same; the lost resident is gone with the reason, the new one is there."""
    first = warm(agent)
    with agent.client("") as client:
        params = agent.params("lost", target_tier="resident")
        client.begin(params)
        reason = gone(client, first.name)
        run = client.finished(params.run_uid)
        (resident,) = residents(client)

    assert reason == "lost: reload: as the stub was told"
    assert stage_of(run, "weights").status is StageStatus.DONE
    assert resident.run_uid == run.run_uid


def test_a_killed_agent_s_residents_are_found_by_the_next(agent: Agent) -> None:
    """Same resident, same run, no event in between; a run starts from it and release frees it."""
    resident = warm(agent)
    agent.kill()
    agent.start()
    with agent.client("") as client:
        assert residents(client) == (resident,)
        run = client.warm(agent.params(target_tier="resident"))
        assert run.tier_from is Tier.RESIDENT
        assert [one.name for one in release(client)] == [resident.name]
    assert list_residents(KeeperAddress(agent.state)) == ()


def test_an_agent_that_is_stopped_leaves_residents_where_they_are(agent: Agent) -> None:
    """They are no reason to refuse; the next agent has them."""
    resident = warm(agent)
    with agent.client() as client:
        client.call("shutdown", ShutdownParams(), Empty)
    assert agent.process is not None
    agent.process.wait(DEADLINE_S)
    agent.start()

    with agent.client() as client:
        assert residents(client) == (resident,)


def test_ending_the_keeper_is_refused_while_it_holds_residents(agent: Agent) -> None:
    """By name; with force it ends and they are gone."""
    warm(agent)
    with agent.client() as client:
        keeper = keeper_pid(client)
        with pytest.raises(RefusedError, match="still here: tiny on cpu"):
            client.call("shutdown", ShutdownParams(keeper=True), Empty)
        client.call("shutdown", ShutdownParams(keeper=True, force=True), Empty)

    eventually(lambda: not is_running(keeper), "the keeper ends")


def test_the_driver_is_not_released_under_residents(with_keeper: Agent) -> None:
    """Refused in words; with everything released before it, it is."""
    warm(with_keeper)
    with with_keeper.client() as client:
        with pytest.raises(RefusedError, match="residents are held: 1; drop them first"):
            client.call("resident.release", ReleaseParams(driver=True), ReleaseResult)
        both = client.call("resident.release", ReleaseParams(everything=True, driver=True), ReleaseResult)

    assert (len(both.released), both.driver_released) == (1, True)


def test_a_resident_of_an_agent_that_forgot_is_taken_in(agent: Agent) -> None:
    """A lost journal loses no memory: what the keeper has is told by its manifest."""
    resident = warm(agent, hold=Hold("team-a"))
    agent.kill()
    for file in agent.state.journal.iterdir():
        file.unlink()
    agent.start()

    with agent.client() as client:
        (found,) = residents(client)
    assert (found.name, found.run_uid, found.owner, found.bytes) == (
        resident.name,
        resident.run_uid,
        "team-a",
        resident.bytes,
    )


def test_release_is_refused_while_somebody_is_attached(agent: Agent) -> None:
    """The refusal names the process, what to do and the time that was waited; nothing has gone until it is forced."""
    resident = warm(agent)
    with attached(agent, resident.name) as link, agent.client() as client:
        assert residents(client)[0].attached == 1
        with pytest.raises(RefusedError) as refused:
            release(client)
        assert refused.value.code == "attached"
        who = f"{resident.name} is attached by process {os.getpid()}"
        hint = "release --wait SECONDS waits for that to end, release --force lets go all the same"
        assert str(refused.value) == f"{who}; {hint}"
        with pytest.raises(RefusedError, match=re.escape(f"{who} after 0.2 s; release --wait")):
            release(client, wait_s=0.2)
        assert len(residents(client)) == 1
        assert len(release(client, force=True)) == 1
        assert link.recv(1) == b""
    assert list_residents(KeeperAddress(agent.state)) == ()


def test_release_waits_for_those_attached_to_go(agent: Agent) -> None:
    """Within the time it is given."""
    resident = warm(agent)
    link, reply = lease(KeeperAddress(agent.state), resident.name or "")
    reply.close()
    released: list[Resident] = []
    with agent.client() as client, agent.client() as other:
        waiting = threading.Thread(target=lambda: released.extend(release(client, wait_s=DEADLINE_S)))
        waiting.start()
        assert len(residents(other)) == 1
        link.close()
        waiting.join(DEADLINE_S)

        assert [one.name for one in released] == [resident.name]
        assert residents(other) == ()


def test_who_attaches_is_told_to_everybody(agent: Agent) -> None:
    """A console that follows hears of it, and of the end."""

    def count(number: int) -> Callable[[Event], bool]:
        return lambda event: isinstance(event.data, ResidentChanged) and event.data.resident.attached == number

    resident = warm(agent)
    with agent.client("") as client:
        with attached(agent, resident.name):
            client.next_event(count(1))
        client.next_event(count(0))


def test_a_killed_keeper_takes_its_residents_with_it(agent: Agent) -> None:
    """They are gone with the reason, and the next run loads again."""
    warm(agent)
    with agent.client("") as client:
        keeper = keeper_pid(client)
        os.kill(keeper, signal.SIGKILL)
        reason = gone(client)
        run = client.warm(agent.params(target_tier="resident"))

    assert reason == f"its keeper, process {keeper}, has ended"
    assert run.tier_from is not Tier.RESIDENT
    assert stage_of(run, "weights").status is StageStatus.DONE


def test_time_to_live_runs_on_without_an_agent(agent: Agent) -> None:
    """Over when the next agent starts, it lets the resident go at once, by that reason."""
    warm(agent, hold=Hold(ttl_s=1.0))
    agent.kill()
    agent.start()

    eventually(lambda: not list_residents(KeeperAddress(agent.state)), "the resident goes")
    with agent.client("later") as client:
        assert gone(client) == "its time to live of 1 s is over"


def test_time_to_live_waits_for_those_attached(agent: Agent) -> None:
    """What is used stays; once it is not, it goes."""
    with agent.client("") as client:
        params = agent.params(target_tier="resident", hold=Hold(ttl_s=0.5))
        run = client.warm(params)
        assert run.tier_to is Tier.RESIDENT
        (listed,) = list_residents(KeeperAddress(agent.state))
        with attached(agent, listed.name):
            eventually(lambda: "is over, but" in agent.log(), "its time is over")
            assert len(residents(client)) == 1
        assert gone(client, listed.name) == "its time to live of 0.5 s is over"


def test_a_standby_whose_worker_dies_leaves_its_weights(with_keeper: Agent) -> None:
    """Gone as a standby, there as a resident; the next run attaches."""
    agent = with_keeper
    with agent.client("") as client:
        client.warm(agent.params("keeps"))
        os.kill(client.worker_pid(), signal.SIGKILL)
        assert gone(client) == "its worker killed (SIGKILL)"
        (left,) = residents(client)
        run = client.warm(agent.params("keeps"))

    assert (left.tier, left.pid) == (Tier.RESIDENT, None)
    assert run.tier_from is Tier.RESIDENT


def test_a_released_standby_leaves_nothing_at_the_keeper(with_keeper: Agent) -> None:
    """One release frees both."""
    agent = with_keeper
    with agent.client("") as client:
        client.warm(agent.params("keeps"))
        assert len(release(client)) == 1
        assert residents(client) == ()
    assert list_residents(KeeperAddress(agent.state)) == ()


def test_a_refusal_for_want_of_memory_names_who_holds_it(make_agent: Callable[..., Agent]) -> None:
    """A resident has no process that nvidia-smi would show: it is named by recipe, owner and size."""
    agent = make_agent(orders={"sampler": "ok 7999999000"})
    with agent.client("") as client:
        eventually(lambda: client.status().probe.gpus, "the sampler reports")  # type: ignore[union-attr]
        kept = client.warm(agent.params("bytes:1", ("cuda:0",), target_tier="resident", hold=Hold("team-a")))
        agent.model = agent.model.with_name("other.safetensors")
        agent.model.write_bytes(b"x")
        refused = client.warm(agent.params("bytes:5000000000", ("cuda:0",)))

    assert kept.tier_to is Tier.RESIDENT
    assert "held by tiny of team-a (1000 bytes, descriptors)" in failure_of(refused).detail


def warm_on_gpu(agent: Agent, client: Watcher, file: str, stub: str = "", **hold: Any) -> RunRecord:
    """Warm a resident of another file of its own on the first GPU."""
    agent.model = agent.model.with_name(file)
    agent.model.write_bytes(file.encode())
    return client.warm(agent.params(stub, ("cuda:0",), target_tier="resident", hold=Hold(**hold)))


def test_room_is_made_where_the_recipe_says_so(make_agent: Callable[..., Agent]) -> None:
    """The least recently used go first, only as many as are needed, none for nothing; what is attached stays."""
    agent = make_agent(orders={"sampler": "ok 7999999000"})
    with agent.client("") as client:
        eventually(lambda: client.status().probe.gpus, "the sampler reports")  # type: ignore[union-attr]
        first, second, third = (warm_on_gpu(agent, client, name, "bytes:1") for name in ("first", "second", "third"))
        names = {one.run_uid: one.name for one in residents(client)}
        with attached(agent, names[first.run_uid]):
            fits = warm_on_gpu(agent, client, "fourth", "bytes:1500", make_room=True)
            left = {one.run_uid for one in residents(client)}
            too_large = warm_on_gpu(agent, client, "fifth", "bytes:9000000000", make_room=True)
            refused = warm_on_gpu(agent, client, "sixth", "bytes:1500")
            after = {one.run_uid for one in residents(client)}

    assert fits.state is RunState.READY
    assert left == after == {first.run_uid, third.run_uid, fits.run_uid}
    assert second.run_uid not in left
    assert [failure_of(run).code for run in (too_large, refused)] == ["no_memory"] * 2


def test_what_is_at_the_keeper_and_no_resident_is_left_alone(agent: Agent) -> None:
    """It is said once in the log, and changes nothing for what is one."""
    warm(agent)
    with memory(b"no manifest", b"w") as descriptors:
        ask(KeeperAddress(agent.state), "put garbage", descriptors)
    with agent.client() as client:
        assert [one.recipe for one in residents(client)] == ["tiny"]
    eventually(lambda: "the keeper's resident garbage can't be told" in agent.log(), "the agent says so")
