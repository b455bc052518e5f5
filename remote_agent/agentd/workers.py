"""Workers: one process for one run on one device, forked from a zygote or, where that can't be, started fresh."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from remote_agent.agentd.channel import Channel
from remote_agent.agentd.commands import Commands
from remote_agent.agentd.paths import tail
from remote_agent.agentd.reaper import Child, Reaper
from remote_agent.agentd.zygotes import Zygote, ZygoteError, Zygotes
from remote_agent.errors import AgentError
from remote_agent.protocol.internal import (
    InternalMessage,
    ShardIdentity,
    WorkerAttach,
    WorkerFailed,
    WorkerGo,
    WorkerJob,
    WorkerRelease,
    ZygoteFork,
)
from remote_agent.protocol.messages import Recipe

SETTLE_S = 1.0
"""How long a process may live on after it closed its socket."""

RELEASE_S = 5.0

Answer = TypeVar("Answer")

Fork = Callable[[ZygoteFork, socket.socket, int], Awaitable[int]]
"""Has a zygote fork a worker that has a socket and a log, and gives its pid. Raises: ZygoteError"""


class SpawnError(AgentError):
    """A process of a run can't be started; the text says why."""


class NoAnswerError(AgentError):
    """A worker did not answer as it should; the text says what it did instead."""


class LateAnswerError(NoAnswerError):
    """It did not answer in time; it may still."""


@dataclass(frozen=True)
class Order:
    """What a worker is started for. ``owner``: whose the warm model will be; ``arm``: it is to wait for weights."""

    run_uid: str
    recipe: Recipe
    device: str
    python: tuple[str, ...]
    cache_directory: str
    stderr: Path
    state_directory: str
    owner: str
    arm: bool = False


