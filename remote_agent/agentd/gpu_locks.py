"""One run at a time loads onto a GPU, of all agents and users of a host: else two would count on the same free memory.

Where the lock's file can't be used the run goes on without it and a finding says so: it may be another user's doing.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from remote_agent.agentd import hostfacts
from remote_agent.agentd.capacity import CPU
from remote_agent.agentd.events import EventLog
from remote_agent.agentd.lock_file import LockFile, find_folder
from remote_agent.errors import LockFileError
from remote_agent.protocol.messages import Finding

POLL_S = 0.05
FOLDERS = (Path("/run/lock"), Path("/tmp"))
"""Known to every user alike, whatever TMPDIR says to one of them."""


class GpuLocks:
    """The locks that this agent's runs have."""

    def __init__(self, events: EventLog, folders: Iterable[Path] = FOLDERS) -> None:
        self._events, self._folders = events, tuple(folders)
        self._taken: dict[str, list[LockFile]] = {}

    async def take(self, who: str, devices: Sequence[str], run_uid: str | None = None) -> int:
        """Wait until a run, or ``who`` else, has the locks of all its GPUs; nothing where it has them.

        ``run_uid``: whose events say what is waited for, where that is not ``who``.

        Returns the time, on CLOCK_MONOTONIC, after which the memory of every one of them has not changed by a load.
        """
        if who in self._taken:
            return 0
        taken, run_uid = self._taken.setdefault(who, []), run_uid or who
        gpus = sorted(set(devices) - {CPU})  # one order for all, so that none waits in a circle
        folder = find_folder(self._folders) if gpus else None
        if gpus and folder is None:
            where = " nor ".join(map(str, self._folders))
            self._warn(f"neither {where} is a sticky directory that every user may write to", run_uid)
            return time.monotonic_ns()
        used_mono_ns = 0
        for gpu in gpus:
            assert folder is not None
            lock = LockFile(folder / f"glowplug-{re.sub('[^0-9A-Za-z-]', '_', gpu)[:80]}.lock")
            try:
                await self._wait_for(lock, run_uid, gpu)
            except LockFileError as error:
                self._warn(str(error), run_uid)
                used_mono_ns = time.monotonic_ns()
                continue
            taken.append(lock)
            used_mono_ns = max(used_mono_ns, lock.used_mono_ns)
        return used_mono_ns

    def release(self, who: str, has_loaded: bool) -> None:
        """Give back what was taken, if anything was; ``has_loaded``: what is free on its GPUs is different now."""
        for lock in self._taken.pop(who, ()):
            lock.release(has_loaded)

    async def _wait_for(self, lock: LockFile, run_uid: str, gpu: str) -> None:
        me: dict[str, str | int] = {"user": hostfacts.user_name(), "pid": os.getpid(), "run": run_uid}
        told = ""
        while not lock.try_take(me):
            holder = lock.holder()
            if holder != told:
                self._events.emit(Finding("waiting", "info", f"waits for {holder}, which loads onto {gpu}"), run_uid)
                told = holder
            await asyncio.sleep(POLL_S)

    def _warn(self, problem: str, run_uid: str) -> None:
        text = f"{problem}: loads of other users' agents onto the same GPU are not waited for"
        self._events.emit(Finding("gpu_lock_unusable", "warning", text), run_uid)
