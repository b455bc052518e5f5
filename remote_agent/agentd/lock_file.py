"""One file that is a lock among all users of this host: ``flock`` on it, freed by the kernel at its holder's death.

The file lies in a directory that everybody may write to, so it is never trusted: a link is not followed, and what
the file says of its holder is another user's word, for people to read.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from remote_agent.agentd.daemon import identity
from remote_agent.errors import LockFileError

MODE = 0o666
READ_BYTES = 1000
_TRIES = 20


class LockFile:
    """A lock that this process may take. Nothing is opened before `try_take`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._used_mono_ns = 0

    def try_take(self, holder: dict[str, str | int]) -> bool:
        """Take the lock, write ``holder`` into it and return True; False while another has it.

        Raises: LockFileError that names a file which can't be a lock
        """
        for _ in range(_TRIES):
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(descriptor)
                if identity(self.path) == (found.st_dev, found.st_ino):
                    self._used_mono_ns = _used_mono_ns(_read(descriptor))
                    _write(descriptor, {**holder, "used_mono_ns": self._used_mono_ns})
                    self._descriptor, descriptor = descriptor, -1
                    return True
            except BlockingIOError:
                return False
            except OSError as error:
                raise LockFileError(f"{self.path}: can't be locked: {error.strerror}") from error
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        raise LockFileError(f"{self.path}: is replaced again and again")

    @property
    def used_mono_ns(self) -> int:
        """When the last holder ended its use, on CLOCK_MONOTONIC; of one that died, when the lock was taken; 0: none"""
        return self._used_mono_ns

    def release(self, was_used: bool) -> None:
        """Give the lock back; ``was_used``: what it guards is different now. Nothing where it is not held."""
        if self._descriptor is None:
            return
        used_mono_ns = time.monotonic_ns() if was_used else self._used_mono_ns
        try:
            _write(self._descriptor, {"used_mono_ns": used_mono_ns})
        except OSError:
            pass  # the next holder takes it for a death, which costs it one look
        os.close(self._descriptor)
        self._descriptor = None

    def holder(self) -> str:
        """Return in words who has the lock, as far as the file tells."""
        try:
            descriptor = self._open()
        except LockFileError:
            return "an unknown process"
        try:
            return _describe(_read(descriptor))
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            try:
                descriptor = os.open(self.path, flags)
            except FileNotFoundError:
                self._make()
                descriptor = os.open(self.path, flags)
        except OSError as error:
            why = "is a symbolic link" if self.path.is_symlink() else error.strerror
            raise LockFileError(f"{self.path}: can't be used as a lock: {why}") from error
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise LockFileError(f"{self.path}: can't be used as a lock: it is no regular file")

    def _make(self) -> None:
        """Let the file appear with the mode that everybody needs, however this process's umask stands.

        It is linked into place: with ``fs.protected_regular`` nobody may open another user's file with O_CREAT.
        """
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            os.fchmod(descriptor, MODE)
            os.link(name, self.path)
        except FileExistsError:
            pass  # another was quicker
        finally:
            os.close(descriptor)
            Path(name).unlink()


def find_folder(candidates: Iterable[Path]) -> Path | None:
    """Return the first directory that every user of this host may write to and where only owners remove files.

    What this user may do does not count: all agents of a host must choose the same one.
    """
    wanted = stat.S_ISVTX | stat.S_IWOTH
    for path in candidates:
        try:
            found = path.stat()
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_mode & wanted == wanted:
            return path
    return None


def _read(descriptor: int) -> dict[str, object]:
    try:
        content = json.loads(os.pread(descriptor, READ_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(descriptor: int, content: dict[str, str | int]) -> None:
    data = json.dumps(content).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def _used_mono_ns(content: dict[str, object]) -> int:
    """Return when the use of the holder before ended: now where it died, or says what can't be."""
    now_ns, said = time.monotonic_ns(), content.get("used_mono_ns", 0)
    is_told = isinstance(said, int) and 0 <= said <= now_ns and "pid" not in content
    return said if is_told and isinstance(said, int) else now_ns


def _describe(content: dict[str, object]) -> str:
    def word(name: str) -> str:
        text = str(content.get(name, ""))[:64]
        return "".join(char if char.isprintable() else "?" for char in text)

    if "pid" not in content:
        return "an unknown process"
    return f"run {word('run')} of {word('user')} (agent process {word('pid')})"
