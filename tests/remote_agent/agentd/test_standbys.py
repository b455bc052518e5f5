"""Standbys that wait for their weights, as the agent starts, shows, uses and ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remote_agent.errors import RefusedError
from remote_agent.protocol.messages import (
    Empty,
    Event,
    FirstRequest,
    ReleaseParams,
    ReleaseResult,
    Resident,
    ResidentChanged,
    ResidentListResult,
    RunResult,
    RunStartResult,
    RunState,
    RunUidParams,
    StageStatus,
    StandbyStopParams,
    StandbyStopResult,
    Tier,
)
from tests.remote_agent.agentd.agents import (
    REPOSITORY,
    Agent,
    Watcher,
    eventually,
    failure_of,
    is_running,
    parts_sum_to_wall,
    stage_of,
)


def residents(client: Watcher) -> tuple[Resident, ...]:
    return client.call("resident.list", Empty(), ResidentListResult).residents


def stop(client: Watcher, recipe: str = "tiny") -> tuple[Resident, ...]:
    return client.call("standby.stop", StandbyStopParams(recipe), StandbyStopResult).stopped


def gone(client: Watcher) -> ResidentChanged:
    """Return the next entry that goes."""

    def is_it(event: Event) -> bool:
        return isinstance(event.data, ResidentChanged) and event.data.state == "gone"

    data = client.next_event(is_it).data
    assert isinstance(data, ResidentChanged)
    return data


def make_resident(agent: Agent, client: Watcher, **recipe: Any) -> None:
    run = client.warm(agent.params(target_tier="resident", **recipe))
    assert run.tier_to is Tier.RESIDENT, run


def test_an_armed_process_is_listed_as_what_it_is(agent: Agent) -> None:
    """Tier armed, with what it takes and no weights; the run that armed it has no output and its parts sum exactly."""
    with agent.client("") as client:
        run = client.arm(agent.params())
        (entry,) = residents(client)
        assert entry.pid == client.worker_pid()

    assert (run.state, run.tier_from, run.tier_to) == (RunState.READY, Tier.COLD, Tier.ARMED)
    assert (run.output, run.first_output_ns) == (None, None)
    assert stage_of(run, "weights").status is StageStatus.SKIPPED
    assert stage_of(run, "weights").reason == "weights are brought later"
    assert parts_sum_to_wall(run)
    assert (entry.tier, entry.bytes, entry.name, entry.run_uid) == (Tier.ARMED, 100, None, run.run_uid)


def test_starting_a_standby_twice_is_once(agent: Agent) -> None:
    """The same uid answers with the run that is there; another uid finds what is armed already."""
    params = agent.params()
    with agent.client("") as client:
        first = client.arm(params)
        again = client.call("standby.start", params, RunStartResult)
        pid = client.worker_pid()
        other = client.arm(agent.params())

        assert (again.created, again.run.run_uid) == (False, first.run_uid)
        assert (other.tier_from, other.tier_to) == (Tier.ARMED, Tier.ARMED)
        assert stage_of(other, "assign").status is StageStatus.REUSED
        assert client.worker_pid() == pid
        assert [one.run_uid for one in residents(client)] == [other.run_uid]


def test_a_run_finds_the_armed_process_and_leaves_a_standby(agent: Agent) -> None:
    """With the weights resident it starts from armed; what it leaves is the standby, in the armed one's place."""
    with agent.client("") as client:
        client.arm(agent.params())
        pid = client.worker_pid()
        make_resident(agent, client)
        run = client.warm(agent.params())
        standby = [one for one in residents(client) if one.pid == pid]

    assert (run.tier_from, run.tier_to) == (Tier.ARMED, Tier.STANDBY)
    assert stage_of(run, "preflight").extra["tier_from"] == "armed"
    for name in ("init", "context", "weights", "assign", "compile"):
        assert stage_of(run, name).status is StageStatus.REUSED, name
    assert [(one.tier, one.run_uid) for one in standby] == [(Tier.STANDBY, run.run_uid)]


def test_weights_that_are_not_resident_are_loaded_by_the_armed_process(agent: Agent) -> None:
    """The run is as cold as its weights are, and nothing but those is made."""
    with agent.client("") as client:
        client.arm(agent.params())
        run = client.warm(agent.params())

    assert (run.tier_from, run.tier_to) == (Tier.COLD, Tier.STANDBY)
    assert stage_of(run, "weights").status is StageStatus.DONE
    assert stage_of(run, "assign").status is StageStatus.REUSED


def test_another_request_of_the_model_is_served_by_the_armed_process(agent: Agent) -> None:
    """What is compiled for one request's shapes is not."""
    longer = FirstRequest(prompt_tokens=300, max_new_tokens=7)
    with agent.client("") as client:
        client.arm(agent.params())
        run = client.warm(agent.params(request=longer))

    assert stage_of(run, "assign").status is StageStatus.REUSED


def test_room_is_counted_for_what_is_brought(agent: Agent) -> None:
    """Arming needs room for the stand-in alone; the weights' room is asked when a run brings them."""
    large = f"bytes:{1 << 60}"
    with agent.client("") as client:
        assert client.arm(agent.params(large)).state is RunState.READY
        failed = client.warm(agent.params(large))
        (entry,) = residents(client)

    assert failure_of(failed).code == "no_memory"
    assert entry.tier is Tier.ARMED


