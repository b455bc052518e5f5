"""One of HAProxy's admin sockets: a connection a command, as long as an answer may take and no longer."""

from __future__ import annotations

import socket
import time

from console.errors import HookFailed, HookRetry, UsageError

ANSWER_S = 5.0
ANSWER_BYTES = 16 << 20


class AdminSocket:
    """``address``: the path of a UNIX socket, or HOST:PORT."""

    def __init__(self, address: str, answer_s: float = ANSWER_S) -> None:
        """Raises: UsageError unless it reads like one of the two."""
        self.address = address
        self._answer_s = answer_s
        self._target: str | tuple[str, int] = address
        if "/" not in address:
            host, _, port = address.rpartition(":")
            if not (host and port.isdecimal() and 0 < int(port) < 65536):
                raise UsageError(f"--socket: {address[:80]!r} is neither a path nor HOST:PORT")
            self._target = (host.strip("[]"), int(port))

    def ask(self, command: str) -> bytes:
        """Return all that HAProxy says to one command until it closes.

        Raises: HookRetry where nothing listens, or what listens does not come to an end in time; HookFailed where the
        socket is not open to this user, which no other try changes.
        """
        deadline_s = time.monotonic() + self._answer_s
        try:
            with self._connect() as connection:
                connection.sendall(command.encode() + b"\n")
                return self._receive(connection, deadline_s)
        except TimeoutError:
            raise HookRetry(f"no whole answer to `{command}` within {self._answer_s:g} s") from None
        except PermissionError as error:
            raise HookFailed(
                f"{error.strerror}: `stats socket … user, group and mode` say to whom it is open"
            ) from error
        except (OSError, UnicodeError) as error:  # no host name is a UnicodeError
            raise HookRetry(getattr(error, "strerror", None) or str(error)) from error

    def _connect(self) -> socket.socket:
        if isinstance(self._target, tuple):
            return socket.create_connection(self._target, self._answer_s)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(self._answer_s)
            connection.connect(self._target)
        except BaseException:
            connection.close()
            raise
        return connection

    def _receive(self, connection: socket.socket, deadline_s: float) -> bytes:
        received = bytearray()
        while len(received) <= ANSWER_BYTES:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
            piece = connection.recv(65536)
            if not piece:
                return bytes(received)
            received += piece
        raise HookRetry(f"the answer has over {ANSWER_BYTES >> 20} MiB: this is no HAProxy")
