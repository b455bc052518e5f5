"""Zygotes: Pythons with torch imported, from which workers are forked. One for each interpreter and environment.

A zygote whose packages changed on disk is retired. Every failure here is a
`ZygoteError` whose text says why; the caller then starts a fresh worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from remote_agent.agentd.channel import Channel
from remote_agent.agentd.commands import Commands
from remote_agent.agentd.paths import tail
from remote_agent.agentd.reaper import Child, Reaper
from remote_agent.errors import AgentError
from remote_agent.protocol.internal import InternalMessage, ZygoteFork, ZygoteForked, ZygoteReady, ZygoteRefused

log = logging.getLogger(__name__)

_T = TypeVar("_T")

IMPORT_TIME_PREFIXES = (
    "CUDA_", "HF_", "KMP_", "LD_", "MKL_", "NVIDIA_", "OMP_", "PATH", "PYTHON", "PYTORCH_", "TORCH", "TRANSFORMERS_",
    "TRITON_",
)  # fmt: skip
"""Variables that are read while packages are imported: a zygote with other values is another zygote."""

MAX_ZYGOTES = 4
SETTLE_S = 1.0
"""How long a process may live on after it closed its socket."""


class ZygoteError(AgentError):
    """No worker was forked; the text says why."""


@dataclass(frozen=True)
class ZygoteTimes:
    """``spare_s``: how long a spare worker may take to be ready; a driver may have to set up its GPUs first."""

    ready_s: float = 180.0
    fork_s: float = 10.0
    spare_s: float = 60.0


@dataclass(frozen=True)
class ZygoteKey:
    python: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


class Zygote:
    """One zygote process. `fork` waits until its imports are done."""

    def __init__(
        self, child: Child, link: socket.socket, stderr: Path, adopt: Callable[[int], Child], times: ZygoteTimes
    ) -> None:
        loop = asyncio.get_running_loop()
        self.child, self.stderr, self._adopt, self._times = child, stderr, adopt, times
        self.used_s = time.monotonic()
        self.ready: asyncio.Future[ZygoteReady] = loop.create_future()
        self.fingerprint: tuple[int, ...] = ()
        self._answer: asyncio.Future[ZygoteForked | ZygoteRefused] | None = None
        self._one_at_a_time = asyncio.Lock()
        self.failure: str | None = None
        self._channel = Channel(link, self._heard, self._closed)
        child.exit.add_done_callback(lambda _: self._ended())

    async def fork(self, request: ZygoteFork, link: socket.socket, stderr: int) -> int:
        """Return the pid of a new worker that has ``link`` and ``stderr``. Raises: ZygoteError"""
        self.used_s = time.monotonic()
        await self._within(self.ready, self._times.ready_s, "is not ready")
        copies = [os.dup(descriptor) for descriptor in (link.fileno(), stderr)]
        exchange = asyncio.ensure_future(self._exchange(request, copies))
        try:
            result = await asyncio.shield(exchange)
        except asyncio.CancelledError:
            exchange.add_done_callback(self._kill_unwanted)
            raise
        if isinstance(result, ZygoteRefused):
            raise ZygoteError(f"the zygote refused: {result.reason}")
        return result.pid

    def retire(self, reason: str) -> None:
        """End it; what it forked lives on."""
        self._fail(reason)
        self._channel.close()
        self.child.signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(2 * SETTLE_S, self.child.signal, signal.SIGKILL)

    def has_changed(self) -> bool:
        """Return whether the packages it imported are others by now."""
        return self.failure is None and self.ready.done() and self.fingerprint_now() != self.fingerprint

    def fingerprint_now(self) -> tuple[int, ...]:
        """Return the change times of the directories it imported from; -1 for one that is gone."""
        return tuple(_mtime_ns(path) for path in self.ready.result().fingerprint_paths)

    async def _exchange(self, request: ZygoteFork, descriptors: Sequence[int]) -> ZygoteForked | ZygoteRefused:
        """Ask and wait for the answer, one at a time: answers carry no name of their question."""
        try:
            async with self._one_at_a_time:
                if self.failure:
                    raise ZygoteError(self.failure)
                answer: asyncio.Future[ZygoteForked | ZygoteRefused] = asyncio.get_running_loop().create_future()
                self._answer = answer
                self._channel.send(request, descriptors)
                return await self._within(answer, self._times.fork_s, "did not answer")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _kill_unwanted(self, exchange: asyncio.Future[ZygoteForked | ZygoteRefused]) -> None:
        if not exchange.cancelled() and exchange.exception() is None:
            result = exchange.result()
            if isinstance(result, ZygoteForked):
                self._adopt(result.pid).signal(signal.SIGKILL)

    async def _within(self, future: asyncio.Future[_T], limit_s: float, complaint: str) -> _T:
        done, _ = await asyncio.wait([future], timeout=limit_s)
        if not done:
            self.retire(f"the zygote {complaint} within {limit_s:g} s")
        if self.failure and not (future.done() and future.exception() is None):
            raise ZygoteError(self.failure)
        return future.result()

    def _heard(self, message: InternalMessage) -> None:
        if isinstance(message, ZygoteReady) and not self.ready.done():
            self.ready.set_result(message)
            self.fingerprint = self.fingerprint_now()
        elif isinstance(message, (ZygoteForked, ZygoteRefused)) and self._answer and not self._answer.done():
            self._answer.set_result(message)

    def _closed(self, reason: str | None) -> None:
        if reason:
            self._fail(f"the zygote broke the protocol: {reason}")
        loop = asyncio.get_running_loop()
        loop.call_later(SETTLE_S, self.child.signal, signal.SIGTERM)
        loop.call_later(2 * SETTLE_S, self.child.signal, signal.SIGKILL)

    def _ended(self) -> None:
        self._channel.drain()
        self._channel.close()
        last = tail(self.stderr, 1)
        how = self.child.describe_exit()
        self._fail(f"the zygote {how}" + (f": {last[0][:300]}" if last and not self.ready.done() else ""))
        self.stderr.unlink(missing_ok=True)

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        for future in (self.ready, self._answer):
            if future is not None and not future.done():
                future.set_exception(ZygoteError(self.failure))
                future.exception()  # somebody may no longer wait for it


class Zygotes:
    """All zygotes of this agent, started when first needed."""

    def __init__(self, reaper: Reaper, commands: Commands, directory: Path, times: ZygoteTimes | None = None) -> None:
        self._reaper, self._commands, self._directory = reaper, commands, directory
        self._times = times or ZygoteTimes()
        self._zygotes: dict[ZygoteKey, Zygote] = {}
        self._numbers = itertools.count(1)
        self.on_end: Callable[[Zygote], None] = lambda zygote: None

    @property
    def pids(self) -> list[int]:
        return [zygote.child.pid for zygote in self._zygotes.values() if zygote.child.is_alive]

    async def fork(self, python: tuple[str, ...], request: ZygoteFork, link: socket.socket, stderr: int) -> int:
        """Return the pid of a worker that has ``link`` and ``stderr``. Raises: ZygoteError"""
        return await self._get(python, request.environment).fork(request, link, stderr)

    def find(self, python: tuple[str, ...]) -> Zygote | None:
        """Return the zygote that would fork for a run without an environment of its own, if it is up; start none."""
        zygote = self._zygotes.get(ZygoteKey(python, ()))
        is_up = zygote is not None and zygote.ready.done() and zygote.failure is None and not zygote.has_changed()
        return zygote if is_up else None

    def stop(self) -> None:
        for zygote in self._zygotes.values():
            zygote.retire("the agent is ending")
            zygote.stderr.unlink(missing_ok=True)
        self._zygotes.clear()

    def _get(self, python: tuple[str, ...], environment: Mapping[str, str]) -> Zygote:
        early = {name: value for name, value in environment.items() if name.startswith(IMPORT_TIME_PREFIXES)}
        key = ZygoteKey(python, tuple(sorted(early.items())))
        zygote = self._zygotes.get(key)
        if zygote is not None and zygote.has_changed():
            log.info("packages of %s changed: a new zygote is started", python or "the agent's Python")
            zygote.retire("its packages changed on disk")
        if zygote is None or zygote.failure is not None:
            zygote = self._zygotes[key] = self._start(key, early)
            self._retire_surplus(key)
        return zygote

    def _start(self, key: ZygoteKey, early: Mapping[str, str]) -> Zygote:
        stderr = self._directory / f"zygote-{next(self._numbers)}.stderr"
        ours, theirs = socket.socketpair()
        descriptor = -1
        try:
            descriptor = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            child = self._reaper.spawn(
                self._commands.talking("zygote", key.python),
                self._commands.environment(early),
                descriptor,
                theirs.fileno(),
                group=False,
            )
        except (OSError, ValueError) as error:
            ours.close()
            raise ZygoteError(f"the zygote can't be started: {error}") from error
        finally:
            theirs.close()
            if descriptor >= 0:
                os.close(descriptor)
        zygote = Zygote(child, ours, stderr, self._reaper.adopt, self._times)
        child.exit.add_done_callback(lambda _: self.on_end(zygote))
        return zygote

    def _retire_surplus(self, keep: ZygoteKey) -> None:
        idle = sorted((key for key in self._zygotes if key != keep), key=lambda key: self._zygotes[key].used_s)
        for key in idle[: max(0, len(self._zygotes) - MAX_ZYGOTES)]:
            self._zygotes.pop(key).retire("other zygotes are in use")


def _mtime_ns(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return -1
