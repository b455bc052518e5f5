"""Becoming a daemon: one for each state directory, detached from whoever started it, its words going to its log."""

from __future__ import annotations

import fcntl
import os
import sys

from remote_agent.agentd.paths import StateDir

LOG_LIMIT_BYTES = 4 << 20


def take_lock(state: StateDir) -> int | None:
    """Return the descriptor that makes this the only agent of ``state``, or None if there is one."""
    descriptor = os.open(state.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


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
