"""The processes that check checkpoints, on the agent's own Python: one for each run, one kept ready while none runs.

A Python and its imports take longer than most checks. The one that waits has imported and nothing more: it holds no
file and no memory of a device, does one job like any other, and ends with the agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable

from remote_agent.agentd.channel import Channel
from remote_agent.agentd.commands import Commands
from remote_agent.agentd.reaper import Child, Reaper
from remote_agent.agentd.workers import SETTLE_S, Order, SpawnError, open_stderr
from remote_agent.protocol.internal import InternalMessage, WorkerJob

log = logging.getLogger(__name__)


class _Process:
    """One process, before it has its job and after."""

    def __init__(self, child: Child, link: socket.socket) -> None:
        self.child = child
        self.on_message: Callable[[InternalMessage], None] = lambda message: None
        self.channel = Channel(link, self._heard, self._closed)
        child.exit.add_done_callback(lambda _: self._finish())

    def _heard(self, message: InternalMessage) -> None:
        """Pass on its one word; whoever waits for that need not wait for the interpreter's end."""
        self.on_message(message)
        self.channel.close()
        asyncio.get_running_loop().call_later(SETTLE_S, self.child.signal, signal.SIGKILL)

    def _closed(self, breach: str | None) -> None:
        if breach:
            self.child.signal(signal.SIGTERM)

    def _finish(self) -> None:
        self.channel.drain()
        self.channel.close()


class Preflights:
    """Starts them. ``idle_s``: how long nothing must have run before one is started to wait."""

    def __init__(self, reaper: Reaper, commands: Commands, log_descriptor: int, idle_s: float) -> None:
        self._reaper, self._commands, self._log_descriptor = reaper, commands, log_descriptor
        self._idle_s = idle_s
        self._ready: _Process | None = None
        self._due: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The process that waits for a run."""
        return self._ready.child.pid if self._ready is not None and self._ready.child.is_alive else None

    def agent_is_idle(self) -> None:
        """Have one ready soon, unless a run comes first."""
        self._stay_away()
        self._due = asyncio.get_running_loop().call_later(self._idle_s, self._make_ready)

    def start(self, order: Order, on_message: Callable[[InternalMessage], None]) -> Child:
        """Give a job to the process that waits, or to a new one; it ends after one report. Raises: SpawnError"""
        self._stay_away()
        stderr = -1
        try:
            stderr = open_stderr(order.stderr)
            process = self._take() or self._spawn(stderr)
            process.on_message = on_message
            job = WorkerJob(order.run_uid, order.recipe, order.device, time.monotonic_ns(), order.cache_directory)
            process.channel.send(job, (stderr,))
        except (OSError, ValueError) as error:
            raise SpawnError(f"preflight can't be started: {error}") from error
        finally:
            if stderr >= 0:
                os.close(stderr)
        return process.child

    def stop(self) -> None:
        """End the one that waits."""
        self._stay_away()
        process = self._take()
        if process is not None:
            process.child.signal(signal.SIGTERM)

    def _stay_away(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _take(self) -> _Process | None:
        """Return the one that waits, if it is still there."""
        self._reaper.reap()  # one that has just ended is none
        process, self._ready = self._ready, None
        return process if process is not None and process.child.is_alive and process.channel.is_open else None

    def _make_ready(self) -> None:
        self._due = None
        if self.pid is not None:
            return
        try:
            self._ready = self._spawn(self._log_descriptor)
        except (OSError, ValueError) as error:
            log.warning("no preflight is kept ready: %s", error)

    def _spawn(self, output: int) -> _Process:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                argv, environment = self._commands.talking("preflight-child"), self._commands.environment({})
                child = self._reaper.spawn(argv, environment, output, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        return _Process(child, ours)
