"""Versions of the agent's one file on a host: each under its own digest, and one link that says which is current.

Beside the link that consoles look for lies ``versions``::

    glowplug-agent.pyz -> versions/DIGEST/glowplug-agent.pyz
    versions/previous.pyz -> DIGEST/glowplug-agent.pyz
    versions/DIGEST/glowplug-agent.pyz

A file under its digest is whole: it gets that name after its bytes are durable. A link moves by one rename. So whatever
is interrupted, and wherever, the current version is one that was whole before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from remote_agent.agentd.files import sync_directory
from remote_agent.errors import VersionError
from remote_agent.loader.filesystem import LOCAL, filesystem_of

DIGEST_CHARACTERS = 16
KEPT = 3
"""How many of the newest versions stay, beside the current one, the former one and those in use."""

UPLOAD_PREFIX, TEMPORARY_PREFIX = ".upload-", ".new-"
STALE_S = 3600.0
"""After that time nobody is still writing an upload or a temporary file."""


class Versions:
    """The versions that belong to one link. Makes no directory before `store`."""

    def __init__(self, link: Path) -> None:
        absolute = link.absolute()
        self.link = absolute.parent.resolve() / absolute.name
        self.folder = self.link.parent / "versions"
        self.previous = self.folder / "previous.pyz"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let nobody else install here meanwhile. Raises: VersionError if somebody does."""
        lock = self.folder / ".lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise VersionError(f"{lock}: can't be made: {error.strerror}") from error
        try:
            _take(descriptor, lock)
            yield
        finally:
            os.close(descriptor)

    def current(self) -> Path | None:
        """Return the file that the link leads to; None where there is none."""
        return self._target(self.link)

    def former(self) -> Path | None:
        """Return the file that was current before; None where there is none."""
        return self._target(self.previous)

    def store(self, source: Path) -> Path:
        """Return the file of ``source``'s content under its digest, which is put there if need be.

        Raises: OSError.
        """
        digest = digest_of(source)
        stored = self.folder / digest / self.link.name
        if source == stored:
            return stored
        if stored.exists() and digest_of(stored) == digest:
            return stored
        stored.parent.mkdir(parents=True, exist_ok=True)
        beside = self._temporary(stored.parent)
        try:
            _link_or_copy(source, beside)
            beside.chmod(0o755)
            _sync(beside)
            beside.rename(stored)
        finally:
            beside.unlink(missing_ok=True)
        sync_directory(stored.parent)
        sync_directory(self.folder)
        return stored

    def switch(self, stored: Path) -> Path | None:
        """Make ``stored`` the current version and return the one before it, which `former` gives from now on.

        A plain file in the link's place is stored first. Raises: OSError; the old version is current then.
        """
        before = self.current()
        if before is not None and not self.link.is_symlink():
            before = self.store(before)
        if before == stored:
            return self.former()
        if before is not None:
            self._point(self.previous, before)
        self._point(self.link, stored)
        return before

    def switch_back(self, before: Path) -> None:
        """Make ``before`` current again after a version that turned out not to start."""
        self._point(self.link, before)

    def prune(self) -> list[str]:
        """Remove versions that nobody needs and return their digests; and what interrupted installations left.

        On a file system that other hosts may share none is removed: what runs there can't be seen from here.
        """
        self._remove_stale()
        if filesystem_of(self.folder) not in LOCAL:
            return []
        stored = [path for path in self.folder.iterdir() if path.is_dir() and len(path.name) == DIGEST_CHARACTERS]
        newest = sorted(stored, key=lambda path: path.stat().st_mtime_ns, reverse=True)[:KEPT]
        needed = {*newest, *self._in_use(), *(path.parent for path in (self.current(), self.former()) if path)}
        unneeded = [path for path in stored if path not in needed]
        for path in unneeded:
            shutil.rmtree(path, ignore_errors=True)
        return sorted(path.name for path in unneeded)

    def _in_use(self) -> set[Path]:
        """Return the folders of versions that processes of this host were started from, agents and keepers alike."""
        found = set[Path]()
        start = os.fsencode(self.folder) + b"/"
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            found.update(Path(os.fsdecode(word)).parent for word in words if word.startswith(start))
        return found

    def _remove_stale(self) -> None:
        old_s = time.time() - STALE_S
        for path in (*self.folder.glob(f"{UPLOAD_PREFIX}*"), *self.folder.glob(f"**/{TEMPORARY_PREFIX}*")):
            if path.lstat().st_mtime < old_s:
                path.unlink(missing_ok=True)

    def _target(self, link: Path) -> Path | None:
        return link.resolve() if link.is_file() else None

    def _point(self, link: Path, stored: Path) -> None:
        beside = self._temporary(self.folder)
        try:
            beside.symlink_to(os.path.relpath(stored, link.parent))
            beside.replace(link)
        finally:
            beside.unlink(missing_ok=True)
        sync_directory(link.parent)

    def _temporary(self, folder: Path) -> Path:
        return folder / f"{TEMPORARY_PREFIX}{os.getpid()}"


def digest_of(path: Path) -> str:
    """Return the name of a version with this file's content. Raises: OSError."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST_CHARACTERS]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link_or_copy(source: Path, target: Path) -> None:
    """An upload is nobody else's and needs no second copy; any other file may be written to later."""
    if source.name.startswith(UPLOAD_PREFIX):
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # a file system without links
    shutil.copyfile(source, target)


def _take(descriptor: int, lock: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise VersionError(f"{lock}: another installation is under way") from error
    except OSError as error:
        raise VersionError(f"{lock}: can't be locked: {error.strerror}") from error
