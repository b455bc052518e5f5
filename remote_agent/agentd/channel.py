"""Messages to and from one child over a socket pair, with descriptors beside them where a message needs some."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from remote_agent.protocol.framing import FrameReader, ProtocolError
from remote_agent.protocol.internal import InternalMessage, dump, parse

log = logging.getLogger(__name__)

READ_BYTES = 65536
OUTBOUND_LIMIT_BYTES = 8 << 20


class Channel:
    """Calls ``on_message`` for each message and ``on_closed`` once, with the reason when the child broke the rules.

    Takes ownership of ``link``. Never blocks.
    """

    def __init__(
        self,
        link: socket.socket,
        on_message: Callable[[InternalMessage], None],
        on_closed: Callable[[str | None], None],
    ) -> None:
        self._link = link
        self._on_message, self._on_closed = on_message, on_closed
        self._reader = FrameReader()
        self._outbound: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self.is_open = True
        link.setblocking(False)
        self._loop.add_reader(link, self._readable)

    def send(self, message: InternalMessage, descriptors: Sequence[int] = ()) -> None:
        """Queue a message; descriptors are duplicated, so that the caller may close its own. Nothing once closed."""
        if not self.is_open:
            return
        self._outbound.append((dump(message), [os.dup(descriptor) for descriptor in descriptors]))
        if sum(len(data) for data, _ in self._outbound) > OUTBOUND_LIMIT_BYTES:
            self._shut("it does not read what it is sent")
            return
        self._flush()

    def drain(self) -> None:
        """Take in what a child said before it ended."""
        while self.is_open and self._readable():
            pass

    def close(self) -> None:
        """Close without a call to ``on_closed``."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._link)
            self._loop.remove_writer(self._link)
            self._link.close()
            for _, descriptors in self._outbound:
                _close_all(descriptors)
            self._outbound.clear()

    def _shut(self, reason: str | None) -> None:
        if self.is_open:
            self.close()
            self._on_closed(reason)

    def _readable(self) -> bool:
        try:
            data = self._link.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._shut(None)
            return False
        try:
            messages = [parse(line) for line in self._reader.feed(data)]
        except ProtocolError as error:
            self._shut(str(error))
            return False
        for message in messages:
            if self.is_open:
                self._on_message(message)
        return True

    def _flush(self) -> None:
        while self._outbound:
            data, descriptors = self._outbound[0]
            try:
                sent = socket.send_fds(self._link, [data], descriptors) if descriptors else self._link.send(data)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._link, self._flush)
                return
            except OSError:
                return  # the read side says that the child has gone
            _close_all(descriptors)
            if sent < len(data):
                self._outbound[0] = (data[sent:], [])
            else:
                self._outbound.popleft()
        self._loop.remove_writer(self._link)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
