"""The durable log of events. What `commit` returns is on disk; nothing else may be shown to anyone.

A journal that can't be trusted (damaged, behind what was acknowledged, from
another machine) is moved aside and a new one begins under a new uuid, so that
a pair of uuid and seq never names two different events.
"""

from __future__ import annotations

import os
import shutil
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from remote_agent.agentd import segments
from remote_agent.agentd.files import read_json, sync_directory, write_whole
from remote_agent.errors import JournalError
from remote_agent.protocol.messages import Event

DROPPABLE = ("run.stage", "finding")
"""Kinds that may go when the disk is full and memory too: ``run.finished`` repeats every stage."""

RECENT_EVENTS = 256


@dataclass(frozen=True)
class JournalLimits:
    """``cap_bytes`` holds for all segments together; ``pending_events`` for what waits for a full disk."""

    segment_bytes: int = 1 << 20
    cap_bytes: int = 64 << 20
    pending_events: int = 10_000


class Journal:
    """Appends in memory, commits in groups, reads back by seq. Used by one thread of one process."""

    def __init__(
        self,
        directory: Path,
        machine_id: str,
        limits: JournalLimits | None = None,
        write: Callable[[int, bytes, int], int] = os.pwrite,
        sync: Callable[[int], None] = os.fdatasync,
    ) -> None:
        self.limits = limits or JournalLimits()
        self.failure: OSError | None = None
        self.lost_reason: str | None = None
        self.directory, self._machine_id = directory, machine_id
        self._write, self._sync = write, sync
        self._pending: list[Event] = []
        self._recent: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self.journal_uuid, self.newest_seq = "", 0
        self._descriptor, self._good_bytes = -1, 0
        self._firsts: list[int] = [1]
        self._sizes: list[int] = []
        try:
            self._open()
        except JournalError as error:
            self.lost_reason = str(error)
            self._begin_anew()

    @property
    def oldest_seq(self) -> int:
        """The first seq that can still be read; one past the newest where there is none."""
        return self._firsts[0]

    @property
    def pending(self) -> int:
        """How many events wait to become durable."""
        return len(self._pending)

    def append(self, event: Event) -> None:
        """Queue ``event``; its seq is given when it becomes durable."""
        if len(self._pending) >= self.limits.pending_events:
            spare = next((i for i, waiting in enumerate(self._pending) if waiting.kind in DROPPABLE), None)
            if spare is not None:
                del self._pending[spare]
        self._pending.append(event)

    def withdraw(self, event: Event) -> None:
        """Take back an event that could not be made durable."""
        self._pending.remove(event)

    def commit(self) -> list[Event]:
        """Make everything queued durable and return it with its seqs.

        On a failing disk nothing is lost: `failure` says why, and the next commit tries again.
        """
        if not self._pending:
            return []
        events = [replace(event, seq=self.newest_seq + 1 + index) for index, event in enumerate(self._pending)]
        data = b"".join(segments.encode_line(event) for event in events)
        try:
            self._write_at_end(data)
        except OSError as error:
            self.failure = error
            self._cut_tail()
            return []
        self.failure = None
        self._pending.clear()
        self._good_bytes += len(data)
        self._sizes[-1] = self._good_bytes
        self.newest_seq = events[-1].seq
        self._recent.extend(events)
        if self._good_bytes >= self.limits.segment_bytes:
            self._rotate()
        return events

    def read(self, after_seq: int, limit: int) -> list[Event]:
        """Return up to ``limit`` durable events after ``after_seq``, the oldest first.

        Raises: JournalError if the disk gives something else back than was written.
        """
        start = max(after_seq, self.oldest_seq - 1)
        if start >= self.newest_seq:
            return []
        if self._recent and start + 1 >= self._recent[0].seq:
            offset = start + 1 - self._recent[0].seq
            return list(self._recent)[offset : offset + limit]
        first = self._firsts[bisect_right(self._firsts, start + 1) - 1]
        try:
            data = self._path(first).read_bytes()
        except OSError as error:
            raise JournalError(f"{self._path(first)}: {error.strerror}") from error
        events: list[Event] = []
        for line in segments.lines_after(data, start):
            events.append(segments.decode_line(line))
            if len(events) >= limit or events[-1].seq >= self.newest_seq:
                break
        return events

    def trimmable(self, acked_seq: int | None) -> bool:
        """Return whether `trim` would delete something."""
        return self._spare_segments(acked_seq) > 0

    def trim(self, acked_seq: int | None) -> None:
        """Delete whole segments that everyone has (None: nobody asks for that), and the oldest over the cap."""
        for _ in range(self._spare_segments(acked_seq)):
            self._path(self._firsts.pop(0)).unlink(missing_ok=True)
            self._sizes.pop(0)
        sync_directory(self.directory)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self, reason: str) -> None:
        """Move everything aside and begin anew: the events on disk can't be what was acknowledged."""
        self.lost_reason = reason
        self._begin_anew()

    def _spare_segments(self, acked_seq: int | None) -> int:
        total, spare = sum(self._sizes), 0
        for index in range(len(self._firsts) - 1):
            is_acked = acked_seq is not None and self._firsts[index + 1] - 1 <= acked_seq
            if not is_acked and total <= self.limits.cap_bytes:
                break
            total, spare = total - self._sizes[index], index + 1
        return spare

    def _write_at_end(self, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += self._write(self._descriptor, data[done:], self._good_bytes + done)
        self._sync(self._descriptor)

    def _cut_tail(self) -> None:
        try:
            os.ftruncate(self._descriptor, self._good_bytes)
        except OSError:
            pass  # the next commit writes over it; a start would cut it

    def _rotate(self) -> None:
        try:
            descriptor = self._create(self.newest_seq + 1)
        except OSError:
            return  # the segment grows a little longer
        os.close(self._descriptor)
        self._descriptor, self._good_bytes = descriptor, 0
        self._firsts.append(self.newest_seq + 1)
        self._sizes.append(0)

    def _create(self, first_seq: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(self._path(first_seq), flags, 0o600)
        try:
            sync_directory(self.directory)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _path(self, first_seq: int) -> Path:
        return self.directory / segments.segment_name(first_seq)

    def _open(self) -> None:
        meta = read_json(self.directory / "meta.json")
        firsts = segments.first_seqs(self.directory)
        if meta is None and not firsts:
            self._begin()
            return
        known = meta.get("journal_uuid") if meta else None
        if meta is None or not isinstance(known, str) or not firsts:
            raise JournalError("the journal is incomplete")
        if meta.get("machine_id") != self._machine_id:
            raise JournalError("the journal was written on another machine")
        self._firsts, self._sizes = firsts, []
        for index, first in enumerate(firsts):
            self._check(first, firsts[index + 1] if index + 1 < len(firsts) else None)
        self.journal_uuid = known

    def _check(self, first: int, following: int | None) -> None:
        try:
            data = self._path(first).read_bytes()
        except OSError as error:
            raise JournalError(f"{self._path(first)}: {error.strerror}") from error
        found = segments.scan(data, first)
        if found.broken or (following is not None and (found.torn or found.last_seq + 1 != following)):
            raise JournalError(f"{self._path(first).name} is damaged after event {found.last_seq}")
        self._sizes.append(found.good_bytes)
        if following is None:
            self.newest_seq, self._good_bytes = found.last_seq, found.good_bytes
            self._descriptor = os.open(self._path(first), os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._descriptor, found.good_bytes)

    def _begin(self) -> None:
        self.journal_uuid = str(uuid.uuid4())
        self.newest_seq, self._good_bytes = 0, 0
        self._firsts, self._sizes = [1], [0]
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = self._create(1)
        meta = {"journal_uuid": self.journal_uuid, "machine_id": self._machine_id}
        write_whole(self.directory / "meta.json", meta)

    def _begin_anew(self) -> None:
        self.close()
        self._recent.clear()
        aside = self.directory.with_name(f"{self.directory.name}.lost")
        shutil.rmtree(aside, ignore_errors=True)
        self.directory.rename(aside)
        self._begin()
