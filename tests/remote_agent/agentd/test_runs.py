"""Runs on a real agent with stub workers: what each thing that happens becomes."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.errors import RefusedError
from remote_agent.protocol.messages import (
    NATIVE_STAGES,
    CompilePolicy,
    Finding,
    Hold,
    ReleaseParams,
    ReleaseResult,
    ResidentChanged,
    RunAccepted,
    RunFinished,
    RunListParams,
    RunListResult,
    RunResult,
    RunStartResult,
    RunState,
    RunUidParams,
    StageChanged,
    StageStatus,
    Tier,
)
from tests.remote_agent.agentd.agents import (
    Agent,
    children_of,
    eventually,
    failure_of,
    is_running,
    parts_sum_to_wall,
    stage_of,
)

CANCEL_LIMIT_S = 2.0


def test_a_run_goes_through_every_stage_in_order_and_is_held(agent: Agent) -> None:
    """A warm-up ends ready, with every stage done, its parts summing exactly, and its model held as standby."""
    with agent.client("") as client:
        params = agent.params("cached")
        run = client.warm(params)
        status = client.status()

    assert run.state is RunState.READY
    assert [stage.name for stage in run.stages] == list(NATIVE_STAGES)
    assert {stage.status for stage in run.stages} == {StageStatus.DONE}
    assert parts_sum_to_wall(run)
    assert (run.tier_from, run.tier_to, run.output) == (Tier.CACHED, Tier.STANDBY, "42")
    assert 0 < (run.first_output_ns or 0) <= (run.wall_ns or 0)
    assert stage_of(run, "preflight").extra["tier_from"] == "cached"
    (resident,) = status.residents
    assert (resident.run_uid, resident.device, resident.owner, resident.bytes) == (
        params.run_uid,
        "cpu",
        "ann@laptop",
        1000,
    )


def test_events_of_a_run_come_in_order_from_acceptance_to_the_end(agent: Agent) -> None:
    """Acceptance is first, the end is last, stages begin before they are over, and seqs have no hole."""
    with agent.client("") as client:
        params = agent.params()
        client.warm(params)
    with agent.client("") as client:
        newest = client.greeting.newest_seq
        events = [event for event in client.everything(newest) if event.run_uid == params.run_uid]

    assert isinstance(events[0].data, RunAccepted)
    assert isinstance(events[-1].data, RunFinished)
    told = [(e.data.stage.name, e.data.stage.status) for e in events if isinstance(e.data, StageChanged)]
    for name in NATIVE_STAGES:
        assert [status for stage, status in told if stage == name] == [StageStatus.RUNNING, StageStatus.DONE]
    assert any(isinstance(e.data, ResidentChanged) and e.data.state == "held" for e in events)
    assert any(isinstance(e.data, Finding) and e.data.text == "half way" for e in events)
    assert [event.seq for event in events] == list(range(events[0].seq, events[0].seq + len(events)))


def test_values_of_the_environment_are_kept_out_of_the_journal(agent: Agent) -> None:
    """A secret in a recipe's environment reaches the worker and nothing on disk."""
    with agent.client("") as client:
        client.warm(agent.params(environment={"TOKEN": "hunter2-secret"}))

    written = [path.read_bytes() for path in agent.state.root.rglob("*") if path.is_file()]
    assert written
    assert not any(b"hunter2-secret" in content for content in written)


def test_a_second_run_of_the_same_recipe_reuses_the_standby(agent: Agent) -> None:
    """The warm process serves again: what it has is reused, the first request is real, one resident remains."""
    with agent.client("") as client:
        first, second = agent.params(), agent.params()
        client.warm(first)
        pid = client.worker_pid()
        run = client.warm(second)
        status = client.status()

    assert run.state is RunState.READY
    assert run.tier_from is Tier.STANDBY
    assert [stage_of(run, name).status for name in ("init", "context", "weights", "assign", "compile")] == [
        StageStatus.REUSED
    ] * 5
    assert stage_of(run, "first_request").status is StageStatus.DONE
    assert parts_sum_to_wall(run)
    assert [(resident.run_uid, resident.pid) for resident in status.residents] == [(second.run_uid, pid)]


def test_a_standby_whose_files_changed_is_replaced(agent: Agent) -> None:
    """A run after the checkpoint changed loads anew, and the old holder goes with that reason."""
    with agent.client("") as client:
        client.warm(agent.params())
        old_pid = client.worker_pid()
        agent.model.write_bytes(b"other weights")
        params = agent.params()
        client.begin(params)
        gone = client.next_event(lambda e: isinstance(e.data, ResidentChanged) and e.data.state == "gone")
        run = client.finished(params.run_uid)

    assert isinstance(gone.data, ResidentChanged)
    assert "files changed" in (gone.data.reason or "")
    assert run.state is RunState.READY
    assert stage_of(run, "weights").status is StageStatus.DONE
    assert run.tier_from is Tier.COLD
    assert not is_running(old_pid)


