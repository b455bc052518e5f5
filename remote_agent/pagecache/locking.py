"""Says how much memory may be taken from the kernel's reach here, and keeps shards locked in the page cache."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

from remote_agent.agentd import hostfacts
from remote_agent.errors import AgentError
from remote_agent.loader.cleanup import finally_do, on_failure
from remote_agent.loader.filemap import PAGE_BYTES, FileMap
from remote_agent.loader.files import describe
from remote_agent.loader.headers import Header
from remote_agent.loader.plan import round_up
from remote_agent.loader.problems import gigabytes, shown
from remote_agent.loader.progress import Announce
from remote_agent.loader.shards import OpenShards

LOCKED_SHARE = 0.8
"""The most of a host's or a control group's memory that may be beyond reclaim: what is left is for all the rest."""

STEP_BYTES = 64 << 20
CAP_IPC_LOCK = 14
STATUS = Path("/proc/self/status")


class LockRefused(AgentError):
    """Pages can't be locked; the text has the numbers."""


def pages_of(headers: Sequence[Header]) -> int:
    """Return how many bytes the whole pages of files take."""
    return sum(round_up(header.size_bytes, PAGE_BYTES) for header in headers)


def find_room_problem(needed_bytes: int, registered_bytes: int) -> str | None:
    """Return why that much memory may not be put beyond reclaim on this host, with the numbers, or None.

    ``registered_bytes`` are beyond it already, and the kernel does not count them among what is locked.
    """
    total_bytes, locked_bytes = hostfacts.memory_bytes()[0], hostfacts.unevictable_bytes() + registered_bytes
    most_bytes = int(total_bytes * LOCKED_SHARE)
    if total_bytes and locked_bytes + needed_bytes > most_bytes:
        already = f", {gigabytes(locked_bytes)} are locked already" if locked_bytes else ""
        return (
            f"{gigabytes(needed_bytes)} would be locked{already}: at most {gigabytes(most_bytes)} may be, "
            f"{LOCKED_SHARE:.0%} of this host's {gigabytes(total_bytes)}"
        )
    limit_bytes = hostfacts.memory_limit_bytes()
    if limit_bytes is not None and needed_bytes > limit_bytes * LOCKED_SHARE:
        return (
            f"{gigabytes(needed_bytes)} would be locked: at most {gigabytes(int(limit_bytes * LOCKED_SHARE))} may be, "
            f"{LOCKED_SHARE:.0%} of the {gigabytes(limit_bytes)} that this control group is limited to"
        )
    return None


def find_limit_problem(needed_bytes: int) -> str | None:
    """Return why this process may not lock that much, with the numbers, or None; raises its own limit where it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if hard == resource.RLIM_INFINITY or needed_bytes <= hard or _has_capability():
        return None
    return (
        f"{gigabytes(needed_bytes)} would be locked: RLIMIT_MEMLOCK lets this process lock {gigabytes(hard)} and it "
        "has no CAP_IPC_LOCK; raise the one (LimitMEMLOCK= of the unit, ulimit -l) or give it the other"
    )


class LockedShards:
    """Whole files, mapped read-only and locked; nothing here touches a page. Closed, they are the kernel's again."""

    def __init__(self, headers: Sequence[Header], shards: OpenShards) -> None:
        self._headers, self._shards = headers, shards
        self._maps: list[FileMap] = []
        self.identities = tuple(header.identity for header in headers)
        self.locked_bytes = 0

    def lock(self, registered_bytes: int, progress: Callable[[int, int], None], announce: Announce) -> None:
        """Lock every page of every shard, or none. Raises: LockRefused, LoadError (``changed``) naming the file"""
        needed = pages_of(self._headers)
        problem = find_room_problem(needed, registered_bytes) or find_limit_problem(needed)
        if problem is not None:
            raise LockRefused(problem)
        with on_failure(self.unlock):
            for shard, header in enumerate(self._headers):
                announce(header.path)
                for offset in range(0, header.size_bytes, STEP_BYTES):
                    length = min(STEP_BYTES, header.size_bytes - offset)
                    self._lock(shard, offset, length)
                    self.locked_bytes += round_up(length, PAGE_BYTES)
                    progress(self.locked_bytes, needed)
            self._shards.check_unchanged()

    def check_unchanged(self) -> None:
        """Compare the files with what was locked. Raises: LoadError (``changed``) naming the first that differs"""
        self._shards.check_unchanged()

    def unlock(self) -> None:
        """Unmap everything, even when a call fails. Safe to call again."""
        maps, self._maps = self._maps, []
        self.locked_bytes = 0
        with finally_do(*(content.close for content in maps)):
            pass

    def close(self) -> None:
        """Let go of pages and files."""
        with finally_do(self.unlock, self._shards.close):
            pass

    def _lock(self, shard: int, offset: int, length: int) -> None:
        header = self._headers[shard]
        try:
            if shard == len(self._maps):
                self._maps.append(FileMap(self._shards.descriptors[shard], header.size_bytes))
            self._maps[shard].lock(offset, length)
        except OSError as error:
            self._shards.check(shard)  # where the file changed, that is the reason
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            text = f"{shown(header.path.name)}: pages can't be locked: {describe(error)}"
            limited = "" if limit == resource.RLIM_INFINITY else f"; RLIMIT_MEMLOCK is {gigabytes(limit)}"
            raise LockRefused(f"{text} after {gigabytes(self.locked_bytes)}{limited}") from error


def _has_capability() -> bool:
    """Whether this process has CAP_IPC_LOCK, as far as it is told; in a user namespace it may be worth nothing."""
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return os.geteuid() == 0
    effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(effective >> CAP_IPC_LOCK & 1)
