"""Processes of this user that are no children of whoever asks, named so that a reused pid is never taken for one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
POLL_S = 0.02

MARK = "GLOWPLUG_AGENT_STATE"
"""In the environment of everything that an agent starts: its state directory."""


@dataclass(frozen=True)
class Process:
    """A process, told from a later one of the same pid by when it started."""

    pid: int
    started_ticks: int

    @property
    def is_running(self) -> bool:
        """Whether it is still there and no zombie."""
        found = _look(self.pid)
        return found is not None and found[0] == self and found[2] != "Z"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing where the process has ended."""
        if self.is_running:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass


def find(pid: int) -> Process | None:
    """Return the process of that pid."""
    found = _look(pid)
    return found[0] if found else None


def descendants(pid: int) -> list[Process]:
    """Return the children of a process and theirs in turn."""
    children: dict[int, list[Process]] = {}
    for folder in PROC.iterdir():
        found = _look(int(folder.name)) if folder.name.isdigit() else None
        if found is not None:
            children.setdefault(found[1], []).append(found[0])
    known, waiting = list[Process](), [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        known += below
        waiting += [process.pid for process in below]
    return known


def left_behind(root: Path) -> list[Process]:
    """Return what earlier agents of this state directory and user started, but the keeper."""
    mark, found = os.fsencode(f"{MARK}={root}"), []
    for folder in PROC.iterdir():
        try:
            if not folder.name.isdigit() or folder.stat().st_uid != os.geteuid():
                continue
            is_child = mark in (folder / "environ").read_bytes().split(b"\0")
            if is_child and b"keeper" not in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(find(int(folder.name)))
        except OSError:
            continue
    return [process for process in found if process is not None and process.pid not in (os.getpid(), os.getppid())]


def end(processes: Iterable[Process], term_s: float, kill_s: float) -> list[Process]:
    """Wait for processes that should end by themselves, then kill them. Returns those that SIGKILL did not end."""
    left = list(processes)

    def are_gone() -> bool:
        return not any(process.is_running for process in left)

    if not within(term_s, are_gone):
        for process in left:
            process.signal(signal.SIGKILL)
        within(kill_s, are_gone)
    return [process for process in left if process.is_running]


def within(limit_s: float, look: Callable[[], bool]) -> bool:
    """Return whether ``look`` became true within the time."""
    give_up = time.monotonic() + limit_s
    while not look():
        if time.monotonic() > give_up:
            return False
        time.sleep(POLL_S)
    return True


def _look(pid: int) -> tuple[Process, int, str] | None:
    """Return a process, its parent's pid and its state's letter."""
    try:
        words = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return Process(pid, int(words[19])), int(words[1]), words[0]
