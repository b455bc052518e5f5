"""One thread that stores what the links bring, in batches, and says what is durable.

Nothing is acknowledged before its commit, nothing submitted is lost while the process lives: a batch
that can't be written (full disk, a locked file) is rolled back, kept and tried again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from db.database import connect, explain, identity, refuse_replaced
from db.errors import HistoryError, WriterFullError
from db.records import Record, SampleRow
from db.store import Row, is_storable, store_batch

log = logging.getLogger(__name__)

BATCH_ROWS = 200
BATCH_WAIT_S = 0.1
FULL_ROWS = 10_000
FULL_BYTES = 64 << 20
HARD_LIMIT = 4
"""Beyond this many times the full mark `Writer.submit` refuses."""

FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 5.0

OnDurable = Callable[[str, int], None]
OnProblem = Callable[[str | None], None]


class Writer:
    """Writes to a history that `db.database.open_history` has opened.

    ``on_durable(journal_uuid, contiguous_seq)`` is called after each commit for each journal that was
    in the batch, with the highest seq up to which the history has everything, repetitions included.
    ``on_problem(text)`` is called when a batch can't be written, and with None when it is over.
    Both are called from the writer's thread and must not block. Neither may be called after `close`.

    Back-pressure: `submit` never blocks. While `full` is True a caller should stop reading its links;
    samples are then dropped. Only far beyond that mark are records refused.

    Raises: HistoryError if the history can't be opened for writing.
    """

    def __init__(self, path: Path, *, on_durable: OnDurable | None = None, on_problem: OnProblem | None = None) -> None:
        self.on_durable = on_durable
        self.on_problem = on_problem
        self.problem: str | None = None
        self._path = Path(os.path.realpath(path))
        self._connection = connect(self._path, read_only=False)
        self._identity = identity(self._path)
        self._changed = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._waiting_bytes = 0
        self._submitted = self._stored = 0
        self._flushes = 0
        self._closing = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="history-writer", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether so much waits that links should not be read further."""
        return len(self._waiting) >= FULL_ROWS or self._waiting_bytes >= FULL_BYTES

    @property
    def pending(self) -> int:
        """How many rows have been submitted and are not committed."""
        return self._submitted - self._stored

    def submit(self, row: Row) -> None:
        """Hand over a record, sample or gap to be stored in the order given. Never blocks.

        A seq outside 1..2^63-1 can't be stored and is left out.
        Raises: WriterFullError far beyond the full mark; HistoryError after `close`.
        """
        if not is_storable(row):
            log.warning("left out a row whose seq can't be stored", extra={"row": repr(row)[:200]})
            return
        with self._changed:
            if self._closing:
                raise HistoryError("the history's writer is closed")
            if self.full and isinstance(row, SampleRow):
                return
            if len(self._waiting) >= HARD_LIMIT * FULL_ROWS or self._waiting_bytes >= HARD_LIMIT * FULL_BYTES:
                raise WriterFullError(f"{len(self._waiting)} rows wait to be written to {self._path}")
            self._waiting.append(row)
            self._waiting_bytes += _size_bytes(row)
            self._submitted += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything submitted before this call is durable; False if it is not in time."""
        with self._changed:
            target = self._submitted
            self._flushes += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stored >= target or not self._thread.is_alive(), timeout_s)
            self._flushes -= 1
            return self._stored >= target

    def close(self, timeout_s: float = 5.0) -> bool:
        """Store what is left, end the thread and close the file; False if something could not be stored in time.

        What was not stored was not acknowledged either: the hosts send it again.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        complete = self.flush(timeout_s)
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        self._thread.join()
        return complete

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        batch: list[Row] = []
        try:
            while batch := batch or self._take():
                try:
                    cursors = self._commit(batch)
                except Exception as error:  # whatever it is, the batch is kept and the thread lives
                    self._report(error, is_first=retry_s == FIRST_RETRY_S)
                    if not self._wait_to_retry(retry_s):
                        return
                    retry_s = min(retry_s * 2, LONGEST_RETRY_S)
                    continue
                retry_s = FIRST_RETRY_S
                self._clear_problem()
                self._finish(batch, cursors)
                batch = []
        finally:
            self._connection.close()
            with self._changed:
                self._changed.notify_all()

    def _take(self) -> list[Row]:
        """Return the next batch, full or 100 ms after its first row; empty once closed with nothing left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if self._abandoned or not self._waiting:
                return []
            deadline_s = time.monotonic() + BATCH_WAIT_S
            while len(self._waiting) < BATCH_ROWS and not self._closing and not self._flushes:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            batch = [self._waiting.popleft() for _ in range(min(BATCH_ROWS, len(self._waiting)))]
            self._waiting_bytes -= sum(_size_bytes(row) for row in batch)
            return batch

    def _commit(self, batch: list[Row]) -> dict[str, int]:
        refuse_replaced(self._path, self._identity)
        return store_batch(self._connection, batch)

    def _finish(self, batch: list[Row], cursors: dict[str, int]) -> None:
        for journal_uuid, contiguous_seq in cursors.items():
            self._tell(self.on_durable, journal_uuid, contiguous_seq)
        with self._changed:
            self._stored += len(batch)
            self._changed.notify_all()

    def _report(self, error: Exception, is_first: bool) -> None:
        """Say what is wrong once; another process's lock only when it lasts."""
        if is_first and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            return
        problem = explain(error, self._path) if isinstance(error, sqlite3.Error) else error
        text = f"{problem}; nothing is lost, writing is tried again"
        if text != self.problem:
            log.warning("%s", text, exc_info=None if isinstance(error, (sqlite3.Error, HistoryError)) else error)
            self.problem = text
            self._tell(self.on_problem, text)

    def _clear_problem(self) -> None:
        if self.problem is not None:
            log.info("the history is written again")
            self.problem = None
            self._tell(self.on_problem, None)

    def _wait_to_retry(self, delay_s: float) -> bool:
        """Wait, no longer than `close` does; False once it has given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned, delay_s)
            return not self._abandoned

    def _tell(self, callback: Callable[..., None] | None, *arguments: object) -> None:
        if callback is not None:
            try:
                callback(*arguments)
            except Exception:
                log.exception("a listener of the history's writer failed")


def _size_bytes(row: Row) -> int:
    if isinstance(row, Record):
        return len(row.event.data_json)
    return len(row.data_json) if isinstance(row, SampleRow) else 0
