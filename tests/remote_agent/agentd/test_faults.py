"""Processes killed and hung: each ends in the state that is promised, and the agent goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.protocol.messages import (
    DaemonStarted,
    ReleaseParams,
    ReleaseResult,
    ResidentChanged,
    RunFinished,
    RunResult,
    RunState,
    RunUidParams,
    StageStatus,
)
from tests.remote_agent.agentd.agents import (
    Agent,
    eventually,
    failure_of,
    is_running,
    parts_sum_to_wall,
    pid_of,
    stage_of,
)

pytestmark = pytest.mark.faults


def test_an_agent_killed_in_a_run_says_interrupted_when_it_is_back(agent: Agent) -> None:
    """After SIGKILL and a restart the run is over as interrupted, its parts sum, and its worker is gone."""
    params = agent.params("hang:weights")
    with agent.client("laptop") as client:
        client.begin(params)
        client.stage(params.run_uid, "weights")
        pid = client.worker_pid()
        newest = client.hello("again").newest_seq
    agent.kill()
    eventually(lambda: not is_running(pid), "the worker ends when the agent's socket closes")
    agent.start()
    with agent.client("laptop", after_seq=newest) as client:
        started = client.next_event(lambda e: isinstance(e.data, DaemonStarted))
        run = client.finished(params.run_uid)

    assert isinstance(started.data, DaemonStarted)
    assert started.data.pid == agent.pid
    assert run.state is RunState.INTERRUPTED
    assert failure_of(run).stage == "weights"
    assert stage_of(run, "weights").status is StageStatus.FAILED
    assert stage_of(run, "hold").status is StageStatus.SKIPPED
    assert parts_sum_to_wall(run)


def test_an_agent_killed_with_a_standby_says_gone_when_it_is_back(make_agent: Callable[..., Agent]) -> None:
    """A holder does not outlive its agent; the next one tells it, even when the old events are trimmed."""
    agent = make_agent(journal={"segment_bytes": 500, "cap_bytes": 8000})
    params = agent.params()
    with agent.client("") as client:
        client.warm(params)
        for _ in range(5):
            client.warm(agent.params("preflight:refuse"))
        newest = client.hello("again").newest_seq
    agent.kill()
    agent.start()
    with agent.client("", after_seq=newest) as client:
        gone = client.next_event(lambda e: isinstance(e.data, ResidentChanged))
        status = client.status()

        assert client.greeting.oldest_seq > 10
    assert isinstance(gone.data, ResidentChanged)
    assert (gone.data.resident.run_uid, gone.data.state) == (params.run_uid, "gone")
    assert status.residents == ()
    assert status.runs == ()


def test_a_run_is_interrupted_once_however_often_the_agent_is_killed(agent: Agent) -> None:
    """The end of an unfinished run is told by the first restart alone."""
    params = agent.params("hang:weights")
    with agent.client("") as client:
        client.begin(params)
        client.stage(params.run_uid, "weights")
    for _ in range(2):
        agent.kill()
        agent.start()
    with agent.client("") as client:
        ends = [
            event
            for event in client.everything(client.greeting.newest_seq)
            if isinstance(event.data, RunFinished) and event.run_uid == params.run_uid
        ]

    assert len(ends) == 1


def test_a_terminated_agent_interrupts_its_runs_and_leaves_no_process(agent: Agent) -> None:
    """SIGTERM ends runs as interrupted in the journal, and every child with the agent."""
    params = agent.params("hang:weights deaf")
    with agent.client("") as client:
        client.begin(params)
        client.stage(params.run_uid, "weights")
        pids = [pid for pid in client.status().processes.values() if pid and pid != agent.pid]
        os.kill(agent.pid, signal.SIGTERM)
        run = client.finished(params.run_uid)
    assert agent.process is not None
    agent.process.wait(30)

    assert run.state is RunState.INTERRUPTED
    eventually(lambda: not any(is_running(pid) for pid in pids), "no child is left")


def test_a_killed_zygote_is_followed_by_another(agent: Agent) -> None:
    """The next run forks from a new zygote; the holder that the old one forked lives on."""
    with agent.client("") as client:
        first = client.warm(agent.params(environment={"N": "1"}))
        holder, zygote = client.worker_pid(), pid_of(client, "zygote")
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)
        eventually(lambda: pid_of(client, "zygote") is None, "the agent sees it")
        second = client.warm(agent.params(environment={"N": "2"}))
        other = pid_of(client, "zygote")

        assert is_running(holder)
    assert first.state is second.state is RunState.READY
    assert other not in (None, zygote)
    assert stage_of(second, "init").reason is None


def test_a_run_that_waits_for_a_zygote_that_dies_gets_a_fresh_worker_and_says_why(agent: Agent) -> None:
    """Losing the zygote during its imports costs nothing but the reason on init."""
    agent.order("zygote", "slow")
    params = agent.params()
    with agent.client("") as client:
        client.begin(params)
        client.stage(params.run_uid, "init")
        zygote = eventually(lambda: pid_of(client, "zygote"), "the zygote starts")
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)
        run = client.finished(params.run_uid)

    assert run.state is RunState.READY
    assert str(stage_of(run, "init").reason).startswith("the zygote killed (SIGKILL)")


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("refuse", "the zygote refused: 9 threads where imports leave 1"),
        ("die", "the zygote exited with code 1: ModuleNotFoundError: No module named 'torch'"),
        ("mute", "the zygote did not answer within 0.3 s"),
        ("slow", "the zygote is not ready within 1 s"),
    ],
)
def test_a_zygote_that_does_not_fork_is_replaced_by_a_fresh_worker(
    make_agent: Callable[..., Agent], order: str, reason: str
) -> None:
    """Refusing, dying and hanging all end in a spawned worker, with the reason on init."""
    agent = make_agent(zygote={"ready_s": 1.0, "fork_s": 0.3})
    agent.order("zygote", order)
    with agent.client("") as client:
        run = client.warm(agent.params())

    assert run.state is RunState.READY
    assert stage_of(run, "init").reason == reason


def test_changed_packages_retire_the_zygote(agent: Agent) -> None:
    """A zygote whose imports are outdated forks no more; the next run has a new one."""
    packages = agent.orders / "packages"
    packages.mkdir()
    with agent.client("") as client:
        client.warm(agent.params(environment={"N": "1"}))
        old = pid_of(client, "zygote")
        (packages / "torch-next").touch()
        os.utime(packages, ns=(1, 1))
        client.warm(agent.params(environment={"N": "2"}))
        new = pid_of(client, "zygote")

    assert old is not None
    assert new not in (None, old)


def test_a_variable_that_matters_while_importing_gets_its_own_zygote(agent: Agent) -> None:
    """Zygotes are shared by runs whose environment differs only later."""
    with agent.client("") as client:
        client.warm(agent.params(environment={"N": "1"}))
        client.warm(agent.params(environment={"N": "2"}))
        shared = [name for name in client.status().processes if name.startswith("zygote")]
        client.warm(agent.params(environment={"TORCH_LOGS": "all"}))
        parted = [name for name in client.status().processes if name.startswith("zygote")]

    assert (len(shared), len(parted)) == (1, 2)


def test_a_cancel_while_the_zygote_imports_ends_the_run_and_nothing_starts_later(agent: Agent) -> None:
    """A worker that nobody waits for any more is never forked."""
    agent.order("zygote", "slow")
    params = agent.params()
    with agent.client("") as client:
        client.begin(params)
        client.stage(params.run_uid, "init")
        run = client.call("run.cancel", RunUidParams(params.run_uid), RunResult).run
        agent.order("zygote", None)
        after = client.warm(agent.params(environment={"N": "2"}))
        workers = [name for name in client.status().processes if name.startswith("worker")]

    assert run.state is RunState.CANCELLED
    assert after.state is RunState.READY
    assert len(workers) == 1


# --- the keeper ---


@pytest.fixture
def kept(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent on a host with device files, whose keeper holds them."""
    agent = make_agent(devices=("nvidiactl", "nvidia0", "nvidia1"))
    with agent.client() as client:
        eventually(lambda: pid_of(client, "keeper"), "the keeper is found")
    return agent


def held_by(pid: int, agent: Agent) -> set[str]:
    """Return which of the device files a process has open."""
    targets = (link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    return {target.name for target in targets if target.parent == agent.orders / "dev"}


def test_the_keeper_outlives_the_agent_and_is_found_again(kept: Agent) -> None:
    """SIGKILL of the agent leaves the devices held; the next agent finds the same keeper and can end it."""
    with kept.client() as client:
        keeper = pid_of(client, "keeper")
    assert keeper is not None
    held = held_by(keeper, kept)
    kept.kill()
    still_held = held_by(keeper, kept)
    kept.start()
    with kept.client() as client:
        found = eventually(lambda: pid_of(client, "keeper"), "the keeper is found again")

    assert held == still_held == {"nvidiactl", "nvidia0", "nvidia1"}
    assert found == keeper


def test_a_release_of_the_driver_closes_the_devices(kept: Agent) -> None:
    """After it the keeper lives and holds nothing; a GPU run lets it hold them again."""
    with kept.client() as client:
        keeper = pid_of(client, "keeper")
        assert keeper is not None
        result = client.call("resident.release", ReleaseParams(driver=True), ReleaseResult)

    assert result.driver_released
    assert held_by(keeper, kept) == set()