def test_a_standby_of_another_environment_is_not_reused(agent: Agent) -> None:
    """Recipes that differ only in a value of their environment do not share a process."""
    with agent.client("") as client:
        client.warm(agent.params(environment={"MODE": "a"}))
        run = client.warm(agent.params(environment={"MODE": "b"}))

    assert stage_of(run, "weights").status is StageStatus.DONE


def test_starting_the_same_run_twice_starts_it_once(agent: Agent) -> None:
    """The same uid answers with the run that is there: while it runs, when it is over, and after a restart."""
    with agent.client("") as client:
        params = agent.params("wait:weights")
        assert client.call("run.start", params, RunStartResult).created
        again = client.call("run.start", params, RunStartResult)
        agent.order("go-on", "")
        client.finished(params.run_uid)
        after = client.call("run.start", params, RunStartResult)
    agent.kill()
    agent.start()
    with agent.client() as client:
        later = client.call("run.start", params, RunStartResult)

    assert [answer.created for answer in (again, after, later)] == [False, False, False]
    assert (after.run.state, later.run.state) == (RunState.READY, RunState.READY)
    assert later.run == after.run


def test_a_second_run_on_a_device_waits_for_the_first(agent: Agent) -> None:
    """One run loads at a time on a device; who waits is told for whom."""
    with agent.client("") as client:
        first, second = agent.params("wait:weights"), agent.params("", compile=CompilePolicy("layer"))
        client.begin(first)
        client.stage(first.run_uid, "weights")
        client.begin(second)
        waiting = client.next_event(lambda e: e.run_uid == second.run_uid and isinstance(e.data, Finding))
        states = {run.run_uid: run.state for run in client.status().runs}
        agent.order("go-on", "")
        ended = [client.finished(first.run_uid), client.finished(second.run_uid)]

    assert isinstance(waiting.data, Finding)
    assert first.run_uid in waiting.data.text
    assert states == {first.run_uid: RunState.RUNNING, second.run_uid: RunState.QUEUED}
    assert [run.state for run in ended] == [RunState.READY, RunState.READY]
    assert (stage_of(ended[1], "queue").duration_ns or 0) > 0


@pytest.mark.parametrize("stub", ["hang:weights", "hang:weights deaf", "preflight:hang", "hang:init"])
def test_a_cancel_is_answered_with_cancelled(agent: Agent, stub: str) -> None:
    """A cancelled run ends within the limit, even when its worker ignores SIGTERM, and leaves no process."""
    stage = stub.split()[0].split(":")[1] if stub.startswith("hang") else "preflight"
    with agent.client("") as client:
        params = agent.params(stub)
        client.begin(params)
        client.stage(params.run_uid, stage)
        asked_s = time.monotonic()
        run = client.call("run.cancel", RunUidParams(params.run_uid), RunResult).run
        took_s = time.monotonic() - asked_s
        processes = client.status().processes

    assert run.state is RunState.CANCELLED
    assert took_s < CANCEL_LIMIT_S
    assert failure_of(run).code == "cancelled"
    assert parts_sum_to_wall(run)
    assert not [name for name in processes if name.startswith("worker")]


def test_a_queued_run_can_be_cancelled(agent: Agent) -> None:
    """A run that waits for its device ends at once when it is cancelled, and the other goes on."""
    with agent.client("") as client:
        first, second = agent.params("wait:weights"), agent.params()
        client.begin(first)
        client.stage(first.run_uid, "weights")
        client.begin(second)
        run = client.call("run.cancel", RunUidParams(second.run_uid), RunResult).run
        agent.order("go-on", "")

        assert client.finished(first.run_uid).state is RunState.READY
    assert run.state is RunState.CANCELLED
    assert {stage.status for stage in run.stages if stage.name != "queue"} == {StageStatus.SKIPPED}


def test_a_standby_that_can_have_no_log_is_not_used(agent: Agent) -> None:
    """Where its output would go is named, and it ends."""
    with agent.client("") as client:
        client.warm(agent.params())
        agent.order("preflight", "take the log")
        run = client.warm(agent.params())
        status = client.status()

    assert failure_of(run).code == "worker_not_started"
    assert "the worker's log can't be opened: [Errno 21] Is a directory" in failure_of(run).detail
    assert status.residents == ()


def test_a_standby_that_dies_is_gone_with_the_reason(agent: Agent) -> None:
    """Killing a holder is told as an event, and the ready run stays what it was."""
    with agent.client("") as client:
        params = agent.params()
        client.warm(params)
        os.kill(client.worker_pid(), 9)
        gone = client.next_event(lambda e: isinstance(e.data, ResidentChanged) and e.data.state == "gone")
        status = client.status()
        run = client.call("run.get", RunUidParams(params.run_uid), RunResult).run

    assert isinstance(gone.data, ResidentChanged)
    assert str(gone.data.reason).startswith("its worker killed (SIGKILL)")
    assert status.residents == ()
    assert run.state is RunState.READY


