"""Opens the files of a checkpoint without ever waiting on what is not a regular file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from remote_agent.errors import CheckpointError
from remote_agent.loader.problems import CheckpointProblem, shown
from remote_agent.protocol.codec import INT_MAX
from remote_agent.protocol.internal import ShardIdentity

READ_LIMIT_BYTES = 0x7FFFF000
"""The most one read call moves on Linux."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def open_regular(path: Path, name: str | None = None) -> int:
    """Return a descriptor of a regular file; never hangs on a FIFO or a device.

    ``name`` stands for the file in the problem. Raises: CheckpointError saying why it can't be read.
    """
    label = path.name if name is None else name
    try:
        _require_regular(path.stat().st_mode, label)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise refused(_open_problem(path, label, error)) from error
    try:
        _require_regular(os.fstat(descriptor).st_mode, label)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_directory(path: Path) -> bool:
    """Return whether ``path`` leads to a directory; False where that can't be asked."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def identity_of(path: str, status: os.stat_result) -> ShardIdentity:
    """Return what must stay the same while a file is loaded."""
    device, inode = _signed(status.st_dev), _signed(status.st_ino)
    return ShardIdentity(path, device, inode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def read_exactly(descriptor: int, offset: int, length: int) -> bytes:
    """Return ``length`` bytes from ``offset``, fewer only where the file ends. Raises: OSError."""
    parts = []
    while length > 0:
        part = os.pread(descriptor, min(length, READ_LIMIT_BYTES), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)


def read_into(descriptor: int, offset: int, view: memoryview) -> int:
    """Fill ``view`` from ``offset`` and return how many bytes came; fewer only where the file ends.

    Releases the interpreter lock while it reads. Raises: OSError.
    """
    done, wanted = 0, len(view)
    while done < wanted:
        got = os.preadv(descriptor, [view[done : min(wanted, done + READ_LIMIT_BYTES)]], offset + done)
        if got == 0:
            break
        done += got
    return done


def refused(*problems: CheckpointProblem) -> CheckpointError:
    """Return the error that carries ``problems``."""
    return CheckpointError("; ".join(str(problem) for problem in problems), tuple(problems))


def kind_of(mode: int) -> str:
    """Return what a file mode stands for, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def _signed(number: int) -> int:
    """Return the kernel's 64 bits as a message carries them: overlays, Lustre and others use the highest as well."""
    return number - (1 << 64) if number > INT_MAX else number


def _require_regular(mode: int, label: str) -> None:
    if not stat.S_ISREG(mode):
        raise refused(CheckpointProblem("not_regular", label, None, f"is {kind_of(mode)}, not a regular file"))


def _open_problem(path: Path, label: str, error: OSError | ValueError) -> CheckpointProblem:
    if isinstance(error, ValueError):
        return CheckpointProblem("not_found", label, None, "its name holds a zero byte")
    if error.errno == errno.ENOENT and path.is_symlink():
        return CheckpointProblem("dangling_link", label, None, _describe_dangling(path))
    if error.errno == errno.ELOOP:
        return CheckpointProblem("link_loop", label, None, "is a symbolic link that leads in a circle")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointProblem("not_found", label, None, f"is not there: {shown(str(path), 400)}")
    return CheckpointProblem("unreadable", label, None, f"can't be read: {describe(error)}")


def describe(error: OSError) -> str:
    """Return the system's words for an error, with its number."""
    return f"{error.strerror or error} (errno {error.errno})"


def _describe_dangling(path: Path) -> str:
    target = path.readlink()
    text = (
        f"is a link to {shown(str(target), 400)}, which is not there; the link was copied and its blob was not: "
        "copy with rsync -aL (which follows links), copy the blobs too, or point at the real cache (HF_HOME)"
    )
    unfinished = _unfinished_downloads(path.parent / target)
    return f"{text}; {unfinished} unfinished download(s) (*.incomplete) lie beside the target" if unfinished else text


def _unfinished_downloads(target: Path) -> int:
    try:
        return sum(1 for entry in os.scandir(target.parent) if entry.name.endswith(".incomplete"))
    except OSError:
        return 0
