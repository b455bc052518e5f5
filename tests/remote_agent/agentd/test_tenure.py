"""What becomes of an agent whose state directory, or a part of it, is removed while it runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.agentd.daemon import holder, take_lock
from remote_agent.agentd.launch import connect
from remote_agent.protocol.messages import ReleaseParams, ReleaseResult, ResidentChanged
from tests.remote_agent.agentd.agents import DEADLINE_S, REPOSITORY, Agent, eventually, is_running

pytestmark = pytest.mark.faults

WATCH = {"watch_s": 0.05}


@pytest.fixture
def warm(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent that holds a warm model and a keeper, and looks after its directory often."""
    agent = make_agent(devices=("nvidiactl",), **WATCH)
    with agent.client("") as client:
        client.warm(agent.params())
        eventually(lambda: client.status().processes["keeper"], "the keeper is found")
    return agent


def pids(agent: Agent) -> dict[str, int]:
    with agent.client() as client:
        return {name: pid for name, pid in client.status().processes.items() if pid}


def listens(agent: Agent) -> bool:
    link = connect(agent.state)
    if link is not None:
        link.close()
    return link is not None


def remove(path: Path) -> None:
    """Take a path away in one step: while a tree is deleted file by file, its agent may add to it."""
    gone = Path(tempfile.mkdtemp(dir=path.parent.parent)) / path.name
    path.rename(gone)
    shutil.rmtree(gone.parent, ignore_errors=True)


def test_an_agent_whose_state_directory_is_removed_ends_with_everything(warm: Agent) -> None:
    """Worker, zygote and keeper are gone with it, and its log says why."""
    before = pids(warm)
    remove(warm.state.root)
    assert warm.process is not None
    code = warm.process.wait(DEADLINE_S)

    assert code == 1
    assert len(before) >= 4
    eventually(lambda: not any(is_running(pid) for pid in before.values()), "nothing is left")
    assert f"{warm.state.root} was removed" in warm.log()


def test_an_agent_gives_way_to_the_one_that_has_its_directory_now(warm: Agent) -> None:
    """With the directory removed and another agent started there, the first one and its model go; the second stays."""
    before, first = pids(warm), warm.process
    assert first is not None
    remove(warm.state.root)
    warm.start()
    first.wait(DEADLINE_S)
    eventually(lambda: not any(is_running(pid) for pid in before.values()), "nothing of the first is left")

    assert warm.pid not in before.values()
    assert pids(warm)["agentd"] == warm.pid


@pytest.mark.parametrize("what", ["run", "run/control.sock"])
def test_a_removed_socket_is_bound_again(warm: Agent, what: str) -> None:
    """The same agent answers there, with its warm model; its keeper is found or replaced."""
    before = pids(warm)
    remove(warm.state.root / what)
    eventually(lambda: listens(warm), "it listens again")
    eventually(lambda: "keeper" in pids(warm), "there is a keeper")
    after = pids(warm)
    keepers = before.pop("keeper"), after.pop("keeper")
    eventually(lambda: keepers[0] == keepers[1] or not is_running(keepers[0]), "one keeper is left")

    assert after == before


def test_a_removed_lock_is_held_again(warm: Agent) -> None:
    """A second agent is kept out as before."""
    remove(warm.state.lock)
    eventually(lambda: holder(warm.state) == warm.pid, "the lock names its holder")

    assert take_lock(warm.state) is None
    assert pids(warm)["agentd"] == warm.pid


def test_an_agent_ends_when_another_holds_the_lock(warm: Agent) -> None:
    """Two never serve one directory: the one whose lock file was replaced ends with its model, the keeper stays."""
    before = pids(warm)
    beside = warm.state.root / "beside"
    other = os.open(beside, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(other, fcntl.LOCK_EX)
    beside.replace(warm.state.lock)
    assert warm.process is not None
    code = warm.process.wait(DEADLINE_S)
    os.close(other)
    keeper = before.pop("keeper")

    assert code == 1
    assert not any(is_running(pid) for pid in before.values())
    assert is_running(keeper)
    assert f"another agent holds {warm.state.lock}" in warm.log()


TERMINATED_WHEN_FOUND = """
import os, signal, sys
from remote_agent.agentd import server, tenure

bind = tenure.listen
def listen(*words):
    listener = bind(*words)
    os.kill(os.getpid(), signal.SIGTERM)
    return listener

tenure.listen = listen
sys.exit(server.main(["--foreground", "--state-dir", sys.argv[1]]))
"""


def test_a_signal_as_soon_as_the_socket_is_there_ends_the_agent_in_order(tmp_path: Path) -> None:
    """Whoever finds the socket may end the agent: no moment is left in which the signal would just kill it."""
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED_WHEN_FOUND, str(tmp_path / "state")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )

    assert done.returncode == 0, done.stderr
    assert "the agent has ended" in done.stderr


def test_a_model_is_called_gone_only_when_its_process_has_ended(warm: Agent) -> None:
    """A worker that outlives a killed agent is ended by the next one before it says so; the keeper is not."""
    with warm.client() as client:
        worker, newest = client.worker_pid(), client.hello("again").newest_seq
        keeper = client.status().processes["keeper"]
    assert keeper is not None
    os.kill(worker, signal.SIGSTOP)  # it can't see that its socket was closed
    warm.kill()
    outlived = is_running(worker)
    warm.start()
    with warm.client("", after_seq=newest) as client:
        gone = client.next_event(lambda event: isinstance(event.data, ResidentChanged))
        still_there = is_running(worker)

    assert outlived
    assert isinstance(gone.data, ResidentChanged)
    assert (gone.data.state, gone.data.reason) == ("gone", "the agent that held it has ended")
    assert not still_there
    assert is_running(keeper)


def test_what_waits_for_a_run_ends_though_the_killed_agent_had_none(make_agent: Callable[..., Agent]) -> None:
    """A spare that could not see its socket close has the driver open: the next agent ends it as well."""
    agent = make_agent(idle_s=0.02)
    with agent.client("") as client:
        run = client.warm(agent.params())
        client.call("resident.release", ReleaseParams(run.run_uid), ReleaseResult)
        spare = eventually(lambda: client.status().processes.get("spare cpu"), "a spare waits")
    os.kill(spare, signal.SIGSTOP)
    agent.kill()
    outlived = is_running(spare)
    agent.start()
    eventually(lambda: not is_running(spare), "it ends")

    assert outlived
