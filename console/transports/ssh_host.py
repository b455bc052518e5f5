"""A host over one SSH connection, for what is done before an agent is there: scripts one after another, and an upload.

A script goes to ``sh`` by standard input, so that no login shell reads it and nothing of ours stands in the command
string. Only lines that begin with the conversation's token count, wherever start-up files write in between.
One channel at a time, since a server may allow no more (``MaxSessions 1``).
"""

from __future__ import annotations

import asyncio
import posixpath
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

import asyncssh

from console.clean import clean, clean_lines
from console.config_nodes import Node
from console.errors import LinkLost, NodeUnreachable, UploadFailed
from console.prompts import PromptQueue
from console.transports.base import CLOSE_TIMEOUT_S, READ_BYTES, STARTING_UP, TimedOut, bounded, unbroken
from console.transports.gate import Gate
from console.transports.ssh import Connection, Release, close_connection, open_connection

T = TypeVar("T")

COMMAND = "sh -c 'exec sh -s'"
"""The whole command string: every login shell reads it alike."""

NOISE_BYTES = 4096
LINE_BYTES = 1 << 20
UPLOAD_TIMEOUT_S = 600.0

REOPEN_S = 0.05

Heard = Callable[[str], bytes | None]
"""Is given what follows the token in a line; what it returns is written next."""


async def open_host(
    node: Node, gate: Gate, prompts: PromptQueue | None = None, say: Callable[[str], None] | None = None
) -> SshHost:
    """Return the node's host, logged in. Raises: LinkError."""
    connection, release = await open_connection(node, gate, prompts, say)
    return SshHost(node, connection, release)


class SshHost:
    """Owns its connection. ``was_noisy``: the login shell has written to a script's output."""

    def __init__(self, node: Node, connection: Connection, release: Release) -> None:
        self._node, self._connection, self._release = node, connection, release
        self.was_noisy = False

    @property
    def name(self) -> str:
        return self._node.name

    async def __aenter__(self) -> SshHost:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await unbroken(self._let_go())

    async def _let_go(self) -> None:
        await close_connection(self._connection)
        await self._release()

    async def run(self, script: str, token: str, heard: Heard, silence_s: float) -> str:
        """Have ``sh`` run a script and hand on each of its lines; return the end of what else it said.

        Standard input stays open until the script has ended. Raises: LinkError, also when none of its lines comes for
        ``silence_s``, whatever else is written meanwhile.
        """
        conversation: _Conversation | None = None
        try:
            process = await self._opened(
                lambda: self._connection.create_process(COMMAND, encoding=None, request_pty=False)
            )
            conversation = _Conversation(process, token, heard, silence_s, self)
            return await conversation.hold(script.encode())
        except TimedOut as error:
            said = conversation.said() if conversation is not None else ""
            what = f"{error}, but: {said}" if said else f"nothing from the host: {error}"
            raise NodeUnreachable(f"{self._node.name}: {what}; {STARTING_UP}") from error
        except (asyncssh.Error, OSError) as error:
            raise LinkLost(f"{self._node.name}: the connection is lost: {_reason(error)}") from error

    async def put(self, path: str, content: bytes) -> None:
        """Write a new file by SFTP, its directory made if need be; of one that fails nothing is left, if possible.

        Raises: UploadFailed, LinkLost.
        """
        try:
            sftp = await self._opened(self._connection.start_sftp_client)
        except (TimedOut, asyncssh.Error, OSError) as error:
            if self._connection.is_closed():
                raise LinkLost(f"{self._node.name}: the connection is lost before the upload") from error
            raise UploadFailed(f"no SFTP there: {_reason(error)}") from error
        try:
            await bounded(_write(sftp, path, content), UPLOAD_TIMEOUT_S)
        except (asyncssh.ConnectionLost, asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection) as error:
            raise LinkLost(f"{self._node.name}: the connection is lost during the upload") from error
        except (TimedOut, asyncssh.Error, OSError) as error:
            await self._remove(sftp, path)
            raise UploadFailed(f"{clean(path)}: {_reason(error)}") from error
        finally:
            sftp.exit()
            await _ended(sftp.wait_closed())

    async def _opened(self, open_it: Callable[[], Awaitable[T]]) -> T:
        """Return a channel; a server that allows one at a time may take a moment to see that the last has ended.

        Raises: TimedOut, asyncssh.Error, OSError.
        """
        give_up = time.monotonic() + self._node.connect_timeout_s
        while True:
            try:
                return await bounded(open_it(), self._node.connect_timeout_s)
            except asyncssh.ChannelOpenError as error:
                is_full = error.code in (asyncssh.OPEN_CONNECT_FAILED, asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED)
                if not is_full or self._connection.is_closed() or time.monotonic() > give_up:
                    raise
            await asyncio.sleep(REOPEN_S)

    async def _remove(self, sftp: asyncssh.SFTPClient, path: str) -> None:
        await _ended(sftp.remove(path))


