"""Where the agent keeps its things, and proof that nobody else can reach them. Imported by the bridge: stays light."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from remote_agent.errors import StateDirError

SOCKET_NAME = "control.sock"
KEEPER_SOCKET_NAME = "keeper.sock"
ATTACH_FILE_NAME = "attach.allow"
TAIL_LINE_CHARACTERS = 500


class StateDir:
    """The names inside one state directory. Holds no descriptor and touches nothing by itself."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.run = self.root / "run"
        self.journal = self.root / "journal"
        self.runs = self.root / "runs"
        self.cache = self.root / "cache"
        self.lock = self.root / "agentd.lock"
        self.log = self.root / "agentd.log"

    def prepare(self) -> None:
        """Make the directories, private to this user, and see that one takes sockets.

        Raises: StateDirError if one can't be made or is not ours alone, or where there can be no sockets.
        """
        for path in (self.root, self.run, self.journal, self.runs, self.cache):
            make_private(path)
        _try_socket(self.run)

    def open_run(self) -> int:
        """Return a descriptor of the socket directory, checked to be ours alone."""
        return open_private(self.run)


def default_root(environ: Mapping[str, str]) -> Path:
    """Return the state directory for this user; works without a passwd entry.

    Raises: StateDirError if there is no home directory to put it in.
    """
    base = environ.get("XDG_STATE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "glowplug-agent"
    try:
        home = Path(environ["HOME"]) if environ.get("HOME", "").startswith("/") else Path.home()
    except RuntimeError as error:
        raise StateDirError("no home directory for this user: set XDG_STATE_HOME or give --state-dir") from error
    return home / ".local" / "state" / "glowplug-agent"


def make_private(path: Path) -> None:
    """Make ``path`` with mode 0700, or check that it is a directory of ours which nobody else may enter.

    Raises: StateDirError
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StateDirError(f"{path}: can't be made: {error.strerror}") from error
    os.close(open_private(path))


def _try_socket(path: Path) -> None:
    """Raises: StateDirError where the filesystem has none, as some that hosts share."""
    directory, name = open_private(path), f"try-{os.getpid()}.sock"
    try:
        with contextlib.suppress(FileNotFoundError):  # of one that was killed just then
            os.unlink(name, dir_fd=directory)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
            tried.bind(socket_address(directory, name))
        os.unlink(name, dir_fd=directory)
    except OSError as error:
        where = "a state directory on a local disk takes them (the node's state_directory, or --state-dir)"
        raise StateDirError(f"{path}: no socket can be made there: {error.strerror or error}; {where}") from error
    finally:
        os.close(directory)


def open_private(path: Path) -> int:
    """Return a descriptor of the directory ``path``, which is ours and closed to others.

    Raises: StateDirError if it is a link, someone else's, or open to group or others.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StateDirError(f"{path}: not a usable directory: {error.strerror}") from error
    found = os.fstat(descriptor)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid() and not mode & 0o077:
        return descriptor
    os.close(descriptor)
    if found.st_uid != os.geteuid():
        raise StateDirError(f"{path}: belongs to user id {found.st_uid}, not to {os.geteuid()}")
    raise StateDirError(f"{path}: mode {mode:04o} lets others in; it must be 0700")


def socket_address(directory: int, name: str = SOCKET_NAME) -> str:
    """Return an address that fits ``sun_path`` however long the state directory's own path is."""
    return f"/proc/self/fd/{directory}/{name}"


def tail(path: Path, lines: int = 20, limit_bytes: int = 262_144) -> list[str]:
    """Return the last lines of a log, without control characters; nothing where it can't be read.

    Where Python itself crashed, they begin with its word for it and the innermost frames of the thread
    that crashed, wherever among the threads it stood; the list of extension modules, which follows, is left out.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit_bytes))
            text = file.read(limit_bytes).decode("utf-8", "replace")
    except OSError:
        return []
    kept = ["".join(char if char.isprintable() else " " for char in line).rstrip() for line in text.splitlines()]
    told = [line for line in kept if line and not line.startswith("Extension modules: ")]
    crashes = [number for number, line in enumerate(told) if line.startswith("Fatal Python error")]
    if crashes:
        told = [told[crashes[-1]], *_crashed_thread(told[crashes[-1] + 1 :])][:lines]
    return [line[:TAIL_LINE_CHARACTERS] for line in told[-lines:]]


def _crashed_thread(stacks: list[str]) -> list[str]:
    """Return the stack of the thread that crashed and what follows it, or all of ``stacks`` if none is marked."""
    marked = [number for number, line in enumerate(stacks) if line.startswith("Current thread ")]
    return stacks[marked[0] :] if marked else stacks
