"""Spare workers: one for each device of the last run, as good as one just forked, and gone when it may not stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from remote_agent.protocol.messages import (
    ReleaseParams,
    ReleaseResult,
    RunRecord,
    RunResult,
    RunState,
    RunUidParams,
    StageStatus,
    StatusResult,
)
from tests.remote_agent.agentd.agents import (
    Agent,
    Watcher,
    eventually,
    is_running,
    parts_sum_to_wall,
    stage_of,
)
from tests.remote_agent.agentd.stub_children import UUIDS


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent that is idle soon."""
    return make_agent(idle_s=0.02)


def spares(status: StatusResult, kind: str = "spare ") -> dict[str, int]:
    """Return the pids of the spares that ``status`` names, by device."""
    return {name.removeprefix(kind): pid for name, pid in status.processes.items() if name.startswith(kind) and pid}


def waiting(client: Watcher, *devices: str) -> dict[str, int]:
    """Return the spares, once there is one on exactly these devices."""

    def look() -> dict[str, int] | None:
        found = spares(client.status())
        return found if sorted(found) == sorted(devices) else None

    return eventually(look, f"spares wait on {devices}") or {}


def do_run(client: Watcher, agent: Agent, stub: str = "", devices: tuple[str, ...] = ("cpu",)) -> RunRecord:
    """Do a run that leaves nothing warm and return how it ended."""
    params = agent.params(stub, devices)
    run = client.warm(params)
    if run.state is RunState.READY:
        client.call("resident.release", ReleaseParams(params.run_uid), ReleaseResult)
    return run


def wait_for_line(agent: Agent, text: str) -> None:
    eventually(lambda: text in agent.log(), f"the agent says {text!r}")


def used(run: RunRecord) -> object:
    return stage_of(run, "weights").extra["pid"]


def test_a_run_gets_the_one_that_waits_and_another_takes_its_place(agent: Agent) -> None:
    """It has done ``init`` before and prints to the run's log; it was no run, and there is one a device at most."""
    with agent.client("") as client:
        first = do_run(client, agent)
        before = waiting(client, "cpu")
        status = client.status()
        agent.order("worker", "chatty")
        second = do_run(client, agent)
        after = waiting(client, "cpu")

    assert (first.state, second.state) == (RunState.READY, RunState.READY)
    assert (status.runs, status.residents) == ((), ())
    assert stage_of(first, "init").status is StageStatus.DONE
    assert stage_of(second, "init").status is StageStatus.REUSED
    assert used(first) != used(second) == before["cpu"]
    assert after["cpu"] != before["cpu"]
    assert parts_sum_to_wall(second)
    printed, own = (agent.state.runs / f"{second.run_uid}.stderr").read_text(), agent.state.log.read_text()
    assert ("first line" in printed, "a spare prepares" in printed) == (True, False)
    assert ("first line" in own, "a spare prepares" in own) == (False, True)


def test_each_device_of_the_last_run_has_one(make_agent: Callable[..., Agent]) -> None:
    """Those on other devices go: the next run is likely to be where the last one was."""
    agent = make_agent(idle_s=0.02, orders={"sampler": "ok"})
    with agent.client("") as client:
        do_run(client, agent, devices=("all",))
        both = waiting(client, *UUIDS)
        run = do_run(client, agent, devices=("cuda:1",))
        one = waiting(client, UUIDS[1])
        eventually(lambda: not any(is_running(pid) for pid in both.values() if pid != used(run)), "the others go")

    assert used(run) == both[UUIDS[1]] != one[UUIDS[1]]


def test_a_recipe_with_an_environment_gets_none(agent: Agent) -> None:
    """Libraries may have read their variables already; the spare stays for a recipe without."""
    with agent.client("") as client:
        do_run(client, agent)
        before = waiting(client, "cpu")
        own = do_run(client, agent, "other")
        without = do_run(client, agent)

    assert stage_of(own, "init").status is StageStatus.DONE
    assert used(own) != before["cpu"] == used(without)


def test_one_that_is_not_there_is_no_loss(agent: Agent) -> None:
    """Killed while it waited, or never ready: the agent says so in a line, and the run starts a worker as ever."""
    with agent.client("") as client:
        do_run(client, agent)
        killed = waiting(client, "cpu")["cpu"]
        os.kill(killed, signal.SIGKILL)
        runs = [do_run(client, agent)]
        for order, how in (("fail", "is kept ready on cpu: cuInit failed"), ("die", "on cpu exited with code 7")):
            agent.order("spare", order)
            runs.append(do_run(client, agent))
            wait_for_line(agent, how)

    assert [run.state for run in runs] == [RunState.READY] * 3
    assert used(runs[0]) != killed


def test_one_that_dies_as_it_gets_the_job_is_followed_by_another(agent: Agent) -> None:
    """It has done nothing of the run yet: that has a worker of its own, and the agent says so in a line."""
    with agent.client("") as client:
        do_run(client, agent)
        before = waiting(client, "cpu")["cpu"]
        agent.order("spare", "die late")
        run = do_run(client, agent)

    assert (run.state, stage_of(run, "init").status) == (RunState.READY, StageStatus.DONE)
    assert used(run) != before
    assert parts_sum_to_wall(run)
    wait_for_line(agent, f"the spare worker on cpu exited with code 7: run {run.run_uid} gets another")


