"""A compile cache's directory between runs: what it keeps by key, and cleared without reaching outside or under a run.

What lies there may be another's doing. Nothing is followed that is a link, and nothing outside the cache's own folders
is removed. A run holds the directory's lock shared, whoever clears holds it alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from remote_agent import caches
from remote_agent.compile_keys import digest_key, shorten
from remote_agent.compile_records import FUNCTIONS, RECORDS, WarmUp, find_missing, read_records, used_unix_s
from remote_agent.errors import RefusedError
from remote_agent.protocol.messages import CacheClearParams, CacheClearResult, CacheEntry, CacheListResult

LOCK = "lock"
OBJECTS = tuple(caches.VARIABLES.values())
FOLDERS = (RECORDS, FUNCTIONS, *OBJECTS, caches.ASIDE)
"""Everything that a cache has below its directory, but the lock: records first, so that none names what is gone."""

MOST_PARTS = 200


@contextlib.contextmanager
def in_use(root: Path | None) -> Iterator[None]:
    """Keep others from clearing ``root`` while a run uses it; None is no cache, and one without a lock has none."""
    lock = None if root is None else _open_lock(root)
    try:
        if lock is not None:
            with contextlib.suppress(OSError):  # a filesystem without locks
                fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def list_cache(root: Path) -> CacheListResult:
    """Return what ``root`` keeps, the last used first; nothing where there is no such directory."""
    entries = tuple(_entry(root, record) for record in read_records(root))
    return CacheListResult(str(root), entries, sum(_tree_bytes(root / folder) for folder in FOLDERS))


def clear_cache(root: Path, what: CacheClearParams) -> CacheClearResult:
    """Remove what was named, and return it with the bytes that are free now.

    Objects that a key shares with one that stays are left.

    Raises: RefusedError ``no_cache``, ``no_such_key``, ``cache_in_use`` while a run uses it, ``cache_unwritable``
    """
    if not root.is_dir():
        raise RefusedError("no_cache", f"{root}: no such directory")
    with _alone(root):
        before = list_cache(root)
        chosen = _choose(before.entries, what)
        try:
            if what.everything:
                for folder in FOLDERS:
                    _remove_folder(root, folder)
            else:
                _remove_keys(root, {entry.digest for entry in chosen})
        except OSError as error:
            raise RefusedError("cache_unwritable", f"{root}: can't be cleared: {error}") from error
        return CacheClearResult(str(root), chosen, before.size_bytes - list_cache(root).size_bytes)


def _choose(entries: Sequence[CacheEntry], what: CacheClearParams) -> tuple[CacheEntry, ...]:
    if what.everything:
        return tuple(entries)
    if what.older_than_s is not None:
        limit_s = time.time() - what.older_than_s
        return tuple(entry for entry in entries if entry.used_unix_s < limit_s)
    found = tuple(entry for entry in entries if what.digest and entry.digest.startswith(what.digest))
    if len(found) != 1:
        there = ", ".join(entry.digest[:12] for entry in found or entries) or "none"
        text = "several keys begin with" if found else "no key begins with"
        raise RefusedError("no_such_key", f"{text} {(what.digest or '')[:40]!r}; there is: {there}")
    return found


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    lock = _open_lock(root)
    if lock is None:
        raise RefusedError("cache_unwritable", f"{root / LOCK}: can't be opened as the cache's lock")
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RefusedError("cache_in_use", f"{root}: a run uses it now") from error
        except OSError as error:
            raise RefusedError("cache_unwritable", f"{root / LOCK}: can't be locked: {error.strerror}") from error
        yield
    finally:
        os.close(lock)


def _open_lock(root: Path) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(root / LOCK, flags, 0o600)
    except OSError:
        return None  # a directory that can only be read


def _entry(root: Path, record: WarmUp) -> CacheEntry:
    files = (*record.objects, *record.functions)
    missing = find_missing(root, files)
    return CacheEntry(
        digest_key(record.key),
        shorten(record.key.get("model", "unknown")),
        record.finished_unix_s,
        used_unix_s(root, record),
        sum(file.size_bytes for file in files if file not in missing),
        len(missing),
        {shorten(name): shorten(value) for name, value in list(record.key.items())[:MOST_PARTS]},
    )


def _remove_keys(root: Path, digests: set[str]) -> None:
    records = {digest_key(record.key): record for record in read_records(root)}
    kept = {file.path for digest, record in records.items() if digest not in digests for file in record.objects}
    for digest in digests & records.keys():
        _remove_below(root, f"{RECORDS}/{digest}.json")
        with _folder(root, (FUNCTIONS,)) as functions:
            if functions is not None:
                shutil.rmtree(f"/proc/self/fd/{functions}/{digest}", ignore_errors=True)
        for file in records[digest].objects:
            if file.path not in kept and PurePosixPath(file.path).parts[0] in OBJECTS:
                _remove_below(root, file.path)


def _remove_folder(root: Path, name: str) -> None:
    """Remove a folder of the cache with all in it; a link in its place is removed itself. Raises: OSError"""
    path = root / name
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def _remove_below(root: Path, relative: str) -> None:
    """Remove one file; nothing where a link stands on the way, or it is gone. Raises: OSError for any other reason"""
    *folders, name = PurePosixPath(relative).parts
    with _folder(root, folders) as folder:
        if folder is not None:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _folder(root: Path, names: Sequence[str]) -> Iterator[int | None]:
    """Give a descriptor of a folder below ``root``, reached without following a link; None where there is none."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(root, flags)
    try:
        for name in names:
            inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
    except OSError:
        os.close(descriptor)
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _tree_bytes(path: Path) -> int:
    """Return the bytes of all files below ``path``; links count as themselves and are not followed."""
    size_bytes = 0
    if path.is_symlink():
        return 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                size_bytes += Path(folder, name).lstat().st_size
            except OSError:
                pass  # gone meanwhile
    return size_bytes
