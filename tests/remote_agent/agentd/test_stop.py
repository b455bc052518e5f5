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
from remote_agent.verbs import stop
from tests.remote_agent.agentd.agents import REPOSITORY, Agent, Watcher, eventually, is_running
from tests.remote_agent.agentd.test_verbs import recipe_file, verb

pytestmark = pytest.mark.faults


@pytest.fixture
def warm(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent that holds a warm model and never looks whether its socket is still there."""
    agent = make_agent(watch_s=600)
    with agent.client("") as client:
        client.warm(agent.params())
    return agent


IMPATIENT = """
import sys
from remote_agent.__main__ import main
from remote_agent.agentd import launch
from remote_agent.verbs import stop
launch.reach.__defaults__ = (0.5,)
stop.SILENCE_S = 1.0
stop.TERM_S = float(sys.argv.pop(1))
sys.exit(main(sys.argv[1:]))
"""
"""A verb as it is, but for how long it waits for what will not come."""


def impatient(agent: Agent, *words: str, term_s: float = stop.TERM_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        impatient_command(agent, *words, term_s=term_s),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def impatient_command(agent: Agent, *words: str, term_s: float = stop.TERM_S) -> list[str]:
    return [sys.executable, "-c", IMPATIENT, str(term_s), *words, "--state-dir", str(agent.state.root)]


def pids(agent: Agent) -> list[int]:
    with agent.client() as client:
        return [pid for pid in client.status().processes.values() if pid]


def test_stop_force_ends_an_agent_that_is_stopped(warm: Agent) -> None:
    """One that says nothing is named, and ended by signals with what it holds; without --force it is only named."""
    known = pids(warm)
    os.kill(warm.pid, signal.SIGSTOP)
    refused = impatient(warm, "stop")
    forced = impatient(warm, "stop", "--force")

    assert refused.returncode == 1
    assert f"the agent (process {warm.pid}) holds {warm.state.lock} but said nothing for 1 s" in refused.stderr
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
    forced = impatient(warm, "stop", "--force", term_s=1.0)

    assert (forced.returncode, forced.stdout) == (0, "the agent has ended\n")
    assert not is_running(worker)
    assert not is_running(warm.pid)


def test_stop_leaves_no_process_that_can_not_hear_it(make_agent: Callable[..., Agent]) -> None:
    """A zygote, and the preflight that waits, end though they are stopped and take no SIGTERM; so does a spare."""
    agent = make_agent(idle_s=0.02)
    with agent.client("") as client:
        client.warm(agent.params())
        processes = eventually(lambda: waiting_processes(client), "a spare and a preflight wait")
    for pid in processes.values():
        os.kill(pid, signal.SIGSTOP)
    done = impatient(agent, "stop", "--force")

    assert any(name.startswith("worker") for name in processes)
    assert (done.returncode, done.stdout) == (0, "the agent has ended\n")
    assert not any(is_running(pid) for pid in processes.values())


def waiting_processes(client: Watcher) -> dict[str, int]:
    """Return every process of an agent but itself, once it has made ready what the next run may want."""
    found = {name: pid for name, pid in client.status().processes.items() if pid and name != "agentd"}
    return found if {"zygote 1", "preflight", "spare cpu"} <= found.keys() else {}


def test_every_verb_names_an_agent_that_does_not_listen(warm: Agent) -> None:
    """Once, with its pid, and without starting another; such an agent is not called absent."""
    shutil.rmtree(warm.state.run)
    verbs = (["status"], ["release", "--all"], ["stop"], ["run", recipe_file(warm)])
    asked = [
        subprocess.Popen(
            impatient_command(warm, *words), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    forced = impatient(warm, "stop", "--force")
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
        [sys.executable, "-c", IMPATIENT, "1.0", "stop", "--force", "--state-dir", str(state.root)],
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