def test_a_release_lets_the_model_go(agent: Agent) -> None:
    """What one run holds goes by name, a second time it is refused, and nothing of it runs on."""
    with agent.client("") as client:
        params = agent.params()
        client.warm(params)
        pid = client.worker_pid()
        result = client.call("resident.release", ReleaseParams(params.run_uid), ReleaseResult)
        with pytest.raises(RefusedError) as refused:
            client.call("resident.release", ReleaseParams(params.run_uid), ReleaseResult)

    assert [resident.run_uid for resident in result.released] == [params.run_uid]
    assert refused.value.code == "no_such_resident"
    assert not is_running(pid)


def test_a_model_in_use_by_a_run_is_not_released(agent: Agent) -> None:
    """A standby that serves a run right now stays, and the refusal names the run."""
    with agent.client("") as client:
        client.warm(agent.params("gate:first_request"))
        agent.order("gate", "")
        second = agent.params("gate:first_request")
        client.begin(second)
        client.stage(second.run_uid, "first_request")
        with pytest.raises(RefusedError, match=second.run_uid) as refused:
            client.call("resident.release", ReleaseParams(everything=True), ReleaseResult)
        agent.order("gate", None)
        run = client.finished(second.run_uid)

    assert refused.value.code == "busy"
    assert run.state is RunState.READY


def test_a_cancelled_run_takes_the_standby_that_it_used_with_it(agent: Agent) -> None:
    """A run that reuses a standby and is cancelled ends the process; the holder is gone with the run named."""
    with agent.client("") as client:
        client.warm(agent.params("gate:first_request"))
        agent.order("gate", "")
        second = agent.params("gate:first_request")
        client.begin(second)
        client.stage(second.run_uid, "first_request")
        run = client.call("run.cancel", RunUidParams(second.run_uid), RunResult).run
        gone = client.next_event(lambda e: isinstance(e.data, ResidentChanged) and e.data.state == "gone")

    assert run.state is RunState.CANCELLED
    assert isinstance(gone.data, ResidentChanged)
    assert second.run_uid in (gone.data.reason or "")


def test_a_refused_reuse_leaves_the_standby_alone(agent: Agent) -> None:
    """A run that fails before it touched the standby gives it back."""
    with agent.client("") as client:
        client.warm(agent.params())
        pid = client.worker_pid()
        agent.order("preflight", "refuse")
        failed = client.warm(agent.params())
        agent.order("preflight", None)
        again = client.warm(agent.params())

        assert client.worker_pid() == pid
    assert failed.state is RunState.FAILED
    assert stage_of(again, "weights").status is StageStatus.REUSED


def test_a_release_that_names_nothing_is_refused(agent: Agent) -> None:
    """Nothing is released by accident."""
    with agent.client() as client, pytest.raises(RefusedError) as refused:
        client.call("resident.release", ReleaseParams(), ReleaseResult)

    assert refused.value.code == "nothing_named"


def test_a_hold_ends_when_its_time_is_over(agent: Agent) -> None:
    """A time to live releases the model by itself, with that as the reason."""
    with agent.client("") as client:
        client.warm(agent.params(hold=Hold("nightly", 0.2)))
        gone = client.next_event(lambda e: isinstance(e.data, ResidentChanged) and e.data.state == "gone")

    assert isinstance(gone.data, ResidentChanged)
    assert gone.data.resident.owner == "nightly"
    assert "time to live of 0.2 s is over" in (gone.data.reason or "")


def test_finished_runs_are_listed_newest_first_and_only_so_many_are_kept(make_agent: Callable[..., Agent]) -> None:
    """The store keeps the newest runs, drops the files of older ones, and serves them after a restart."""
    agent = make_agent(runs_kept=2)
    uids = []
    with agent.client("") as client:
        for _ in range(3):
            params = agent.params("chatty preflight:refuse")
            client.warm(params)
            uids.append(params.run_uid)
    agent.kill()
    agent.start()
    with agent.client() as client:
        runs = client.call("run.list", RunListParams(), RunListResult).runs
        with pytest.raises(RefusedError) as refused:
            client.call("run.get", RunUidParams(uids[0]), RunResult)

    assert [run.run_uid for run in runs] == [uids[2], uids[1]]
    assert refused.value.code == "no_such_run"
    assert {path.stem for path in agent.state.runs.iterdir()} == set(uids[1:])


def test_no_zombie_is_left_by_anything_that_ended(agent: Agent) -> None:
    """After runs that worked, failed and were killed, every child of the agent is alive."""
    with agent.client("") as client:
        for stub in ("", "sigkill:weights", "fail:compile", "preflight:die"):
            client.warm(agent.params(stub))

        eventually(lambda: "Z" not in children_of(agent.pid).values(), "no zombie is left")


def test_a_python_in_the_users_home_is_found_there(agent: Agent, tmp_path: Path) -> None:
    """`~/` is the home of the agent's user, as it is where the bridge is started; an absolute path is run."""
    (tmp_path / "python").symlink_to(sys.executable)
    home = os.path.relpath(tmp_path, Path("~").expanduser())
    params = dataclasses.replace(agent.params(), python=(f"~/{home}/python",))
    with agent.client("") as client:
        run = client.warm(params)

    assert run.state is RunState.READY, run.failure
