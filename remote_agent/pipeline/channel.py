"""A worker's end of its socket to agentd: messages out, messages in, and death when agentd goes.

A thread reads all the time, so that a worker in the middle of a stage ends at once when
the socket closes. Ending means the whole process group: a compiler started here goes too.
A descriptor beside a message is a log: what is printed from then on goes there.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from typing import NoReturn

from remote_agent.protocol.framing import FrameReader, ProtocolError
from remote_agent.protocol.internal import InternalMessage, dump, parse

CHUNK_BYTES = 1 << 16
EXIT_ABANDONED = 3
"""Exit code of a worker whose socket to agentd closed."""


class Channel:
    """Both directions of one socket. ``send`` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._incoming: queue.SimpleQueue[InternalMessage] = queue.SimpleQueue()

    def watch(self) -> None:
        """Start to read; from now on the process ends when the other side closes."""
        threading.Thread(target=self._read_until_closed, name="agentd-socket", daemon=True).start()

    def send(self, message: InternalMessage) -> None:
        """Write one message; ends the process when nobody is there to read it."""
        data = dump(message)
        with self._send_lock:
            try:
                self._sock.sendall(data)
            except OSError:
                end_abandoned()

    def receive(self) -> InternalMessage:
        """Wait for the next message."""
        return self._incoming.get()

    def receive_within(self, timeout_s: float) -> InternalMessage | None:
        """Return the next message, or None if none came in time."""
        try:
            return self._incoming.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _read_until_closed(self) -> None:
        reader = FrameReader()
        try:
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._sock, CHUNK_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                for descriptor in descriptors:
                    print_to(descriptor)
                if not data:
                    break
                for line in reader.feed(data):
                    self._incoming.put(parse(line))
        except (OSError, ProtocolError):
            pass
        end_abandoned()


def print_to(log: int) -> None:
    """Make ``log`` this process's stdout and stderr, and close it; what was printed before stays where that went."""
    flush_output()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def flush_output() -> None:
    """Have what was printed written, where that can be."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


def end_abandoned() -> NoReturn:
    """End this process and what it started, now, with no clean-up that could hang."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(EXIT_ABANDONED)
