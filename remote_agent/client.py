"""A blocking client of the agent on this host, for the command line."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar, cast

from remote_agent.agentd.launch import connect_or_start, reach, silence
from remote_agent.agentd.paths import StateDir
from remote_agent.errors import ConnectionLostError, LaunchError, RefusedError, SilentAgentError
from remote_agent.protocol.framing import ProtocolError
from remote_agent.protocol.messages import HelloParams, HelloResult
from remote_agent.protocol.peer import ErrorReply, Incoming, Notification, Peer, Reply

T = TypeVar("T")
C = TypeVar("C", bound="Client")

READ_BYTES = 65536
SILENCE_S = 30.0
"""An agent's heart beats every few seconds: one that is silent for so long hangs."""

ENDING_S = 5.0
"""An agent that ends greets nobody any more; by then another one can be there."""

POLL_S = 0.05


class Client:
    """One connection. `call` waits for its answer; what arrives meanwhile is kept for `notifications`."""

    def __init__(self, link: socket.socket, state: StateDir) -> None:
        self._link, self._state, self._peer = link, state, Peer()
        self._kept: deque[Notification] = deque()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._link.close()

    def hello(self, name: str) -> HelloResult:
        """Agree on the protocol. Raises: RefusedError if there is none in common."""
        return self.call("hello", HelloParams(name), HelloResult)

    def call(self, method: str, params: object, result: type[T]) -> T:
        """Return the answer to a request.

        Raises: RefusedError with the agent's code; ConnectionLostError if the agent has gone; SilentAgentError.
        """
        ident, data = self._peer.request(method, params)
        try:
            self._link.sendall(data)
        except OSError as error:
            raise ConnectionLostError("the agent closed the connection") from error
        while True:
            for answer in self._receive():
                if isinstance(answer, ErrorReply) and answer.id == ident:
                    raise RefusedError(answer.code or f"error {answer.error}", answer.text)
                if isinstance(answer, Reply) and answer.id == ident:
                    return cast(T, answer.result)

    def notifications(self) -> Iterator[Notification]:
        """Yield what the agent tells, waiting for more. Raises: ConnectionLostError when it has gone."""
        while True:
            while self._kept:
                yield self._kept.popleft()
            self._receive()

    def _receive(self) -> list[Incoming]:
        """Wait for more, keep what is a notification and return what is not."""
        try:
            data = self._link.recv(READ_BYTES)
            if not data:
                raise ConnectionLostError("the agent closed the connection")
            messages = self._peer.feed(data)
        except TimeoutError as error:
            said = silence(self._state, f"said nothing for {self._link.gettimeout():g} s")
            raise SilentAgentError(said) from error
        except ConnectionResetError as error:  # it ended before it had read all that was sent
            raise ConnectionLostError("the agent closed the connection") from error
        except (OSError, ProtocolError) as error:
            raise ConnectionLostError(f"the connection to the agent broke: {error}") from error
        self._kept.extend(message for message in messages if isinstance(message, Notification))
        return [message for message in messages if not isinstance(message, Notification)]


def open_client(state: StateDir, name: str, start: Callable[[StateDir], socket.socket] = connect_or_start) -> Client:
    """Return a greeted client of the agent of ``state``, which is started if need be.

    One that ends just then is waited for, and the next one is asked.
    Raises: LaunchError, StateDirError, RefusedError, SilentAgentError, ConnectionLostError
    """
    give_up = time.monotonic() + ENDING_S
    while True:
        link = start(state)
        link.settimeout(SILENCE_S)
        client = Client(link, state)
        try:
            client.hello(name)
        except ConnectionLostError:
            link.close()
            if time.monotonic() > give_up:
                raise
            time.sleep(POLL_S)
        except BaseException:
            link.close()
            raise
        else:
            return client


def connect_running(state: StateDir) -> socket.socket:
    """Return a connection to the agent that runs. Raises: LaunchError if none does, SilentAgentError if it hangs."""
    link = reach(state)
    if link is None:
        raise LaunchError(f"no agent runs for {state.root}")
    return link
