"""``keeper``: holds the NVIDIA device files open, which keeps the driver's state loaded. Outlives agentd.

Words on its socket, one a connection, which never change between versions:
``hold`` opens, ``release`` closes, ``status`` asks, ``stop`` ends. Each is
answered with one line: ``ok COUNT PID`` or ``error TEXT``. A keeper whose socket
was removed can't be reached any more: it ends.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from remote_agent.agentd.daemon import identity
from remote_agent.agentd.paths import KEEPER_SOCKET_NAME, StateDir, socket_address
from remote_agent.errors import StateDirError

ALREADY_RUNS = 3
PATIENCE_S = 1.0
LOOK_S = 1.0
"""How often a keeper looks whether its socket is still in place."""

_DEVICE = re.compile(r"nvidia(ctl|\d+)")


def main(argv: list[str]) -> int:
    """Hold the devices until told to stop; 3 if another keeper of this state directory runs."""
    parser = argparse.ArgumentParser(prog="python -m remote_agent keeper", description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--devices", type=Path, default=Path("/dev"), help="folder with the device files")
    options = parser.parse_args(argv)
    try:
        state = StateDir(options.state_dir)
        directory = state.open_run()
    except StateDirError as error:
        print(f"keeper: {error}", file=sys.stderr)
        return 1
    lock = os.open("keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ALREADY_RUNS
    keeper = Keeper(options.devices)
    listener, path = listen(directory, KEEPER_SOCKET_NAME), state.run / KEEPER_SOCKET_NAME
    bound = identity(path)

    def can_be_found() -> bool:
        try:
            return identity(path) == bound
        except OSError:
            return True  # it can't be told now

    keeper.serve(listener, can_be_found)
    if can_be_found():
        path.unlink()
    return 0


def device_files(folder: Path) -> list[Path]:
    """Return the files that keep the driver loaded: the control device and one for each GPU's minor number."""
    try:
        return sorted(path for path in folder.iterdir() if _DEVICE.fullmatch(path.name))
    except OSError:
        return []


def listen(directory: int, name: str) -> socket.socket:
    """Return a listening socket in the private directory, in place of one that a dead process left.

    The caller holds the lock that makes it the only one here.
    """
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_address(directory, name))
    listener.listen(64)
    return listener


def peer_uid(link: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def tell_keeper(state: StateDir, word: str) -> str | None:
    """Return a keeper's answer to one word, or None where none runs. Raises: StateDirError"""
    directory = state.open_run()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(PATIENCE_S)
            link.connect(socket_address(directory, KEEPER_SOCKET_NAME))
            link.sendall(word.encode("ascii") + b"\n")
            return link.recv(256).decode("ascii", "replace").strip()
    except (TimeoutError, FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return None
    finally:
        os.close(directory)


class Keeper:
    """The open descriptors and the four words."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}
        self.hold()

    def serve(self, listener: socket.socket, can_be_found: Callable[[], bool]) -> None:
        """Answer until told to stop, or until nobody can find the socket any more."""
        listener.settimeout(LOOK_S)
        going = True
        while going:
            try:
                link, _ = listener.accept()
            except TimeoutError:
                if not can_be_found():
                    return
                continue
            with link:
                link.settimeout(PATIENCE_S)
                try:
                    going = self._answer(link)
                except OSError:
                    pass  # somebody who went away or said nothing

    def hold(self) -> None:
        """Open every device file that is there and not open yet."""
        for path in device_files(self._folder):
            if path.name not in self._held:
                try:
                    self._held[path.name] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                except OSError as error:
                    print(f"keeper: {path}: {error.strerror}", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Close every device file, so that the driver may be unloaded."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _answer(self, link: socket.socket) -> bool:
        if peer_uid(link) not in (0, os.geteuid()):
            link.sendall(b"error not your keeper\n")
            return True
        word = link.recv(64).partition(b"\n")[0].decode("ascii", "replace")
        if word in ("hold", "release"):
            getattr(self, word)()
        elif word not in ("status", "stop"):
            link.sendall(b"error words are: hold release status stop\n")
            return True
        if word == "stop":
            self.release()
        link.sendall(f"ok {len(self._held)} {os.getpid()}\n".encode("ascii"))
        return word != "stop"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
