"""The keeper's process: one for each state directory, detached from whoever started it."""

from __future__ import annotations

import argparse
import fcntl
import os
import resource
import socket
from functools import partial
from pathlib import Path

from remote_agent.agentd.daemon import identity
from remote_agent.agentd.paths import ATTACH_FILE_NAME, KEEPER_SOCKET_NAME, StateDir
from remote_agent.errors import StateDirError
from remote_agent.keeper import ALREADY_RUNS
from remote_agent.keeper.access import (
    AccessError,
    admit_attacher,
    bind_for_others,
    read_access,
    remove_socket,
    socket_identity,
)
from remote_agent.keeper.complaint import complain
from remote_agent.keeper.devices import DeviceHold
from remote_agent.keeper.fdstore import DescriptorStore, take_stored
from remote_agent.keeper.holdings import LEASES_MAX, TOTAL_MAX, Holdings
from remote_agent.keeper.serving import WAITING_MAX, Server, admit_owner
from remote_agent.keeper.sockets import listen
from remote_agent.keeper.words import Words

OTHER_DESCRIPTORS = 256
"""What a keeper may have open besides: device files, sockets, what clients are just sending."""


def main(argv: list[str]) -> int:
    """Hold what is given until told to stop; 3 if another keeper of this state directory runs."""
    parser = argparse.ArgumentParser(prog="python -m remote_agent keeper", description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--devices", type=Path, default=Path("/dev"), help="folder with the device files")
    options = parser.parse_args(argv)
    stored = take_stored(os.environ)
    try:
        state = StateDir(options.state_dir)
        directory = state.open_run()
    except StateDirError as error:
        complain(error)
        return 1
    lock = os.open("keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ALREADY_RUNS
    _raise_descriptor_limit()
    devices, store = DeviceHold(options.devices), DescriptorStore(os.environ.pop("NOTIFY_SOCKET", None))
    devices.hold()
    holdings = Holdings(store, stored)
    server = Server(Words(devices, holdings), holdings)
    listener, path = listen(directory, KEEPER_SOCKET_NAME), state.run / KEEPER_SOCKET_NAME
    server.add(listener, admit_owner)
    bound, others = identity(path), AttachSocket(server, state.root / ATTACH_FILE_NAME)

    def can_be_found() -> bool:
        try:
            return identity(path) == bound
        except OSError:
            return True  # it can't be told now

    def look() -> bool:
        others.settle()
        return can_be_found()

    others.settle()
    store.say_ready()
    server.serve(look)
    others.close()
    if can_be_found():
        path.unlink()
    return 0


class AttachSocket:
    """The socket for other users, where the file wants it; a change of the file, or of what lies there, moves it."""

    def __init__(self, server: Server, file: Path) -> None:
        self._server, self._file = server, file
        self._listener: socket.socket | None = None
        self._directory: Path | None = None
        self._bound: tuple[int, int] | None = None
        self._complaint = ""

    def settle(self) -> None:
        """Listen where the file says now; what can't be done is said once, and tried again."""
        try:
            directory = read_access(self._file).directory
            if directory != self._directory or not self._is_in_place():
                self.close()
            if directory is not None and self._listener is None:
                self._listener, self._bound = bind_for_others(directory)
                self._directory = directory
                self._server.add(self._listener, partial(admit_attacher, self._file))
            self._complaint = ""
        except AccessError as error:
            if self._complaint != str(error):
                complain(error)
            self._complaint = str(error)

    def close(self) -> None:
        """Listen no longer and take the socket away, if it is still this one."""
        directory, listener = self._directory, self._listener
        self._directory = self._listener = None
        if directory is None or listener is None:
            return
        self._server.remove(listener)
        try:
            if socket_identity(directory) == self._bound:
                remove_socket(directory)
        except AccessError as error:
            complain(error)

    def _is_in_place(self) -> bool:
        """Whether others find this socket where it was put. Raises: AccessError if that can't be told"""
        return self._directory is None or socket_identity(self._directory) == self._bound


def _raise_descriptor_limit() -> None:
    """Let this process hold as much as it promises, or as it may."""
    wanted = TOTAL_MAX + LEASES_MAX + 2 * WAITING_MAX + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
