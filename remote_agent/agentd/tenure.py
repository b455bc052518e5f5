"""An agent's hold on its state directory: the lock and the socket, which anybody may remove at any time.

Everything is compared by inode with what this agent has open, so that a new
file of the same name is never taken for its own.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from remote_agent.agentd.daemon import identity, take_lock, write_pid
from remote_agent.agentd.paths import SOCKET_NAME, StateDir, make_private
from remote_agent.keeper.sockets import listen

log = logging.getLogger(__name__)


class Tenure:
    """Held from the lock's taking to the agent's end. ``directory`` keeps its number when the socket moves."""

    def __init__(self, state: StateDir, lock: int) -> None:
        self._state, self._lock = state, lock
        self._root = os.open(state.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.directory = state.open_run()
        self._socket: tuple[int, int] | None = None

    def bind(self) -> socket.socket:
        """Return the listening socket that clients find."""
        listener = listen(self.directory, SOCKET_NAME)
        self._socket = identity(self._state.run / SOCKET_NAME)
        return listener

    def lost(self) -> str | None:
        """Return why the state directory is no longer this agent's, or None. A lock file that is gone is taken anew."""
        root, state = identity(self._state.root), self._state
        if root != _opened(self._root):
            return f"{state.root} was removed" + (": another has its name now" if root else "")
        if identity(state.lock) == _opened(self._lock):
            return None
        again = take_lock(state)
        if again is None:
            return f"another agent holds {state.lock}"
        os.dup2(again, self._lock, inheritable=False)
        os.close(again)
        write_pid(self._lock)
        log.warning("%s was removed: it is held again", state.lock)
        return None

    def has_socket(self) -> bool:
        """Return whether clients still find the socket that `bind` made."""
        return identity(self._state.run / SOCKET_NAME) == self._socket

    def rebind(self) -> socket.socket:
        """Return another listening socket, in a directory made again if need be. Raises: StateDirError, OSError"""
        make_private(self._state.run)
        fresh = self._state.open_run()
        os.dup2(fresh, self.directory, inheritable=False)
        os.close(fresh)
        return self.bind()

    def unbind(self) -> None:
        """Remove the socket, if it is still this agent's."""
        if self.has_socket():
            Path(self._state.run / SOCKET_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self.directory)
        os.close(self._root)


def _opened(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
