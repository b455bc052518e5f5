"""A lock among users: who has it is said, its end frees it, and what lies in its place is never followed or trusted."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remote_agent.agentd.lock_file import LockFile, find_folder
from remote_agent.errors import LockFileError

ANN: dict[str, str | int] = {"user": "ann", "pid": 7, "run": "run-of-ann"}


def test_two_never_have_it_and_the_second_reads_who_does(tmp_path: Path) -> None:
    """The file names run, user and process of its holder until that gives it back."""
    first, second = LockFile(tmp_path / "gpu"), LockFile(tmp_path / "gpu")
    assert first.try_take(ANN)
    refused, holder = second.try_take({"pid": 8}), second.holder()
    first.release(was_used=True)

    assert not refused
    assert holder == "run run-of-ann of ann (agent process 7)"
    assert second.try_take({"pid": 8})


def test_every_user_may_take_the_file_whatever_the_umask_of_its_maker(tmp_path: Path) -> None:
    """An agent has umask 077; the file is there with mode 0666 or not at all, and nothing is left beside it."""
    before = os.umask(0o077)
    try:
        LockFile(tmp_path / "gpu").try_take(ANN)
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "gpu").stat().st_mode) == 0o666
    assert [path.name for path in tmp_path.iterdir()] == ["gpu"]


def test_the_end_of_the_last_use_is_told_to_the_next_holder(tmp_path: Path) -> None:
    """A holder that changed nothing leaves the time as it was; one before the first is none."""
    lock, times = LockFile(tmp_path / "gpu"), []
    for was_used in (False, True, False):
        assert lock.try_take(ANN)
        times.append(lock.used_mono_ns)
        lock.release(was_used)
    assert lock.try_take(ANN)

    assert times[:2] == [0, 0]
    assert 0 < times[2] == lock.used_mono_ns <= time.monotonic_ns()


DIES_WITH_IT = """
import os, signal, sys
from pathlib import Path
from remote_agent.agentd.lock_file import LockFile
assert LockFile(Path(sys.argv[1])).try_take({"user": "bob", "pid": os.getpid(), "run": "r"})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_holder_s_death_frees_it_and_counts_as_a_use_just_now(tmp_path: Path) -> None:
    """The kernel gives the lock back; when its use ended nobody could write down."""
    began_ns = time.monotonic_ns()
    died = subprocess.run([sys.executable, "-c", DIES_WITH_IT, str(tmp_path / "gpu")], check=False)
    lock = LockFile(tmp_path / "gpu")

    assert died.returncode == -signal.SIGKILL
    assert lock.try_take(ANN)
    assert lock.used_mono_ns > began_ns


@pytest.mark.parametrize("said", [{"used_mono_ns": 2**62}, {"used_mono_ns": -1}, {"used_mono_ns": "x"}, [1], None])
def test_a_time_that_cannot_be_costs_a_look_and_no_more(tmp_path: Path, said: object) -> None:
    """What another user or another boot wrote is taken for nothing used, or for a use that ended now."""
    (tmp_path / "gpu").write_text(json.dumps(said))
    lock = LockFile(tmp_path / "gpu")
    assert lock.try_take(ANN)

    assert 0 <= lock.used_mono_ns <= time.monotonic_ns()


def test_what_another_user_wrote_is_shown_without_its_control_characters(tmp_path: Path) -> None:
    """The name of a holder is untrusted text of bounded length."""
    (tmp_path / "gpu").write_text(json.dumps({"pid": "1\x1b[31m", "user": "u" * 500, "run": "\n"}))

    assert LockFile(tmp_path / "gpu").holder() == f"run ? of {'u' * 64} (agent process 1?[31m)"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.symlink_to(path.parent / "elsewhere"), "is a symbolic link"),
        (lambda path: path.mkdir(), "Is a directory"),
        (os.mkfifo, "it is no regular file"),
    ],
)
def test_what_is_no_file_is_named_and_left_alone(tmp_path: Path, make: object, why: str) -> None:
    """A link is not followed: nothing appears where it points to."""
    make(tmp_path / "gpu")  # type: ignore[operator]
    with pytest.raises(LockFileError, match=f"{tmp_path}/gpu: can't be used as a lock: {why}"):
        LockFile(tmp_path / "gpu").try_take(ANN)

    assert [path.name for path in tmp_path.iterdir()] == ["gpu"]


def test_a_file_that_was_removed_is_made_again_for_both(tmp_path: Path) -> None:
    """A lock on a file without a name keeps nobody out, so the next holder has another file."""
    first, second = LockFile(tmp_path / "gpu"), LockFile(tmp_path / "gpu")
    assert first.try_take(ANN)
    (tmp_path / "gpu").unlink()

    assert second.try_take(ANN)
    assert not LockFile(tmp_path / "gpu").try_take(ANN)


def test_only_a_sticky_directory_of_everybody_holds_locks(tmp_path: Path) -> None:
    """All agents choose the same one: what this user alone may write to does not count."""
    own, loose, fit = (tmp_path / name for name in ("own", "loose", "fit"))
    for folder, mode in ((own, 0o700), (loose, 0o777), (fit, 0o1777)):
        folder.mkdir()
        folder.chmod(mode)

    assert find_folder([tmp_path / "none", own, loose, fit]) == fit
    assert find_folder([own, loose]) is None
