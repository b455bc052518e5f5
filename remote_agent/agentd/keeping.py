"""agentd's side of the keeper: starts it where there is a driver to keep loaded, finds it again after a restart."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from pathlib import Path

from remote_agent.agentd.commands import Commands
from remote_agent.agentd.paths import KEEPER_SOCKET_NAME, StateDir, socket_address
from remote_agent.agentd.reaper import Reaper
from remote_agent.keeper.devices import device_files

log = logging.getLogger(__name__)

ANSWER_S = 2.0
START_S = 5.0
POLL_S = 0.02


class KeeperLink:
    """Speaks the keeper's four words. A keeper that does not answer is logged, never waited for long."""

    def __init__(
        self, state: StateDir, directory: int, reaper: Reaper, commands: Commands, log_descriptor: int, devices: Path
    ) -> None:
        self._state, self._directory, self._devices = state, directory, devices
        self._reaper, self._commands, self._log_descriptor = reaper, commands, log_descriptor
        self._tasks: set[asyncio.Future[None]] = set()
        self.pid: int | None = None

    def start(self) -> None:
        """Find the keeper that runs, or start one where there are devices to hold."""
        self._background(self._find_or_start())

    def hold(self) -> None:
        """Let the keeper hold the devices, again if it had released them."""
        self._background(self._hold())

    async def release(self) -> bool:
        """Let the keeper close the devices, and return whether it holds none now."""
        count = await self._ask("release")
        return count == 0 or (count is None and self.pid is None)

    async def stop(self) -> None:
        """End the keeper."""
        await self._ask("stop")
        self.pid = None

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find_or_start(self) -> None:
        await self._ensure()

    async def _hold(self) -> None:
        if await self._ensure():
            await self._ask("hold")

    async def _ensure(self) -> bool:
        if await self._ask("status") is not None:
            return True
        if not device_files(self._devices):
            return False
        argv = self._commands.argv("keeper")
        arguments = ("--state-dir", str(self._state.root), "--devices", str(self._devices))
        try:
            child = self._reaper.spawn(
                (*argv, *arguments), self._commands.environment({}), self._log_descriptor, group=False
            )
        except (OSError, ValueError) as error:
            log.warning("the keeper can't be started: %s", error)
            return False
        give_up = asyncio.get_running_loop().time() + START_S
        while child.is_alive and asyncio.get_running_loop().time() < give_up:
            if await self._ask("status") is not None:
                return True
            await asyncio.sleep(POLL_S)
        log.warning("the keeper did not start")
        return False

    async def _ask(self, word: str) -> int | None:
        """Return how many devices the keeper holds after ``word``; None if it does not answer."""
        try:
            answer = await asyncio.wait_for(self._exchange(word), ANSWER_S)
            verdict, count, pid = answer.split()
            if verdict == b"ok":
                self.pid = int(pid)
                return int(count)
            log.warning("the keeper refuses %s: %r", word, answer[:200])
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            if not isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
                log.warning("the keeper does not answer: %s", error or "no answer in time")
            self.pid = None
        return None

    async def _exchange(self, word: str) -> bytes:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.setblocking(False)
            await loop.sock_connect(link, socket_address(self._directory, KEEPER_SOCKET_NAME))
            await loop.sock_sendall(link, word.encode("ascii") + b"\n")
            return await loop.sock_recv(link, 256)
