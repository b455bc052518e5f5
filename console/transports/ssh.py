"""A node's agent over SSH: one connection and one exec channel a node, bastions shared.

Bytes, never text mode, where one bad byte ends the connection. What the login shell
writes to stderr is read all the time, since an unread stderr stalls the channel, and
its beginning is kept for the reason of a failed start; it never mixes with the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import asyncssh

from console.clean import clean, clean_lines
from console.config_nodes import Node
from console.errors import LinkLost, NodeUnreachable
from console.heap import Portions, forget_frames
from console.prompts import PromptQueue
from console.transports import agent_command, ssh_algorithms
from console.transports.base import CLOSE_TIMEOUT_S, READ_BYTES, WRITE_TIMEOUT_S, TimedOut, bounded
from console.transports.gate import CONNECT_LIMIT, Gate, Shared
from console.transports.ssh_connect import Logins, connect
from console.transports.ssh_target import Target, resolve

NOISE_BYTES = 4096
RELEASE_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)

Connection = asyncssh.SSHClientConnection


Release = Callable[[], Awaitable[None]]
"""Lets go of what a connection goes through."""


class Bastion(Shared[Connection]):
    """A connection that others go through, and how many may connect through it at once.

    ``open_it`` gives the connection and what lets go of the way to it, which is done
    once the connection is over, whoever ends it.
    """

    def __init__(self, open_it: Callable[[], Awaitable[tuple[Connection, Release]]]) -> None:
        super().__init__(self._open_bastion, self._close_bastion, lambda connection: not connection.is_closed())
        self.slots = asyncio.Semaphore(CONNECT_LIMIT)
        self._open_it = open_it
        self._releases: set[asyncio.Task[None]] = set()

    async def _open_bastion(self) -> Connection:
        connection, release = await self._open_it()

        async def let_go() -> None:
            await connection.wait_closed()
            await release()

        task = asyncio.ensure_future(let_go())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return connection

    async def _close_bastion(self, connection: Connection) -> None:
        await close_connection(connection)
        if self._releases:
            await asyncio.wait(self._releases, timeout=RELEASE_TIMEOUT_S)


async def open_ssh(
    node: Node, token: str, gate: Gate, prompts: PromptQueue | None = None, say: Callable[[str], None] | None = None
) -> SshStream:
    """Return a stream to the bridge that the node's login shell was asked to start.

    Without ``prompts`` nobody is asked, and what would be is an error. ``say`` is told once what of ssh's
    configuration is not followed, and which host keys were taken as it wants. Raises: LinkError.
    """
    command = agent_command.build(node, token)
    connection, release = await open_connection(node, gate, prompts, say)
    try:
        process = await bounded(
            connection.create_process(command, encoding=None, request_pty=False), node.connect_timeout_s
        )
    except (TimedOut, asyncssh.Error, OSError) as error:
        connection.abort()
        await release()
        what = clean(error.reason) if isinstance(error, asyncssh.Error) else str(error)
        raise NodeUnreachable(f"{node.name}: logged in, but no command could be started: {what}") from error
    except asyncio.CancelledError:
        connection.abort()
        await release()
        raise
    return SshStream(connection, process, release, gate.portions)


async def open_connection(
    node: Node, gate: Gate, prompts: PromptQueue | None = None, say: Callable[[str], None] | None = None
) -> tuple[Connection, Release]:
    """Return a connection to the node, logged in, and what lets go of the way to it once it is over.

    Without ``prompts`` nobody is asked, and what would be is an error. ``say`` is told once what of ssh's
    configuration is not followed, and which host keys were taken as it wants. Raises: LinkError.
    """
    chain = await resolve(node, gate)
    for target in chain:
        _, unusable = ssh_algorithms.usable(target)
        for note in (*target.notes, *unusable):
            _tell(target.label, note, gate, say)
    logins = Logins(gate, prompts, node.name, lambda label, line: _tell(label, line, gate, say))
    return await _connect_through(chain, logins)


def _tell(label: str, note: str, gate: Gate, say: Callable[[str], None] | None) -> None:
    if gate.once(label, note):
        line = clean(f"{label}: {note}")
        log.warning("%s", line, extra={"node": label})
        if say is not None:
            say(line)


async def _connect_through(chain: tuple[Target, ...], logins: Logins) -> tuple[Connection, Release]:
    """Return a connection to the last of ``chain``, and what lets go of the bastions before it."""
    *hops, target = chain
    if not hops:
        return await connect(target, logins, logins.gate.connects)
    bastion = _bastion(tuple(hops), logins)
    try:
        tunnel = await bastion.acquire()
        connection, _ = await connect(target, logins, bastion.slots, tunnel)
        return connection, bastion.release
    except BaseException:
        await bastion.release()
        raise


def _bastion(chain: tuple[Target, ...], logins: Logins) -> Bastion:
    """Return the bastion that every node behind it shares: it is logged into, and asked about, once."""
    held = logins.gate.bastions.get(chain)
    if isinstance(held, Bastion) and held.users:
        return held

    bastion = logins.gate.bastions[chain] = Bastion(lambda: _connect_through(chain, logins))
    return bastion


async def close_connection(connection: Connection) -> None:
    """End a connection within a few seconds, whatever the other side does."""
    connection.close()
    try:
        await bounded(connection.wait_closed(), CLOSE_TIMEOUT_S)
    except (TimedOut, asyncssh.Error, OSError):
        connection.abort()


class SshStream:
    """A `Stream` over an exec channel that owns its connection."""

    def __init__(
        self,
        connection: Connection,
        process: asyncssh.SSHClientProcess[bytes],
        release: Release,
        portions: Portions,
    ) -> None:
        self._connection, self._process = connection, process
        self._portions = portions
        self._release: Release | None = release
        self._error: str | None = None
        self._stderr = b""
        self._draining = asyncio.ensure_future(self._drain_stderr())

    async def read(self) -> bytes:
        try:
            data = await self._process.stdout.read(READ_BYTES)
        except (asyncssh.Error, OSError) as error:
            self._note(error)
            return b""
        if not data:
            await self._see_the_end()
        return data

    async def write(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            await bounded(self._process.stdin.drain(), WRITE_TIMEOUT_S)
        except TimedOut as error:
            raise LinkLost(f"the host took no data for {WRITE_TIMEOUT_S:g} s") from error
        except (asyncssh.Error, OSError) as error:
            self._note(error)
            raise LinkLost(self.exit_reason() or "the connection is closed") from error

    async def close(self) -> None:
        release, self._release = self._release, None
        if release is None:
            return
        self._process.close()
        await close_connection(self._connection)
        self._draining.cancel()
        await asyncio.wait({self._draining}, timeout=CLOSE_TIMEOUT_S)
        await release()
        await self._portions.let_go()

    def abort(self) -> None:
        self._connection.abort()

    def exit_reason(self) -> str | None:
        said = " / ".join(clean_lines(self._stderr, 3))
        how = self._error or _exit_text(self._process)
        return clean(f"{how}: {said}" if how and said else how or said) or None

    async def _see_the_end(self) -> None:
        """The exit status and the last of stderr come after the end of stdout."""
        try:
            await bounded(self._process.wait_closed(), CLOSE_TIMEOUT_S)
            await asyncio.wait({self._draining}, timeout=CLOSE_TIMEOUT_S)
        except TimedOut:
            pass
        except (asyncssh.Error, OSError) as error:
            self._note(error)

    async def _drain_stderr(self) -> None:
        try:
            while data := await self._process.stderr.read(READ_BYTES):
                self._stderr += data[: NOISE_BYTES - len(self._stderr)]
        except (asyncssh.Error, OSError) as error:
            forget_frames(error)

    def _note(self, error: Exception) -> None:
        forget_frames(error)
        text = error.reason if isinstance(error, asyncssh.Error) else str(error)
        self._error = self._error or clean(text or type(error).__name__)


def _exit_text(process: asyncssh.SSHClientProcess[bytes]) -> str:
    if process.exit_signal:
        return f"the command was ended by signal {clean(str(process.exit_signal[0]), 40)}"
    if process.exit_status:
        return f"the command ended with {process.exit_status}"
    return ""