class _Conversation:
    """One script's channel from its start to its end; stderr is read all the time, lest it stall the channel."""

    def __init__(
        self,
        process: asyncssh.SSHClientProcess[bytes],
        token: str,
        heard: Heard,
        silence_s: float,
        host: SshHost,
    ) -> None:
        self._process, self._token, self._heard, self._silence_s = process, f"{token} ".encode(), heard, silence_s
        self._host, self._noise = host, b""
        self._give_up = time.monotonic() + silence_s

    def said(self) -> str:
        """Return the end of what was said beside the script's lines."""
        return " / ".join(clean_lines(self._noise, 3, 200))

    async def hold(self, script: bytes) -> str:
        process, rest = self._process, b""
        draining = asyncio.ensure_future(self._drain_stderr())
        try:
            process.stdin.write(script)
            while data := await self._read():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    await self._take(line)
                if len(rest) > LINE_BYTES:
                    text = f"the host writes a line of more than {LINE_BYTES} bytes"
                    raise LinkLost(f"{self._host.name}: {text}: {clean(rest[:40].decode('utf-8', 'replace'))}…")
            await self._take(rest)
        finally:
            process.close()
            await _ended(process.wait_closed())
            draining.cancel()
            await asyncio.wait({draining}, timeout=CLOSE_TIMEOUT_S)
        return self.said()

    async def _read(self) -> bytes:
        """Return what comes next. Raises: TimedOut where it is long since the script's last line"""
        try:
            return await bounded(self._process.stdout.read(READ_BYTES), max(0.0, self._give_up - time.monotonic()))
        except TimedOut as error:
            raise TimedOut(f"no answer within {self._silence_s:g} s") from error

    async def _take(self, line: bytes) -> None:
        if line.startswith(self._token):
            answer = self._heard(line[len(self._token) :].decode("utf-8", "replace"))
            if answer is not None:
                self._process.stdin.write(answer)
                await bounded(self._process.stdin.drain(), UPLOAD_TIMEOUT_S)
            self._give_up = time.monotonic() + self._silence_s
        elif line.strip():
            self._keep(line + b"\n")
            self._host.was_noisy = True

    async def _drain_stderr(self) -> None:
        while data := await self._process.stderr.read(READ_BYTES):
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._noise = (self._noise + data)[-NOISE_BYTES:]


async def _write(sftp: asyncssh.SFTPClient, path: str, content: bytes) -> None:
    await sftp.makedirs(posixpath.dirname(path), exist_ok=True)
    async with sftp.open(path, "xb") as file:
        await file.write(content)


async def _ended(closing: asyncio.Future[None] | object) -> None:
    """Wait a moment for an end that may not come."""
    try:
        await bounded(closing, CLOSE_TIMEOUT_S)  # type: ignore[arg-type]
    except (TimedOut, asyncssh.Error, OSError):
        pass


def _reason(error: Exception) -> str:
    text = error.reason if isinstance(error, asyncssh.Error) else str(error)
    return clean(text or type(error).__name__)
