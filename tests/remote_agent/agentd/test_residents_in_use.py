"""What is let go while a run comes for it, or while somebody else has it: nobody loses what they use."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from remote_agent.errors import AgentError, RefusedError
from remote_agent.protocol.messages import RunState, Tier
from tests.remote_agent.agentd.agents import DEADLINE_S, Agent, eventually
from tests.remote_agent.agentd.test_residents import attached, keeper_pid, release, residents


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent of a host with device files, whose keeper runs."""
    agent = make_agent(devices=("nvidiactl", "nvidia0"))
    with agent.client() as client:
        keeper_pid(client)
    return agent


class Releasing(threading.Thread):
    """A release that waits, and what became of it."""

    def __init__(self, agent: Agent, **what: Any) -> None:
        super().__init__()
        self._agent, self._what = agent, what
        self.error: AgentError | None = None
        self.start()

    def run(self) -> None:
        with self._agent.client() as client:
            try:
                release(client, **self._what)
            except AgentError as error:
                self.error = error


def test_a_run_that_came_while_a_release_waited_keeps_its_standby(agent: Agent) -> None:
    """The release is refused, naming the run, which ends ready."""
    with agent.client("") as client:
        client.warm(agent.params("keeps gate:first_request"))
        (standby,) = residents(client)
        agent.order("gate", "")
        with attached(agent, standby.name), agent.client() as other:
            releasing = Releasing(agent, wait_s=DEADLINE_S)
            eventually(lambda: residents(other)[0].attached, "the lease is known")
            second = agent.params("keeps gate:first_request")
            client.begin(second)
            client.stage(second.run_uid, "first_request")
        releasing.join(DEADLINE_S)
        agent.order("gate", None)
        run = client.finished(second.run_uid)

    assert isinstance(releasing.error, RefusedError)
    assert (releasing.error.code, second.run_uid in str(releasing.error)) == ("busy", True)
    assert (run.state, run.tier_from) == (RunState.READY, Tier.STANDBY)


def test_a_standby_that_is_being_let_go_serves_no_run(agent: Agent) -> None:
    """A run that comes meanwhile starts a worker of its own."""
    agent.order("keep-on-release", "")
    with agent.client("") as client:
        client.warm(agent.params())
        old = client.worker_pid()
        releasing = Releasing(agent)
        eventually((agent.orders / "asked-to-release").exists, "the worker is asked to go")
        run = client.warm(agent.params())
        os.kill(old, signal.SIGKILL)
        releasing.join(DEADLINE_S)

        assert (run.state, run.tier_from) == (RunState.READY, Tier.COLD)
        assert [one.run_uid for one in residents(client)] == [run.run_uid]
    assert releasing.error is None


def test_a_standby_of_changed_files_is_replaced_though_its_old_weights_are_attached(agent: Agent) -> None:
    """Its worker ends; whoever is attached keeps what the keeper has, and the run is ready."""
    with agent.client("") as client:
        client.warm(agent.params("keeps"))
        (standby,) = residents(client)
        agent.model.write_bytes(b"other weights")
        with attached(agent, standby.name):
            run = client.warm(agent.params("keeps"))
            there = {one.name: one.tier for one in residents(client)}

    assert run.state is RunState.READY, run.failure
    assert there.pop(standby.name) is Tier.RESIDENT
    assert list(there.values()) == [Tier.STANDBY]
