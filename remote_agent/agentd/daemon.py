"""Becoming a daemon: one for each state directory, detached from whoever started it, its words going to its log."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from remote_agent.agentd.paths import StateDir

LOG_LIMIT_BYTES = 4 << 20


def take_lock(state: StateDir) -> int | None:
    """Return the descriptor that makes this the only agent of ``state``, or None if there is one."""
    while True:
        descriptor = os.open(state.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        found = os.fstat(descriptor)
        if identity(state.lock) == (found.st_dev, found.st_ino):
            return descriptor
        os.close(descriptor)  # removed meanwhile: a lock without a name keeps nobody out


def write_pid(lock: int) -> None:
    """Write down in the lock file who holds it. Called by the process that stays."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d\n" % os.getpid(), 0)


def is_held(state: StateDir) -> bool:
    """Return whether some agent holds the lock."""
    try:
        descriptor = os.open(state.lock, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def holder(state: StateDir) -> int | None:
    """Return the pid of the agent that holds the lock; None where there is none or it can't be proved.

    Proved is: the lock file names it, it runs under this user id, and it has that very file open.
    """
    try:
        pid = int(state.lock.read_bytes()[:20])
        process = Path(f"/proc/{pid}")
        if pid == os.getpid() or process.stat().st_uid != os.geteuid():
            return None
        lock, files = state.lock.stat(), [identity(file, follow=True) for file in (process / "fd").iterdir()]
    except (OSError, ValueError):
        return None
    return pid if (lock.st_dev, lock.st_ino) in files else None


def identity(path: Path, follow: bool = False) -> tuple[int, int] | None:
    """Return device and inode of what is at ``path``, None where nothing is. Raises: OSError if that can't be told."""
    try:
        found = path.stat() if follow else path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def open_log(state: StateDir) -> int:
    """Return the log, open for appending; a long one is put aside first."""
    try:
        if state.log.stat().st_size > LOG_LIMIT_BYTES:
            state.log.replace(state.log.with_suffix(".log.1"))
    except FileNotFoundError:
        pass
    return os.open(state.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def detach() -> int | None:
    """Fork twice into a session of its own.

    Returns a descriptor in the daemon: writing to it says that it is ready. In
    the process that called it never returns: it exits 0 when the daemon is
    ready, 1 when that ends before.
    """
    reading, writing = os.pipe()
    if os.fork() > 0:
        os.close(writing)
        os._exit(0 if os.read(reading, 1) else 1)
    os.close(reading)
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    return writing


def redirect(log: int) -> None:
    """Point stdin at nothing, stdout and stderr at the log."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
