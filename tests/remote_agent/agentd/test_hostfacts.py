"""What /proc and the control groups say about this host's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote_agent.agentd import hostfacts

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    600 kB\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a host with 600 kB of room, in which a process is in group /a/b."""
    monkeypatch.setattr(hostfacts, "PROC", tmp_path / "proc")
    monkeypatch.setattr(hostfacts, "CGROUPS", tmp_path / "groups")
    write(tmp_path / "proc/meminfo", MEMINFO)
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(host: Path, name: str, limit: str, used: int, cached: int = 0) -> None:
    folder = host / "groups" / name
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 5\nactive_file {cached // 2}\ninactive_file {cached - cached // 2}\n")


def test_room_is_the_hosts_where_no_group_has_less(host: Path) -> None:
    """A group without a limit, and one that has more, change nothing."""
    group(host, "a/b", "max", 10_000_000)
    group(host, "a", str(10_000_000), 1000)

    assert hostfacts.memory_room_bytes() == 600 << 10


def test_room_is_that_of_the_group_with_the_least(host: Path) -> None:
    """Its own or one around it; what its page cache takes can be had back."""
    group(host, "a/b", str(500_000), 100_000)
    group(host, "a", str(400_000), 350_000, cached=30_000)

    assert hostfacts.memory_room_bytes() == 80_000


def test_a_group_over_its_limit_has_no_room(host: Path) -> None:
    """Never less than none."""
    group(host, "a/b", "1000", 5000)

    assert hostfacts.memory_room_bytes() == 0


def test_groups_of_the_first_version_count_too(host: Path) -> None:
    """As older hosts and containers have them."""
    write(host / "proc/self/cgroup", "4:memory:/c\n0::/\n")
    write(host / "groups/memory/c/memory.limit_in_bytes", "300000\n")
    write(host / "groups/memory/c/memory.usage_in_bytes", "100000\n")

    assert hostfacts.memory_room_bytes() == 200_000
