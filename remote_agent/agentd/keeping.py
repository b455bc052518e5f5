"""agentd's side of the keeper: starts it where there is something to hold, finds it again after a restart."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from pathlib import Path

from remote_agent.agentd.commands import Commands
from remote_agent.agentd.paths import KEEPER_SOCKET_NAME, StateDir, socket_address
from remote_agent.agentd.reaper import Reaper
from remote_agent.agentd.waiting import within
from remote_agent.errors import KeeperError, KeeperGoneError, KeeperRefusedError, RefusedError
from remote_agent.keeper import ALREADY_RUNS
from remote_agent.keeper.client import KeeperAddress, Listed, ask, list_residents
from remote_agent.keeper.devices import device_files
from remote_agent.protocol.internal import Manifest
from remote_agent.resident.manifest import read_manifest

log = logging.getLogger(__name__)

ANSWER_S = 2.0
START_S = 5.0
POLL_S = 0.02

ATTACHED_HINT = "release --wait SECONDS waits for that to end, release --force lets go all the same"
"""What can be done about something attached, in the words of both command lines."""


class KeeperLink:
    """Speaks the keeper's words. A keeper that does not answer is logged, never waited for long."""

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

    async def ensure(self) -> bool:
        """Return whether a keeper runs, which is started where none does: it has weights to hold."""
        return await self._ensure(for_residents=True)

    async def release(self) -> bool:
        """Let the keeper close the devices, and return whether it holds none now.

        Raises: RefusedError ``residents_held``: their memory would go with the driver's state
        """
        try:
            reply = await asyncio.to_thread(ask, self._address, "release")
        except KeeperRefusedError as refusal:
            raise RefusedError("residents_held", f"the keeper does not release the driver: {refusal}") from refusal
        except KeeperGoneError:
            self.pid = None
            return True
        except KeeperError as error:
            log.warning("the keeper does not answer: %s", error)
            return False
        return reply.count == 0

    async def stop(self, force: bool) -> None:
        """End the keeper; while it holds residents, only with ``force``."""
        if await self._ask("stop!" if force else "stop") is not None:
            self.pid = None

    # --- residents ---

    async def residents(self) -> tuple[Listed, ...]:
        """Return what the keeper holds; nothing where there is none. Raises: KeeperError if it does not answer"""
        try:
            return await asyncio.to_thread(list_residents, self._address)
        except KeeperGoneError:
            self.pid = None
            return ()

    async def manifest(self, name: str) -> Manifest:
        """Return what a resident is. Raises: KeeperError, ResidentLostError"""
        return await asyncio.to_thread(self._read_manifest, name)

    async def drop(self, name: str, force: bool) -> None:
        """Let the keeper close a resident, attached or not with ``force``; one that it has not is no error.

        Raises: RefusedError ``attached``, naming the processes; KeeperError
        """
        try:
            await asyncio.to_thread(ask, self._address, f"{'drop!' if force else 'drop'} {name}")
        except KeeperGoneError:
            pass
        except KeeperRefusedError as refusal:
            if not str(refusal).startswith("no resident"):
                raise RefusedError("attached", f"{refusal}; {ATTACHED_HINT}") from refusal

    @property
    def _address(self) -> KeeperAddress:
        return KeeperAddress(self._state)

    def _read_manifest(self, name: str) -> Manifest:
        reply = ask(self._address, f"show {name}")
        try:
            return read_manifest(reply.descriptors[0]).manifest
        finally:
            reply.close()

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find_or_start(self) -> None:
        await self._ensure()

    async def _hold(self) -> None:
        if await self._ensure():
            await self._ask("hold")

    async def _ensure(self, for_residents: bool = False) -> bool:
        if await self._ask("status") is not None:
            return True
        if not for_residents and not device_files(self._devices):
            return False
        argv = self._commands.argv("keeper")
        arguments = ("--state-dir", str(self._state.root), "--devices", str(self._devices))
        try:
            child = self._reaper.spawn(
                (*argv, *arguments),
                self._commands.environment({}),
                self._log_descriptor,
                group=False,
                outlives_agent=True,
            )
        except (OSError, ValueError) as error:
            log.warning("the keeper can't be started: %s", error)
            return False
        give_up = asyncio.get_running_loop().time() + START_S
        while asyncio.get_running_loop().time() < give_up:
            if await self._ask("status") is not None:
                return True
            if not child.is_alive and child.exit.result() != ALREADY_RUNS:
                break  # where another one runs, it is about to answer
            await asyncio.sleep(POLL_S)
        log.warning("the keeper did not start")
        return False

    async def _ask(self, word: str) -> int | None:
        """Return how many devices the keeper holds after ``word``; None if it refuses or does not answer."""
        try:
            answer = await within(ANSWER_S, self._exchange(word))
            verdict, _, rest = answer.partition(b" ")
            if verdict == b"error":
                log.warning("the keeper refuses %s: %r", word, rest[:200])
                return None
            if verdict != b"ok":
                raise ValueError(f"{answer[:200]!r} is no answer")
            count, pid = rest.split()
            self.pid = int(pid)
            return int(count)
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
