"""A preflight that waits for its run: one at most, gone with the agent, and as good as one just started."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from remote_agent.protocol.messages import RunRecord, RunState
from tests.remote_agent.agentd.agents import Agent, Watcher, children_of, eventually, failure_of, is_running, stage_of


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent that is idle soon."""
    return make_agent(idle_s=0.02)


def waiting(client: Watcher) -> int:
    """Return the pid of the preflight that waits, once there is one."""
    return eventually(lambda: client.status().processes["preflight"], "a preflight waits") or 0


def used(run: RunRecord) -> object:
    return stage_of(run, "preflight").extra["pid"]


def preflights(agent: Agent) -> list[int]:
    def has_word(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return b"preflight-child" in file.read().split(b"\0")
        except OSError:
            return False

    return [pid for pid in children_of(agent.pid) if has_word(pid)]


def test_the_one_that_waits_does_the_next_run_s_check_and_is_replaced(agent: Agent) -> None:
    """Each does one job; there is never more than one that waits."""
    with agent.client("") as client:
        first = waiting(client)
        runs = [client.warm(agent.params())]
        second = waiting(client)
        together = preflights(agent)
        runs.append(client.warm(agent.params("other")))

    assert [run.state for run in runs] == [RunState.READY] * 2
    assert [used(run) for run in runs] == [first, second]
    assert first != second
    assert together == [second]


def test_none_is_started_while_a_run_goes_on(agent: Agent) -> None:
    """It would take processor time from the load; a run beside another has one of its own."""
    with agent.client("") as client:
        taken = waiting(client)
        first, beside = agent.params("hang:weights"), agent.params("hang:weights", devices=("cpu",))
        client.begin(first)
        client.stage(first.run_uid, "weights")
        now = client.status().processes["preflight"]
        client.begin(beside)

    assert taken
    assert now is None


def test_one_that_died_while_it_waited_is_no_loss(agent: Agent) -> None:
    """The run has a new one and does not fail."""
    with agent.client("") as client:
        died = waiting(client)
        os.kill(died, signal.SIGKILL)
        run = client.warm(agent.params())

    assert run.state is RunState.READY
    assert used(run) != died


def test_a_check_that_kills_the_one_that_waited_fails_its_run_alone(agent: Agent) -> None:
    """A checkpoint that breaks a process is told as before, and the next run is whole."""
    with agent.client("") as client:
        waiting(client)
        failed = client.warm(agent.params("preflight:die"))
        after = client.warm(agent.params())

    assert failure_of(failed).code == "preflight_died"
    assert "SIGSEGV" in failure_of(failed).detail
    assert after.state is RunState.READY


def test_a_run_goes_on_with_the_report_and_not_with_the_end_of_the_process(agent: Agent) -> None:
    """An interpreter takes a while to end, for which nothing waits; a process that never ends goes with the run."""
    with agent.client("") as client:
        run = client.warm(agent.params("preflight:linger"))
        eventually(lambda: not is_running(int(str(used(run)))), "it is ended")

    assert run.state is RunState.READY


@pytest.mark.faults
def test_it_ends_with_the_agent(agent: Agent) -> None:
    """Killed or told to stop: none is left."""
    pids = []
    for end in (agent.kill, agent.close):
        with agent.client() as client:
            pids.append(waiting(client))
        end()
        if end == agent.kill:
            agent.start()

    eventually(lambda: not any(is_running(pid) for pid in pids), "none is left")