def test_changed_files_end_what_was_armed_for_the_old_ones(agent: Agent) -> None:
    """Named, and the run loads the new files in a process of its own."""
    with agent.client("") as client:
        client.arm(agent.params())
        agent.model.write_bytes(b"other weights")
        params = agent.params()
        client.begin(params)
        change = gone(client)
        run = client.finished(params.run_uid)

    assert change.resident.tier is Tier.ARMED
    assert change.reason == f"its files changed: run {run.run_uid} loads them again"
    assert stage_of(run, "assign").status is StageStatus.DONE


def test_an_armed_process_that_dies_is_gone_with_a_reason(agent: Agent) -> None:
    """The next run is an ordinary one."""
    with agent.client("") as client:
        client.arm(agent.params())
        os.kill(client.worker_pid(), signal.SIGKILL)
        assert gone(client).reason == "its worker killed (SIGKILL)"
        run = client.warm(agent.params())

    assert (run.state, stage_of(run, "assign").status) == (RunState.READY, StageStatus.DONE)


def test_an_armed_process_survives_its_console_and_ends_with_the_agent(agent: Agent) -> None:
    """As every worker does."""
    with agent.client("") as client:
        client.arm(agent.params())
        pid = client.worker_pid()
    with agent.client() as client:
        assert [one.pid for one in residents(client)] == [pid]
    agent.kill()
    eventually(lambda: not is_running(pid), "the armed process ends")
    agent.start()
    with agent.client() as client:
        assert residents(client) == ()


def test_stop_ends_the_process_and_leaves_what_is_resident(agent: Agent) -> None:
    """Armed or with weights: their memory at the keeper stays, and is a resident again."""
    with agent.client("") as client:
        client.arm(agent.params())
        pid = client.worker_pid()
        (stopped,) = stop(client)
        assert (stopped.tier, stopped.pid) == (Tier.ARMED, pid)
        assert (residents(client), is_running(pid)) == ((), False)
        client.arm(agent.params("keeps"))
        client.warm(agent.params("keeps"))
        (stopped,) = stop(client)
        (left,) = residents(client)

    assert (stopped.tier, left.tier, left.pid) == (Tier.STANDBY, Tier.RESIDENT, None)


def test_stop_while_a_run_uses_it_is_refused(agent: Agent) -> None:
    """Nothing ends; when the run is over it can be stopped."""
    agent.order("gate", "")
    with agent.client("") as client:
        agent.order("gate", None)
        client.arm(agent.params("gate:first_request"))
        agent.order("gate", "")
        params = agent.params("gate:first_request")
        client.begin(params)
        client.stage(params.run_uid, "first_request")
        with pytest.raises(RefusedError, match=f"tiny on cpu serves run {params.run_uid}"):
            stop(client)
        agent.order("gate", None)
        assert client.finished(params.run_uid).state is RunState.READY
        assert len(stop(client)) == 1


def test_stop_ends_what_is_being_armed(agent: Agent) -> None:
    """The arming run is cancelled and its process gone; a name that nothing waits for is refused."""
    params = agent.params("hang:compile")
    with agent.client("") as client:
        client.call("standby.start", params, RunStartResult)
        client.stage(params.run_uid, "compile")
        assert stop(client) == ()
        run = client.call("run.get", RunUidParams(params.run_uid), RunResult).run
        with pytest.raises(RefusedError, match="no process waits for or holds other"):
            stop(client, "other")

    assert (run.state, failure_of(run).detail) == (RunState.CANCELLED, "its standby was stopped by request")


def test_what_is_armed_can_be_released(agent: Agent) -> None:
    """Release lets go of everything that one run left, an armed process too."""
    with agent.client("") as client:
        run = client.arm(agent.params())
        result = client.call("resident.release", ReleaseParams(run.run_uid), ReleaseResult)

        assert [one.tier for one in result.released] == [Tier.ARMED]
        assert residents(client) == ()


def test_only_a_standby_can_be_armed(agent: Agent) -> None:
    """A resident needs no process that waits."""
    with (
        agent.client() as client,
        pytest.raises(RefusedError, match='is "resident": arming needs target_tier = "standby"'),
    ):
        client.call("standby.start", agent.params(target_tier="resident"), RunStartResult)


def test_the_host_s_own_stop_takes_the_file_that_start_took(agent: Agent, tmp_path: Path) -> None:
    """By the recipe's name, which may be another than the file's; a file that is missing is one line."""
    file = tmp_path / "small.json"
    file.write_text(json.dumps({"name": "tiny", "model": {"path": "/m"}}))
    command = [sys.executable, "-m", "remote_agent", "standby", "stop", "--state-dir", str(agent.state.root)]

    def call(recipe: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, recipe], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
        )

    with agent.client("") as client:
        client.arm(agent.params())
        stopped, again, missing = call(str(file)), call("tiny"), call(f"{tmp_path}/none.toml")

    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout.startswith("stopped tiny on cpu, armed")
    assert (again.returncode, "no process waits for or holds tiny" in again.stderr) == (1, True)
    assert (missing.returncode, missing.stderr) == (2, f"{tmp_path}/none.toml: No such file or directory\n")
