"""Starts and reaps every process under the agent; the only place that waits for one. Leaves no zombie.

Also reaps orphans: the agent is a child subreaper, so a worker that was forked
twice by a zygote becomes its child. Process groups end with their leader.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from remote_agent.agentd import hostfacts

PR_SET_CHILD_SUBREAPER = 36
CHANNEL_FD = 3
"""The number under which a child finds its end of the socket pair."""

MAX_UNCLAIMED = 256

DEFAULT_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)


class Child:
    """One process of ours. ``exit`` is done with the exit code (negative: a signal) once it is reaped."""

    def __init__(
        self, pid: int, kill: Callable[[int, int], None], group: bool | None, outlives_agent: bool = False
    ) -> None:
        self.pid, self.outlives_agent = pid, outlives_agent
        self.exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._kill, self._group = kill, group
        self._oom_kills = hostfacts.oom_kills()

    def describe_exit(self) -> str:
        """Return in words how the process ended, once it has."""
        return describe_exit(self.exit.result(), self._oom_kills)

    @property
    def is_alive(self) -> bool:
        return not self.exit.done()

    @property
    def leads_group(self) -> bool:
        """Whether signals go to its group; where that is not known beforehand the kernel is asked each time."""
        return _leads_group(self.pid) if self._group is None else self._group

    def signal(self, number: int) -> None:
        """Send a signal to the process and, if it leads a group, to all of that; nothing once it is reaped."""
        if not self.is_alive:
            return
        try:
            self._kill(-self.pid if self.leads_group else self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    async def wait(self, timeout_s: float) -> bool:
        """Return whether the process has ended within the time."""
        await asyncio.wait([self.exit], timeout=timeout_s)
        return self.exit.done()

    async def end(self, term_s: float = 0.6, kill_s: float = 0.9) -> str | None:
        """End the process and return None, or why it can't be ended: its state in the kernel."""
        if not self.is_alive:
            return None
        for number, patience_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
            self.signal(number)
            if await self.wait(patience_s):
                return None
        return f"process {self.pid} ignores SIGKILL: {hostfacts.process_state(self.pid)}"


class Reaper:
    """Every child, ours by birth or by adoption, in one table."""

    def __init__(self, kill: Callable[[int, int], None] = os.kill) -> None:
        self._kill = kill
        self._children: dict[int, Child] = {}
        self._unclaimed: dict[int, int] = {}

    def start(self) -> None:
        """Begin to reap, on SIGCHLD, and to adopt orphans."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)

    def stop(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def spawn(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        channel: int | None = None,
        group: bool = True,
        outlives_agent: bool = False,
    ) -> Child:
        """Start ``argv`` in a session of its own: stdin empty, stdout and stderr to ``output``, the channel as 3.

        What ``outlives_agent`` is not ended with all the others. Raises: OSError or ValueError if it can't be started.
        """
        actions: list[tuple[object, ...]] = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ]
        if channel is not None:
            actions.append((os.POSIX_SPAWN_DUP2, channel, CHANNEL_FD))
        pid = os.posix_spawnp(
            argv[0],
            list(argv),
            dict(environment),
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=DEFAULT_SIGNALS,
        )
        return self._register(pid, group, outlives_agent)

    def adopt(self, pid: int) -> Child:
        """Return the child for a process that a zygote forked and that is ours now, even if it has ended already."""
        child = self._register(pid, None)
        if pid in self._unclaimed:
            self._children.pop(pid)
            child.exit.set_result(self._unclaimed.pop(pid))
        return child

    def reap(self) -> None:
        """Collect everything that has ended."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            self._collect(ended.si_pid)

    async def end_all(self, limit_s: float) -> list[int]:
        """Kill every child that is to end with the agent. Returns those that have not ended in time."""
        children = self._kill_mortal()
        if children:
            await asyncio.wait([child.exit for child in children], timeout=limit_s)
        return [child.pid for child in children if child.is_alive]

    def kill_all(self, limit_s: float) -> list[int]:
        """Do what `end_all` does, and block: for an agent that leaves at once."""
        children = self._kill_mortal()
        give_up = time.monotonic() + limit_s
        while True:
            self.reap()
            left = [child.pid for child in children if child.is_alive]
            if not left or time.monotonic() > give_up:
                return left
            time.sleep(0.01)

    def _kill_mortal(self) -> list[Child]:
        children = [child for child in self._children.values() if not child.outlives_agent]
        for child in children:
            child.signal(signal.SIGKILL)
        return children

    def _register(self, pid: int, group: bool | None, outlives_agent: bool = False) -> Child:
        child = Child(pid, self._kill, group, outlives_agent)
        self._children[pid] = child
        return child

    def _collect(self, pid: int) -> None:
        child = self._children.pop(pid, None)
        if child is not None and child.leads_group:
            child.signal(signal.SIGKILL)  # what it left behind; the zombie still holds the number
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if child is not None:
            child.exit.set_result(code)
            return
        self._unclaimed[pid] = code
        if len(self._unclaimed) > MAX_UNCLAIMED:
            del self._unclaimed[next(iter(self._unclaimed))]


def describe_exit(code: int, oom_kills_before: int) -> str:
    """Return in words how a process ended."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL and hostfacts.oom_kills() > oom_kills_before:
        return "killed (SIGKILL), perhaps out of memory"
    return f"killed ({name})"


def _leads_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False
