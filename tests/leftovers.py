"""Finds processes that tests started and did not end: by a mark in their environment, or the tests' folder in argv."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "GLOWPLUG_TEST_SESSION"


@dataclass(frozen=True)
class Leftover:
    """A process that should be gone."""

    pid: int
    command: str


def find_leftovers(session: str, folder: Path | None, grace_s: float) -> list[Leftover]:
    """Return what is still there of that session after giving it ``grace_s`` to end by itself. Linux only."""
    deadline_s = time.monotonic() + grace_s
    while (left := _scan(session, folder)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def end(leftovers: list[Leftover]) -> None:
    """Kill them, so that one forgotten process spoils no later session."""
    for leftover in leftovers:
        try:
            os.kill(leftover.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _scan(session: str, folder: Path | None) -> list[Leftover]:
    mark = f"{MARK}={session}".encode()
    where = os.fsencode(folder) + b"/" if folder else None
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
        except OSError:  # gone meanwhile, or not ours to look at
            continue
        if command and (mark in environment.split(b"\0") or (where and where in command)):
            found.append(Leftover(int(entry.name), command.replace(b"\0", b" ").decode("utf-8", "replace").strip()))
    return found
