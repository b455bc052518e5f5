"""How much memory may be put beyond the kernel's reach: of the host, of a control group, of a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remote_agent.agentd import hostfacts
from remote_agent.errors import LoadError
from remote_agent.loader import filemap
from remote_agent.loader.checkpoint import inspect
from remote_agent.loader.filemap import FileMap
from remote_agent.loader.shards import OpenShards
from remote_agent.pagecache.locking import LockedShards, LockRefused, find_room_problem
from tests.remote_agent.loader.gpu_loads import traces_of
from tests.remote_agent.pagecache.cachers import write_checkpoint

GB = 10**9


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a host with 100 GB in /proc, and control groups beside it that limit nothing."""
    monkeypatch.setattr(hostfacts, "PROC", tmp_path / "proc")
    monkeypatch.setattr(hostfacts, "CGROUPS", tmp_path / "cgroup")
    tell(tmp_path / "proc/meminfo", f"MemTotal: {100 * GB // 1024} kB\nUnevictable: 0 kB\n")
    tell(tmp_path / "proc/self/cgroup", "0::/system/agent\n")
    tell(tmp_path / "cgroup/memory.max", "max\n")
    return tmp_path


def tell(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_most_of_a_host_s_memory_may_be_locked_and_no_more(host: Path) -> None:
    """The refusal has what is needed, what is allowed, and of how much."""
    assert find_room_problem(79 * GB, 0) is None
    assert find_room_problem(81 * GB, 0) == (
        "81.00 GB would be locked: at most 80.00 GB may be, 80% of this host's 100.00 GB"
    )


def test_what_is_locked_already_counts(host: Path) -> None:
    """Two models that fit alone need not fit together, whether locked or registered with a GPU."""
    tell(host / "proc/meminfo", f"MemTotal: {100 * GB // 1024} kB\nUnevictable: {20 * GB // 1024} kB\n")

    problem = find_room_problem(60 * GB, registered_bytes=10 * GB)

    assert problem is not None
    assert problem.startswith("60.00 GB would be locked, 30.00 GB are locked already: at most 80.00 GB may be")


@pytest.mark.parametrize("group", ["cgroup/system/agent", "cgroup/system"])
def test_the_least_limit_of_the_control_groups_counts(host: Path, group: str) -> None:
    """A container's limit is its host's memory, wherever above the process it is set."""
    tell(host / group / "memory.max", f"{10 * GB}\n")

    assert find_room_problem(7 * GB, 0) is None
    assert "80% of the 10.00 GB that this control group is limited to" in (find_room_problem(9 * GB, 0) or "")


def test_an_older_control_group_is_asked_too(host: Path) -> None:
    """Its limit has another name, and a number above the host's memory means that there is none."""
    tell(host / "proc/self/cgroup", "4:memory:/pod\n")
    tell(host / "cgroup/memory/pod/memory.limit_in_bytes", f"{10 * GB}\n")
    tell(host / "cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")

    assert hostfacts.memory_limit_bytes() == 10 * GB


def test_a_refused_lock_leaves_nothing_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file's refusal lets go of the first one's pages, and names file and number."""
    checkpoint = inspect(write_checkpoint(tmp_path / "model"))
    done: list[int] = []

    def lock(content: FileMap, offset: int, length: int) -> None:
        done.append(length)
        if len(done) == 2:
            raise OSError(12, os.strerror(12))

    monkeypatch.setattr(filemap.FileMap, "lock", lock)
    locked = LockedShards(checkpoint.shards, OpenShards(checkpoint.shards))

    with pytest.raises(LockRefused, match=r"b\.safetensors: pages can't be locked: .*errno 12.* after 4096 bytes"):
        locked.lock(0, lambda done, total: None, lambda path: None)
    locked.close()

    assert locked.locked_bytes == 0
    assert traces_of(checkpoint) == []


def test_a_file_cut_while_it_is_locked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's error for a page that is gone is not taken for a limit."""
    checkpoint = inspect(write_checkpoint(tmp_path / "model", 20_000))
    locked = LockedShards(checkpoint.shards, OpenShards(checkpoint.shards))

    def cut(path: Path) -> None:
        os.truncate(path, 8192)

    with pytest.raises(LoadError, match=r"a\.safetensors: changed since it was checked: size 8\d+ is now 8192"):
        locked.lock(0, lambda done, total: None, cut)
    locked.close()

    assert traces_of(checkpoint) == []
