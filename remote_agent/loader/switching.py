"""Has the interpreter go from thread to thread more quickly while a load moves bytes.

A thread that comes back from a read waits for the interpreter; one that runs Python gives it up 5 ms later by default,
in which a GPU takes hundreds of megabytes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator


class _Switching:
    """The process has one interval: the first load in sets it, the last one out puts back what it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before_s = 0.0

    @contextlib.contextmanager
    def quickly(self, interval_s: float | None) -> Iterator[None]:
        """Switch after ``interval_s`` until every such block is left; None changes nothing."""
        if interval_s is None:
            yield
            return
        with self._lock:
            if not self._users:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(interval_s)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    sys.setswitchinterval(self._before_s)


quickly = _Switching().quickly
