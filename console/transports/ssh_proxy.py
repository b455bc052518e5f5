"""The stream of a ProxyCommand, as ssh runs it: ``$SHELL -c 'exec …'`` between two pipes.

asyncssh is given one end of a socket pair. What the command writes to stderr is kept
for the reason of a failure, for a screen has no place for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

from console.clean import clean
from console.errors import LinkError, NodeUnreachable
from console.transports.base import READ_BYTES
from console.transports.command import CommandStream, start_command


class Proxy:
    """A running ProxyCommand. ``socket`` is for asyncssh, which closes it; `close` ends the command."""

    def __init__(self, stream: CommandStream, ours: socket.socket, theirs: socket.socket) -> None:
        self.socket = theirs
        self._stream, self._ours = stream, ours
        self._pumps = (asyncio.ensure_future(self._up()), asyncio.ensure_future(self._down()))

    def reason(self) -> str | None:
        """Return one line on how the command ended and what it wrote to stderr; None where it did neither."""
        return self._stream.exit_reason()

    async def close(self) -> None:
        """End the command with all that it has started. Safe to call twice."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.wait(self._pumps)
        self._ours.close()
        self.socket.close()
        await self._stream.close()

    async def _up(self) -> None:
        """From asyncssh to the command."""
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._ours, READ_BYTES):
                await self._stream.write(data)
        except (OSError, LinkError):
            pass
        finally:
            self._end()

    async def _down(self) -> None:
        """From the command to asyncssh."""
        loop = asyncio.get_running_loop()
        try:
            while data := await self._stream.read():
                await loop.sock_sendall(self._ours, data)
        except OSError:
            pass
        finally:
            self._end()

    def _end(self) -> None:
        """Whichever side is gone, the other sees the end."""
        try:
            self._ours.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


async def open_proxy(label: str, command: str, environ: Mapping[str, str] | None) -> Proxy:
    """Start the command line with the user's own shell.

    Raises: NodeUnreachable if there is no such shell; OSError where this process has no descriptors left.
    """
    environment = os.environ if environ is None else environ
    shell = environment.get("SHELL") or "/bin/sh"
    ours, theirs = socket.socketpair()  # before there is a process that would have to be ended without them
    try:
        stream = await start_command([shell, "-c", f"exec {command}"], "its ProxyCommand", environment)
    except BaseException as error:
        ours.close()
        theirs.close()
        if isinstance(error, OSError | ValueError):
            raise NodeUnreachable(clean(f"{label}: ProxyCommand: {shell}: {error}")) from error
        raise
    for end in (ours, theirs):
        end.setblocking(False)
    return Proxy(stream, ours, theirs)
