"""Tells a caller how far a load is, from one thread, while others do the work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

INTERVAL_S = 0.05

Progress = Callable[[int, int], None]

Announce = Callable[[Path], None]
"""Called from any thread before the first page of a shard is mapped."""


class Tally:
    """Bytes done so far; threads add, one thread watches."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._done = 0
        self._changed = threading.Condition()
        self.stop = threading.Event()
        self.error: BaseException | None = None

    @property
    def done(self) -> int:
        return self._done

    def add(self, count: int) -> None:
        with self._changed:
            self._done += count

    def fail(self, error: BaseException) -> None:
        """Keep the first failure and ask every thread to stop."""
        with self._changed:
            self.error = self.error or error
        self.stop.set()

    def watch(self, threads: Sequence[threading.Thread], progress: Progress) -> None:
        """Report now, every so often, and at the end; return once every thread has ended.

        A ``progress`` that raises stops the threads. Raises: the first failure, once they have ended.
        """
        self._report(progress)
        for thread in threads:
            while thread.is_alive():
                thread.join(INTERVAL_S)
                self._report(progress)
        self._report(progress)
        if self.error is not None:
            raise self.error

    def _report(self, progress: Progress) -> None:
        if self.stop.is_set():
            return
        try:
            progress(self._done, self.total)
        except BaseException as error:
            self.fail(error)