class Worker:
    """A running worker. ``gone`` is done with words for how it ended, once it has; `on_message` hears it until then."""

    def __init__(self, order: Order, child: Child, link: socket.socket, zygote_reason: str | None) -> None:
        self.order, self.child, self.zygote_reason = order, child, zygote_reason
        self.shards: tuple[ShardIdentity, ...] = ()
        self.on_message: Callable[[Worker, InternalMessage], None] = lambda worker, message: None
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.was_released = False
        self._protocol_breach: str | None = None
        self._channel = Channel(link, lambda message: self.on_message(self, message), self._closed)
        child.exit.add_done_callback(self._ended)

    @property
    def is_alive(self) -> bool:
        return not self.gone.done()

    @property
    def is_reachable(self) -> bool:
        return self.child.is_alive and self._channel.is_open

    def assign(self, order: Order, asked_mono_ns: int) -> None:
        """Give it a job, the first or a further one; what it prints from then on goes to that run's log.

        Raises: SpawnError if there can be no log; then it is ended
        """
        self._give(self._job(order, asked_mono_ns), order)

    def attach(self, order: Order, asked_mono_ns: int, go: WorkerGo, serves: bool) -> None:
        """Have it attach to what the keeper has, and serve that or wait to be asked. Raises: as `assign`"""
        self._give(WorkerAttach(self._job(order, asked_mono_ns), go, serves), order)

    def _job(self, order: Order, asked_mono_ns: int) -> WorkerJob:
        return WorkerJob(
            order.run_uid,
            order.recipe,
            order.device,
            asked_mono_ns,
            order.cache_directory,
            self.zygote_reason,
            order.state_directory,
            order.owner,
            order.arm,
        )

    def _give(self, task: WorkerJob | WorkerAttach, order: Order) -> None:
        try:
            stderr = open_stderr(order.stderr)
        except OSError as error:
            self.child.signal(signal.SIGKILL)
            raise SpawnError(f"the worker's log can't be opened: {error}") from error
        try:
            self._channel.send(task, (stderr,))
        finally:
            os.close(stderr)
        self.order = order

    def send(self, message: InternalMessage) -> None:
        self._channel.send(message)

    async def ask(self, question: InternalMessage, answer: type[Answer], limit_s: float) -> Answer:
        """Return the answer to a question between two jobs; what else it says is heard as before.

        Raises: NoAnswerError if it can't do it, ended, or did not answer in time
        """
        before = self.on_message
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def hear(worker: Worker, message: InternalMessage) -> None:
            if isinstance(message, answer) and not answered.done():
                answered.set_result(message)
            elif isinstance(message, WorkerFailed) and not answered.done():
                answered.set_exception(NoAnswerError(message.failure.detail))
            else:
                before(worker, message)

        self.on_message = hear
        try:
            self.send(question)
            awaited: set[asyncio.Future[Any]] = {answered, self.gone}
            await asyncio.wait(awaited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.on_message = before
        if answered.done():
            return answered.result()
        if not self.is_alive:
            raise NoAnswerError(f"its worker {self.gone.result()}")
        raise LateAnswerError(f"its worker did not answer a {type(question).__name__} within {limit_s:g} s")

    async def end(self) -> str | None:
        """End it now and return None, or why it can't be ended."""
        return await self.child.end()

    async def kill(self) -> str | None:
        """End it by a signal that also a process ends by which the driver has stopped; return as `end` does."""
        return await self.child.end(term_s=0.0)

    async def release(self) -> str | None:
        """Ask it to let go, end it if it does not, and return None or why it can't be ended."""
        self.was_released = True
        self.send(WorkerRelease())
        if await self.child.wait(RELEASE_S):
            return None
        return await self.child.end()

    def log_tail(self) -> tuple[str, ...]:
        return tuple(tail(self.order.stderr))

    def _closed(self, breach: str | None) -> None:
        self._protocol_breach = breach
        loop = asyncio.get_running_loop()
        loop.call_later(0 if breach else SETTLE_S, self.child.signal, signal.SIGTERM)
        loop.call_later(SETTLE_S + 1, self.child.signal, signal.SIGKILL)

    def _ended(self, _: asyncio.Future[int]) -> None:
        self._channel.drain()
        self._channel.close()
        how = self.child.describe_exit()
        if self._protocol_breach:
            how = f"broke the protocol and was ended: {self._protocol_breach}"
        self.gone.set_result(how)


class Workers:
    """Starts workers and other processes of a run."""

    def __init__(self, reaper: Reaper, commands: Commands, zygotes: Zygotes) -> None:
        self._reaper, self._commands, self._zygotes = reaper, commands, zygotes

    async def start(self, order: Order, asked_mono_ns: int) -> Worker:
        """Return a worker that knows its job and waits for the word to go.

        Raises: SpawnError if neither way of starting one works.
        """
        worker = await self._start(order)
        worker.assign(order, asked_mono_ns)
        return worker

    async def start_attached(self, order: Order, go: WorkerGo, serves: bool) -> Worker:
        """Return a worker that attaches to what the keeper has, for an order's recipe. Raises: as `start`"""
        asked_mono_ns = time.monotonic_ns()
        worker = await self._start(order)
        worker.attach(order, asked_mono_ns, go, serves)
        return worker

    async def _start(self, order: Order) -> Worker:
        stderr = -1
        try:
            stderr = open_stderr(order.stderr)
            child, link, reason = await self._process(order, stderr)
        except (OSError, ValueError) as error:
            raise SpawnError(f"the worker can't be started: {error}") from error
        finally:
            if stderr >= 0:
                os.close(stderr)
        return Worker(order, child, link, reason)

    async def fork_spare(self, zygote: Zygote, order: Order, stderr: int) -> Worker:
        """Return a worker without a job, for another order like that one. Raises: ZygoteError, OSError"""
        child, link = await self._fork(zygote.fork, {}, stderr)
        return Worker(order, child, link, None)

    async def _process(self, order: Order, stderr: int) -> tuple[Child, socket.socket, str | None]:
        """Return a worker's process and our end of its link; where no zygote forked it, the reason too.

        What needs no device runs on the agent's own Python and has no reason: nothing was to be forked.
        A zygote that dies in the middle of a fork may leave a worker that nobody was told of. Such a
        worker ends when its link closes, so each way of starting one has a link of its own.
        """
        if not order.recipe.needs_device:
            return *self._spawn(self._commands.talking("cacher"), {}, stderr), None
        try:
            return *await self._fork(partial(self._zygotes.fork, order.python), order.recipe.environment, stderr), None
        except ZygoteError as error:
            reason = str(error)
        argv = self._commands.talking("worker", order.python)
        return *self._spawn(argv, order.recipe.environment, stderr), reason

    def _spawn(self, argv: tuple[str, ...], environment: Mapping[str, str], stderr: int) -> tuple[Child, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                whole = self._commands.environment(environment)
                return self._reaper.spawn(argv, whole, stderr, theirs.fileno()), ours
        except BaseException:
            ours.close()
            raise

    async def _fork(self, fork: Fork, environment: Mapping[str, str], stderr: int) -> tuple[Child, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                return self._reaper.adopt(await fork(ZygoteFork(environment), theirs, stderr)), ours
        except BaseException:
            ours.close()
            raise

    def start_park(self, order: Order, on_message: Callable[[InternalMessage], None]) -> tuple[Child, Channel]:
        """Start a park child on the Python of a run; it waits for its job. Raises: SpawnError"""
        stderr = -1
        try:
            stderr = open_stderr(order.stderr)
            argv = self._commands.talking("park-child", order.python)
            child, ours = self._spawn(argv, order.recipe.environment, stderr)
        except (OSError, ValueError) as error:
            raise SpawnError(f"park can't be started: {error}") from error
        finally:
            if stderr >= 0:
                os.close(stderr)
        channel = Channel(ours, on_message, lambda reason: child.signal(signal.SIGTERM) if reason else None)
        child.exit.add_done_callback(lambda _: _finish(channel))
        return child, channel


def _finish(channel: Channel) -> None:
    channel.drain()
    channel.close()


def open_stderr(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
