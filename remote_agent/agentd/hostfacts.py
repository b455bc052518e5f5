"""What /proc says about this host and its processes. Every figure that can't be read is ``None`` or said so."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def boot_id() -> str:
    """Return an id that changes with every boot."""
    return _read(PROC / "sys/kernel/random/boot_id") or "unknown"


def boot_wall_ns() -> int:
    """Return when this host was booted, to the second; 0 where that is not told."""
    for line in _read(PROC / "stat").splitlines():
        name, _, rest = line.partition(" ")
        if name == "btime" and rest.strip().isdigit():
            return int(rest) * 10**9
    return 0


def machine_id() -> str:
    """Return an id that differs between machines, or an empty text where the system has none."""
    return _read(Path("/etc/machine-id"))


def hostname() -> str:
    return os.uname().nodename or "unknown"


def user_name() -> str:
    """Return the login name, or the user id where there is no passwd entry."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def memory_bytes() -> tuple[int, int]:
    """Return the host's memory, total and available."""
    kilobytes = {}
    for line in _read(PROC / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable") and rest.split():
            kilobytes[name] = int(rest.split()[0])
    return kilobytes.get("MemTotal", 0) << 10, kilobytes.get("MemAvailable", 0) << 10


def memory_room_bytes() -> int:
    """Return how much memory a process here could still take: the host's, or its control group's where that is less.

    What a group's page cache takes counts as room: the kernel gives it back first.
    """
    rooms = [memory_bytes()[1]]
    for limit_file, used_file in _memory_groups():
        limit, used = _read(limit_file), _read(used_file)
        if limit.isdigit() and used.isdigit():
            stat = _read(limit_file.with_name("memory.stat"))
            cached = _counter(stat, "active_file") + _counter(stat, "inactive_file")
            rooms.append(max(0, int(limit) - int(used) + cached))
    return min(rooms)


def unevictable_bytes() -> int:
    """Return what of the host's memory is locked already, as far as the kernel counts it."""
    for line in _read(PROC / "meminfo").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "Unevictable:":
            return int(words[1]) << 10
    return 0


def memory_limit_bytes() -> int | None:
    """Return the least that a control group of this process may use; None where there is no limit."""
    limits = [int(text) for text in (_read(limit_file) for limit_file, _ in _memory_groups()) if text.isdigit()]
    total_bytes = memory_bytes()[0]
    return min((limit for limit in limits if limit < total_bytes), default=None)  # more is no limit


def load_1m() -> float:
    words = _read(PROC / "loadavg").split()
    return float(words[0]) if words else 0.0


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory, here or in this control group."""
    counts = [_counter(_read(PROC / "vmstat"), "oom_kill")]
    for line in _read(PROC / "self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            counts.append(_counter(_read(CGROUPS / path.lstrip("/") / "memory.events"), "oom_kill"))
        elif "memory" in controllers.split(","):
            folder = CGROUPS / "memory" / path.lstrip("/")
            counts.append(_counter(_read(folder / "memory.oom_control"), "oom_kill"))
    return sum(counts)


def process_state(pid: int) -> str:
    """Return in words what a process is doing: its state, and where it waits in the kernel."""
    state = next(
        (line[6:].strip() for line in _read(PROC / str(pid) / "status").splitlines() if line[:6] == "State:"), ""
    )
    if not state:
        return "its state can't be read"
    channel = _read(PROC / str(pid) / "wchan")
    return f"state {state}" + (f", waiting in {channel}" if channel not in ("", "0") else "")


def process_name(pid: int) -> str | None:
    return _read(PROC / str(pid) / "comm") or None


def _memory_groups() -> Iterator[tuple[Path, Path]]:
    """Yield the files with limit and use of this process's control group and of those around it that can be seen."""
    for line in _read(PROC / "self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        inner = PurePosixPath(path.lstrip("/"))
        for part in (inner, *inner.parents):
            if number == "0":
                yield CGROUPS / part / "memory.max", CGROUPS / part / "memory.current"
            elif "memory" in controllers.split(","):
                folder = CGROUPS / "memory" / part
                yield folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"


def _counter(text: str, name: str) -> int:
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
