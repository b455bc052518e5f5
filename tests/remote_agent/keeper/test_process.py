"""The keeper as a process: its four words, what it holds, and who may speak to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.agentd.paths import StateDir
from remote_agent.keeper import ALREADY_RUNS
from remote_agent.keeper.client import tell_keeper
from remote_agent.keeper.words import WORDS
from tests.remote_agent.agentd.agents import DEADLINE_S
from tests.remote_agent.keeper.keepers import DEVICES, Keep, answering
from tests.remote_agent.strangers import said_to_a_stranger


def held_by(pid: int, folder: Path) -> list[str]:
    targets = (link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir())
    return sorted(target.name for target in targets if target.parent == folder)


def test_a_keeper_holds_the_control_device_and_each_gpu(keep: Keep, state: StateDir, devices: Path) -> None:
    """Exactly the files that keep the driver's state loaded are open."""
    process = keep()

    assert answering(state) == f"ok 3 {process.pid}"
    assert held_by(process.pid, devices) == sorted(DEVICES)


def test_the_four_words_do_what_they_say(keep: Keep, state: StateDir, devices: Path) -> None:
    """Release closes, hold opens again and takes in new devices, stop ends the process."""
    process = keep()
    answering(state)

    assert tell_keeper(state, "release") == f"ok 0 {process.pid}"
    assert held_by(process.pid, devices) == []
    (devices / "nvidia8").touch()
    assert tell_keeper(state, "hold") == f"ok 4 {process.pid}"
    assert tell_keeper(state, "hold") == f"ok 4 {process.pid}"
    assert tell_keeper(state, "dance") == f"error words are: {' '.join(WORDS)}"
    assert tell_keeper(state, "stop") == f"ok 0 {process.pid}"
    assert process.wait(DEADLINE_S) == 0
    assert tell_keeper(state, "status") is None


def test_a_second_keeper_leaves_the_first_alone(keep: Keep, state: StateDir) -> None:
    """One keeper holds for a state directory; another ends at once."""
    first = keep()
    answering(state)
    second = keep()

    assert second.wait(DEADLINE_S) == ALREADY_RUNS
    assert answering(state) == f"ok 3 {first.pid}"


def test_a_keeper_follows_one_that_was_killed(keep: Keep, state: StateDir) -> None:
    """A socket that a dead keeper left behind is no obstacle."""
    first = keep()
    answering(state)
    first.kill()
    first.wait(DEADLINE_S)
    second = keep()

    assert answering(state) == f"ok 3 {second.pid}"


def test_a_keeper_has_no_gpu_library_and_little_memory(keep: Keep, state: StateDir) -> None:
    """It holds descriptors and nothing else."""
    process = keep()
    answering(state)
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    status = Path(f"/proc/{process.pid}/status").read_text()
    rss_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))

    assert "libcuda" not in maps
    assert "asyncio" not in maps
    assert rss_kb <= 20 << 10


@pytest.mark.parametrize("what", ["run", "run/keeper.sock", "."])
def test_a_keeper_whose_socket_was_removed_ends(keep: Keep, state: StateDir, what: str) -> None:
    """Nobody could tell it to stop any more, so it does not hold the driver for ever."""
    process = keep()
    answering(state)
    path = state.root / what
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()

    assert process.wait(DEADLINE_S) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_refused(
    keep: Callable[[], subprocess.Popen[bytes]], state: StateDir, devices: Path
) -> None:
    """Even where the directory lets someone through, nobody else lets the driver go."""
    process = keep()
    answering(state)
    assert said_to_a_stranger(state.run, "keeper.sock").startswith(b"error")
    assert held_by(process.pid, devices) == sorted(DEVICES)
