"""A lock between processes that the system releases when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from db.errors import UnavailableError


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float = 60.0) -> Iterator[None]:
    """Hold the lock file ``path`` alone; wait for it up to ``timeout_s``.

    Raises: UnavailableError if it can't be had.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnavailableError(f"{path} can't be created: {error.strerror}") from error
    try:
        _wait_for(descriptor, path, timeout_s)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, path: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"another process has held {path} for {timeout_s:.0f} s") from None
            time.sleep(0.02)
