"""``stop`` and the other verbs against an agent that does not answer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.agentd.daemon import take_lock
from remote_agent.agentd.paths import StateDir
from tests.remote_agent.agentd.agents import REPOSITORY, Agent, is_running
from tests.remote_agent.agentd.test_verbs import command, recipe_file, verb

pytestmark = pytest.mark.faults


@pytest.fixture
def warm(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent that holds a warm model and never looks whether its socket is still there."""
    agent = make_agent(watch_s=600)
    with agent.client("") as client:
        client.warm(agent.params())
    return agent


def pids(agent: Agent) -> list[int]:
    with agent.client() as client:
        return [pid for pid in client.status().processes.values() if pid]


def test_stop_force_ends_an_agent_that_is_stopped(warm: Agent) -> None:
    """One that says nothing is named, and ended by signals with what it holds; without --force it is only named."""
    known = pids(warm)
    os.kill(warm.pid, signal.SIGSTOP)
    refused = verb(warm, "stop")
    forced = verb(warm, "stop", "--force")

    assert refused.returncode == 1
    assert f"the agent (process {warm.pid}) holds {warm.state.lock} but said nothing for 5 s" in refused.stderr
    assert refused.stderr.rstrip().endswith("--force ends it")
    assert (forced.returncode, forced.stdout) == (0, "the agent has ended\n")
    assert f"(process {warm.pid})" in forced.stderr
    assert not any(is_running(pid) for pid in known)


def test_stop_force_ends_what_a_killed_agent_leaves(warm: Agent) -> None:
    """Children that outlive an agent which had to be killed are ended too, even one that is stopped."""
    with warm.client() as client:
        worker = client.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    os.kill(warm.pid, signal.SIGSTOP)
    warm.order("unkillable", "")  # the agent itself can't end it
    forced = verb(warm, "stop", "--force")

    assert (forced.returncode, forced.stdout) == (0, "the agent has ended\n")
    assert not is_running(worker)
    assert not is_running(warm.pid)


def test_every_verb_names_an_agent_that_does_not_listen(warm: Agent) -> None:
    """Once, with its pid, and without starting another; such an agent is not called absent."""
    shutil.rmtree(warm.state.run)
    verbs = (["status"], ["release", "--all"], ["stop"], ["run", recipe_file(warm)])
    asked = [
        subprocess.Popen(
            command(warm, *words), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for words in verbs
    ]
    for process in asked:
        output, errors = process.communicate(timeout=60)

        assert (process.returncode, output) == (1, "")
        assert f"the agent (process {warm.pid}) holds {warm.state.lock} but does not listen" in errors
        assert len(errors.splitlines()) == 1


def test_stop_force_ends_an_agent_that_does_not_listen(warm: Agent) -> None:
    """It is ended in order by a signal, with what it holds, and then there is none."""
    known = pids(warm)
    shutil.rmtree(warm.state.run)
    forced = verb(warm, "stop", "--force")
    again = verb(warm, "stop")

    assert (forced.returncode, forced.stdout) == (0, "the agent has ended\n")
    assert not any(is_running(pid) for pid in known)
    assert "the agent has ended" in warm.log()
    assert again.stdout == "no agent was running\n"


def test_nobody_is_killed_for_a_pid_that_is_not_proved(tmp_path: Path) -> None:
    """A lock whose holder is not the process that it names is reported; that process lives."""
    state = StateDir(tmp_path / "state")
    state.prepare()
    bystander = subprocess.Popen(["sleep", "600"])
    lock = take_lock(state)
    assert lock is not None
    os.write(lock, str(bystander.pid).encode())
    done = subprocess.run(
        [sys.executable, "-m", "remote_agent", "stop", "--force", "--state-dir", str(state.root)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    alive = bystander.poll() is None
    os.close(lock)
    bystander.kill()
    bystander.wait()

    assert done.returncode == 1
    assert "nothing is killed" in done.stderr
    assert alive