@pytest.mark.faults
def test_one_that_does_not_begin_is_ended_and_followed_by_another(make_agent: Callable[..., Agent]) -> None:
    """A process that is stuck costs a run that time, and is not left."""
    agent = make_agent(idle_s=0.02, zygote={"fork_s": 0.5})
    with agent.client("") as client:
        do_run(client, agent)
        stopped = waiting(client, "cpu")["cpu"]
        os.kill(stopped, signal.SIGSTOP)
        run = do_run(client, agent)

    assert (run.state, stage_of(run, "init").status) == (RunState.READY, StageStatus.DONE)
    assert not is_running(stopped)
    wait_for_line(agent, f"the spare worker on cpu does not begin within 0.5 s: run {run.run_uid} gets another")


def test_one_that_is_not_ready_in_time_is_ended(make_agent: Callable[..., Agent]) -> None:
    """A driver that hangs keeps its process no longer than that."""
    agent = make_agent(idle_s=0.02, zygote={"spare_s": 0.2}, orders={"spare": "wait"})
    with agent.client("") as client:
        do_run(client, agent)
        coming = eventually(lambda: spares(client.status(), "coming spare "), "one is made ready")
        wait_for_line(agent, "no spare worker is kept ready on cpu: it is not ready within 0.2 s")
        eventually(lambda: not is_running(coming["cpu"]), "it ends")


def test_a_run_that_comes_while_one_is_made_ready_has_that(agent: Agent) -> None:
    """It is ahead of any that would be forked now."""
    agent.order("spare", "wait")
    params = agent.params()
    with agent.client("") as client:
        do_run(client, agent)
        coming = eventually(lambda: spares(client.status(), "coming spare "), "one is made ready")
        client.begin(params)
        client.stage(params.run_uid, "init")
        agent.order("spare", None)
        run = client.finished(params.run_uid)

    assert used(run) == coming["cpu"]
    assert parts_sum_to_wall(run)


def test_none_is_forked_while_a_run_goes_on(make_agent: Callable[..., Agent]) -> None:
    """Processors are the run's, whichever device it is on. Without any wait the first end beside it would be enough."""
    agent = make_agent(idle_s=0.0, orders={"sampler": "ok"})
    long = agent.params("hang:weights", devices=("cuda:0",))
    with agent.client("") as client:
        client.begin(long)
        client.stage(long.run_uid, "weights")
        beside = [do_run(client, agent, devices=("cuda:1",)) for _ in range(2)]
        client.call("run.cancel", RunUidParams(long.run_uid), RunResult)
        waiting(client, UUIDS[1])

    assert [stage_of(run, "init").status for run in beside] == [StageStatus.DONE] * 2


def test_a_release_ends_it_and_the_next_run_brings_it_back(agent: Agent) -> None:
    """It holds the driver's device files, which must be closed before a reset; until a run comes there is none."""
    requests = ReleaseParams(everything=True), ReleaseParams(driver=True)
    with agent.client("") as client:
        for request in requests:
            do_run(client, agent)
            pid = waiting(client, "cpu")["cpu"]
            result = client.call("resident.release", request, ReleaseResult)

            assert result.driver_released is request.driver
            assert (is_running(pid), spares(client.status())) == (False, {})
            do_run(client, agent, "other")  # one that no spare is made for
            eventually(lambda: client.status().processes["preflight"], "the agent was idle for long enough")
            assert spares(client.status()) == {}


def test_a_driver_whose_spare_does_not_end_is_not_released(agent: Agent) -> None:
    """A process that is stuck in the driver has it open still."""
    with agent.client("") as client:
        do_run(client, agent)
        pid = waiting(client, "cpu")["cpu"]
        agent.order("unkillable", "")
        first = client.call("resident.release", ReleaseParams(driver=True), ReleaseResult)
        agent.order("unkillable", None)
        then = client.call("resident.release", ReleaseParams(driver=True), ReleaseResult)

    assert (first.driver_released, then.driver_released) == (False, True)
    assert not is_running(pid)


def test_it_goes_with_its_zygote(agent: Agent) -> None:
    """Where that ended, or packages have changed: what it imported may be something else by then."""
    packages = agent.orders / "packages"
    packages.mkdir()
    with agent.client("") as client:
        do_run(client, agent)
        first = waiting(client, "cpu")["cpu"]
        zygote = client.status().processes["zygote 1"]
        assert zygote
        os.kill(zygote, signal.SIGKILL)
        eventually(lambda: not is_running(first), "it ends")
        do_run(client, agent)
        second = waiting(client, "cpu")["cpu"]
        (packages / "torch").mkdir()
        run = do_run(client, agent)
        eventually(lambda: not is_running(second), "it ends")

    assert used(run) != second
    assert stage_of(run, "init").status is StageStatus.DONE


def test_an_error_of_its_gpu_ends_it(make_agent: Callable[..., Agent]) -> None:
    """Until a run comes again there is none."""
    agent = make_agent(idle_s=0.02, orders={"sampler": "ok 1000 0"})
    with agent.client("") as client:
        do_run(client, agent, devices=("all",))
        pids = waiting(client, *UUIDS)
        agent.order("sampler", "ok 1000 1")
        eventually(lambda: not any(is_running(pid) for pid in pids.values()), "they end")
        do_run(client, agent, "other")
        eventually(lambda: client.status().processes["preflight"], "the agent was idle for long enough")

        assert spares(client.status()) == {}


@pytest.mark.faults
def test_it_ends_with_the_agent(agent: Agent) -> None:
    """Killed or told to stop: none is left."""
    pids = []
    for end in (agent.kill, agent.close):
        with agent.client("") as client:
            do_run(client, agent)
            pids.append(waiting(client, "cpu")["cpu"])
        end()
        if end == agent.kill:
            agent.start()

    eventually(lambda: not any(is_running(pid) for pid in pids), "none is left")
