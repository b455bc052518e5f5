"""What servers were is kept by rollout and node, first come, and never lost to what can't be read or written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from console.errors import HookFailed
from console.hooks.haproxy.memory import Memory
from console.hooks.haproxy.protocol import Server, State

KEY = ("/run/haproxy/admin.sock", "models/gpu-1")


def server(state: State = State.READY, weight: int = 100) -> Server:
    return Server(42, state, weight, 100, "UP", 0, 0, 0, True, False)


def test_the_first_state_stays(tmp_path: Path) -> None:
    """What a later attempt finds, and what another server joins, changes nothing about it."""
    memory = Memory(tmp_path, "r1", "gpu-1")
    memory.remember({KEY: server(weight=40)})
    other = ("/other.sock", "models/gpu-1")
    new = Memory(tmp_path, "r1", "gpu-1").remember({KEY: server(State.DRAIN), other: server(State.MAINT)})

    assert [former.key for former in new] == [other]
    assert [str(former) for former in memory.recall().servers] == ["ready, weight 40", "maint, weight 100"]
    assert stat.S_IMODE(memory.file.stat().st_mode) == 0o600


def test_rollouts_and_nodes_are_kept_apart(tmp_path: Path) -> None:
    """Whatever they are called."""
    one = Memory(tmp_path, "r/1", "gpu-1")
    one.remember({KEY: server()})

    assert Memory(tmp_path, "r\udcff1", "gpu-1").recall().servers == ()
    assert Memory(tmp_path, "r/1", "gpu-1.a").recall().servers == ()
    one.forget()
    one.forget()
    assert one.recall().servers == ()


def test_a_record_that_cannot_be_read_is_not_written_over(tmp_path: Path) -> None:
    """It may be all that is known of a server; a person is told where it is."""
    memory = Memory(tmp_path, "r1", "gpu-1")
    memory.remember({KEY: server()})
    memory.file.write_text("{}")

    with pytest.raises(HookFailed, match=r"\.json: is no record of what servers were before a rollout: "):
        memory.remember({KEY: server(State.DRAIN)})
    assert memory.file.read_text() == "{}"


def test_what_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    """So that nothing is changed that could not be brought back."""
    (tmp_path / "hooks").write_text("a file where the folder should be")

    with pytest.raises(HookFailed, match="Not a directory"):
        Memory(tmp_path, "r1", "gpu-1").remember({KEY: server()})


def test_a_shift_ends_what_other_rollouts_left_behind(tmp_path: Path) -> None:
    """The node's files do not pile up; its own record stays, for after_shift may fail."""
    first, second = Memory(tmp_path, "r1", "gpu-1"), Memory(tmp_path, "r2", "gpu-1")
    first.remember({KEY: server(weight=40)})
    second.remember({KEY: server(State.DRAIN, 40)})
    second.note_shifted()

    assert not first.file.exists()
    assert [str(former) for former in second.recall().servers] == ["ready, weight 40"]
