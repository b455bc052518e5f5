"""Keepers for tests: each has a state directory and is gone afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_agent.agentd.paths import StateDir
from remote_agent.keeper.client import KeeperAddress
from tests.remote_agent.agentd.agents import DEADLINE_S, REPOSITORY
from tests.remote_agent.keeper.keepers import DEVICES, Keep, answering


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """Return a state directory ready for a keeper."""
    state = StateDir(tmp_path / "state")
    state.prepare()
    return state


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Return a folder with device files, and others that are none of the keeper's."""
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in (*DEVICES, "nvidia-uvm", "nvidia0p1", "null"):
        (folder / name).touch()
    return folder


@pytest.fixture
def keep(state: StateDir, devices: Path) -> Iterator[Keep]:
    """Return a function that starts a keeper; all of them end afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        arguments = ["--state-dir", str(state.root), "--devices", str(devices)]
        process = subprocess.Popen([sys.executable, "-m", "remote_agent", "keeper", *arguments], cwd=REPOSITORY)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(DEADLINE_S)


@pytest.fixture
def keeper(keep: Keep, state: StateDir) -> int:
    """Return the pid of a keeper that answers."""
    process = keep()
    answering(state)
    return process.pid


@pytest.fixture
def address(keeper: int, state: StateDir) -> KeeperAddress:
    """Return where the keeper answers."""
    return KeeperAddress(state)
