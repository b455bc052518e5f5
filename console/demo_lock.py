"""Which directories of embedded fleets are in use, and what becomes of those that nobody uses any more. Linux only.

The lock is held by the console and, as an inherited descriptor, by its server: while either lives
somebody will end the nodes. Killed together they leave everything, which the next demo ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from console.demo_teardown import end_nodes

LOCK_NAME = "glowplug-demo.lock"
TEMPORARY_PREFIX = "glowplug-demo-"


def claim(directory: Path, mark: str) -> IO[str]:
    """Return the locked file that holds ``mark``; nodes that an earlier demo left there have been ended.

    Raises: BlockingIOError while another demo, or what ends it, is alive; OSError.
    """
    lock = (directory / LOCK_NAME).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.seek(0)
        earlier = lock.read()
        if earlier:
            end_nodes(sorted(directory.glob("nodes/*/state")), earlier)
        lock.truncate(0)
        lock.write(mark)
        lock.flush()
    except BaseException:
        lock.close()
        raise
    return lock


def sweep_temporary(parent: Path | None = None) -> None:
    """End and remove this user's temporary demos of which neither console nor server is alive."""
    for directory in Path(parent or tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            # One without a mark is just being made.
            if status.st_uid == os.geteuid() and not directory.is_symlink() and (directory / LOCK_NAME).read_text():
                with claim(directory, ""):
                    shutil.rmtree(directory, ignore_errors=True)
