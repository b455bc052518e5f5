"""What stores that give one process at a time the right to act have in common: a connection, leases on wall time."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from db.database import connect, explained, identity, refuse_replaced

LEASE_S = 10.0
NS_PER_S = 1_000_000_000


class LeaseStore:
    """Writes to a history that `db.database.open_history` has opened. May be used from any thread, one call at a time.

    ``holder`` names this process and nobody else. ``clock_ns`` is wall time.

    Raises: HistoryError if the history can't be opened for writing, and by every method where it can't be written.
    """

    def __init__(
        self, path: Path, holder: str, lease_s: float = LEASE_S, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.holder = holder
        self.lease_s = lease_s
        self._path = Path(os.path.realpath(path))
        self._clock_ns = clock_ns
        self._connection = connect(self._path, read_only=False)
        self._identity = identity(self._path)
        self._connection.row_factory = sqlite3.Row
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _until(self, now_ns: int) -> int:
        return now_ns + round(self.lease_s * NS_PER_S)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[tuple[sqlite3.Connection, int]]:
        with self._lock, explained(self._path):
            connection = self._connection
            refuse_replaced(self._path, self._identity)
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection, self._clock_ns()
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
