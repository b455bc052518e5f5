"""A node's agent over any argv that gives stdio on the host: kubectl, docker, a local process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence

from console.clean import clean, clean_lines
from console.config_nodes import Node
from console.errors import LinkLost, NodeMisconfigured
from console.transports import agent_command
from console.transports.base import CLOSE_TIMEOUT_S, READ_BYTES, WRITE_TIMEOUT_S, TimedOut, bounded, unbroken

NOISE_BYTES = 4096


async def open_command(node: Node, token: str) -> CommandStream:
    """Return a stream to the process that the node's ``transport`` starts.

    Raises: LinkError.
    """
    argv = agent_command.argv(node, token)
    try:
        return await start_command(argv, argv[0])
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise NodeMisconfigured(clean(f"{node.name}: {argv[0]}: {what}")) from error


async def start_command(argv: Sequence[str], name: str, environ: Mapping[str, str] | None = None) -> CommandStream:
    """Return a stream to a process of ``argv``; ``name`` stands for it in reasons. Raises: OSError, ValueError."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=READ_BYTES,
            env=environ,
            start_new_session=True,  # Ctrl-C in the console's terminal is not for it
        )
    )
    try:
        return CommandStream(await unbroken(starting), name)
    except asyncio.CancelledError:
        if not starting.cancelled() and starting.exception() is None:
            await CommandStream(starting.result(), name).close()
        raise


class CommandStream:
    """A `Stream` over a child process; its stderr is read apart and kept for the reason."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._name = process, name
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._said = b""
        self._draining = asyncio.ensure_future(self._drain_stderr())

    async def read(self) -> bytes:
        data = await self._stdout.read(READ_BYTES)
        if not data:
            await asyncio.wait({self._draining}, timeout=CLOSE_TIMEOUT_S)
            await self._wait(CLOSE_TIMEOUT_S)
        return data

    async def write(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            await bounded(self._stdin.drain(), WRITE_TIMEOUT_S)
        except TimedOut as error:
            raise LinkLost(f"{self._name} took no data for {WRITE_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise LinkLost(self.exit_reason() or f"{self._name} has closed its input") from error

    async def close(self) -> None:
        """The end of its input ends a bridge; what does not end is killed with all that it started."""
        self._stdin.close()
        discarding = asyncio.ensure_future(self._discard())
        if not await self._wait(1.0):
            self._signal(signal.SIGTERM)
            if not await self._wait(1.0):
                self._signal(signal.SIGKILL)
                await self._wait(CLOSE_TIMEOUT_S)
        for task in (self._draining, discarding):
            task.cancel()
        await asyncio.wait({self._draining, discarding}, timeout=CLOSE_TIMEOUT_S)
        # A grandchild may still hold the pipes; they are of no use any more.
        self._process._transport.close()  # type: ignore[attr-defined]

    def abort(self) -> None:
        self._signal(signal.SIGKILL)

    def exit_reason(self) -> str | None:
        said = " / ".join(clean_lines(self._said, 3))
        code = self._process.returncode
        how = f"{clean(self._name, 80)} {_exit_text(code)}" if code else ""
        return clean(f"{how}: {said}" if how and said else how or said) or None

    async def _wait(self, timeout_s: float) -> bool:
        try:
            await bounded(self._process.wait(), timeout_s)
        except TimedOut:
            # asyncio waits for the pipes too, which a grandchild may hold
            return self._process.returncode is not None
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                pass

    async def _discard(self) -> None:
        """A full pipe that nobody reads never ends."""
        while await self._stdout.read(READ_BYTES):
            pass

    async def _drain_stderr(self) -> None:
        while data := await self._stderr.read(READ_BYTES):
            self._said += data[: NOISE_BYTES - len(self._said)]


def _exit_text(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
