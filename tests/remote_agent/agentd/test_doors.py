"""Whom an agent lets in: its directory, its socket, and one agent for each."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.agentd.launch import connect
from remote_agent.agentd.paths import StateDir, make_private, open_private
from remote_agent.errors import StateDirError
from tests.remote_agent.agentd.agents import DEADLINE_S, REPOSITORY, Agent
from tests.remote_agent.strangers import STRANGER, said_to_a_stranger


def run_agent(state: StateDir) -> subprocess.CompletedProcess[str]:
    """Run an agent of ``state`` that is to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "remote_agent", "agentd", "--foreground", "--state-dir", str(state.root)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """A socket directory wider than 0700 is never used, neither by the agent nor by a client."""
    state = StateDir(tmp_path / "state")
    state.prepare()
    state.run.chmod(0o750)

    with pytest.raises(StateDirError, match="mode 0750"):
        connect(state)
    refused = run_agent(state)
    assert refused.returncode == 1
    assert "mode 0750 lets others in" in refused.stderr


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """A symbolic link can't redirect the socket."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(StateDirError, match="not a usable directory"):
        open_private(tmp_path / "link")


def test_a_directory_that_takes_no_sockets_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some filesystems that hosts share; what one left that was killed as it tried is no reason."""

    class Refused(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    state = StateDir(tmp_path / "state")
    state.prepare()
    (state.run / f"try-{os.getpid()}.sock").touch()
    state.prepare()
    assert list(state.run.iterdir()) == []
    monkeypatch.setattr("remote_agent.agentd.paths.socket.socket", Refused)

    with pytest.raises(
        StateDirError, match=f"^{state.run}: no socket can be made there: Operation not permitted; a state"
    ):
        state.prepare()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can own files as others")
def test_a_directory_of_someone_else_is_refused(tmp_path: Path) -> None:
    """Not even root uses a directory that another user owns."""
    make_private(tmp_path / "theirs")
    os.chown(tmp_path / "theirs", STRANGER, STRANGER)

    with pytest.raises(StateDirError, match=f"belongs to user id {STRANGER}"):
        open_private(tmp_path / "theirs")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_not_served(agent: Agent) -> None:
    """Credentials are checked at the socket, even when the directory lets someone through."""
    assert said_to_a_stranger(agent.state.run, "control.sock") == b""
    assert f"a client of user id {STRANGER} is refused" in agent.log()


def test_only_one_agent_serves_a_state_directory(agent: Agent) -> None:
    """A second agent finds the lock held and says so with its own exit code."""
    second = run_agent(agent.state)

    assert second.returncode == 3
    assert "another agent holds" in second.stderr


def test_a_state_directory_may_have_a_very_long_path(tmp_path: Path, make_agent: Callable[..., Agent]) -> None:
    """Socket addresses have 108 bytes; a state directory has no such limit."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    agent = Agent(folder, heartbeat_s=0.1)
    try:
        agent.start()
        with agent.client() as client:
            assert client.greeting.pid == agent.pid
    finally:
        agent.close()
