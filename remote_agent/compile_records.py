"""Records of complete warm-ups: one small JSON file each, ``records/DIGEST.json`` below a compile cache's directory.

What lies there may be torn, foreign or hostile: a record that is not whole, not named by its own key's
digest or that points outside the directory counts as absent, and nothing read here raises.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from remote_agent.compile_keys import DIGEST_DIGITS, Key, digest_key

RECORDS = "records"
FUNCTIONS = "functions"
FORMAT = 1
MAX_RECORDS = 32
MAX_RECORD_BYTES = 1 << 20
MAX_OBJECTS = 4096

_NAME = re.compile(rf"[0-9a-f]{{{DIGEST_DIGITS}}}\.json")


@dataclass(frozen=True)
class CachedFile:
    """One file below the cache's directory: its relative path, its size and, where it is loaded by us, its SHA-256."""

    path: str
    size_bytes: int
    sha256: str | None = None


@dataclass(frozen=True)
class WarmUp:
    """A complete, verified warm-up: its key, the objects it built and the layer functions it saved."""

    key: Key
    objects: tuple[CachedFile, ...] = ()
    functions: tuple[CachedFile, ...] = ()
    finished_unix_s: int = 0


def read_records(root: Path) -> tuple[WarmUp, ...]:
    """Return the records below ``root``, the last used first, at most `MAX_RECORDS`."""
    return tuple(record for path in _list_newest(root)[:MAX_RECORDS] if (record := _read_record(path)) is not None)


def write_record(root: Path, record: WarmUp) -> None:
    """Put ``record`` in the place of the one with the same key, whole, and drop those longest unused.

    Several workers may write the same one at a time; the last stays. Raises: OSError; the old one stays then.
    """
    folder = root / RECORDS
    folder.mkdir(mode=0o700, exist_ok=True)
    content = {"format": FORMAT, **asdict(record)}
    content["key"] = dict(
        content.pop("key")
    )  # the last: a record cut anywhere has not the key that its name is made of
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".new")
    new = Path(name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.replace(_path_of(root, record.key))
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _prune(root)


def note_use(root: Path, record: WarmUp) -> None:
    """Mark a record as used now, so that it outlives those that are not."""
    try:
        os.utime(_path_of(root, record.key))
    except OSError:
        pass  # taken away by another worker, or the directory can only be read


def used_unix_s(root: Path, record: WarmUp) -> int:
    """Return when a record was used last."""
    try:
        return int(_path_of(root, record.key).stat().st_mtime)
    except OSError:
        return record.finished_unix_s  # taken away meanwhile


def find_missing(root: Path, files: tuple[CachedFile, ...]) -> tuple[CachedFile, ...]:
    """Return those of ``files`` that are not there in their recorded size."""
    return tuple(file for file in files if _size(root / file.path) != file.size_bytes)


def find_damaged(root: Path, files: tuple[CachedFile, ...]) -> tuple[CachedFile, ...]:
    """Return those of ``files`` whose bytes are not the recorded ones."""
    return tuple(file for file in files if not _is_whole(root, file))


def describe_files(root: Path, paths: tuple[Path, ...]) -> tuple[CachedFile, ...]:
    """Return what a record says of ``paths``, with their digests. Raises: OSError."""
    return tuple(_describe(root, path) for path in paths)


def _list_newest(root: Path) -> list[Path]:
    found: list[tuple[float, Path]] = []
    try:
        names = os.listdir(root / RECORDS)  # noqa: PTH208 - one that goes meanwhile must not hide the others
    except OSError:
        return []
    for path in (root / RECORDS / name for name in names if _NAME.fullmatch(name)):
        try:
            status = path.lstat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.append((status.st_mtime, path))
    return [path for _, path in sorted(found, key=lambda one: (-one[0], one[1].name))]


def _read_record(path: Path) -> WarmUp | None:
    try:
        data = _read(path, MAX_RECORD_BYTES + 1)
        if len(data) > MAX_RECORD_BYTES:
            return None
        record = _parse(json.loads(data))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if digest_key(record.key) == path.stem else None


def _parse(content: Mapping[str, Any]) -> WarmUp:
    """Raises: ValueError, TypeError or KeyError if it is not a record of this format."""
    if content["format"] != FORMAT:
        raise ValueError("another format")
    key = content["key"]
    if not isinstance(key, dict) or not all(isinstance(value, str) for value in key.values()):
        raise ValueError("no key")
    finished = content["finished_unix_s"]
    if not isinstance(finished, int):
        raise ValueError("no time")
    return WarmUp(key, _parse_files(content["objects"]), _parse_files(content["functions"]), finished)


def _parse_files(content: Any) -> tuple[CachedFile, ...]:
    if not isinstance(content, list) or len(content) > MAX_OBJECTS:
        raise ValueError("no list of files")
    files = tuple(CachedFile(**entry) for entry in content)
    for file in files:
        path = PurePosixPath(os.fsdecode(os.fsencode(file.path)))  # half a surrogate pair is no file's name
        if path.is_absolute() or ".." in path.parts or "\0" in file.path or not isinstance(file.size_bytes, int):
            raise ValueError("a file outside the cache")
    return files


def _path_of(root: Path, key: Key) -> Path:
    return root / RECORDS / f"{digest_key(key)}.json"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _is_whole(root: Path, file: CachedFile) -> bool:
    try:
        return _describe(root, root / file.path) == file
    except OSError:
        return False


def _describe(root: Path, path: Path) -> CachedFile:
    """Raises: OSError."""
    data = _read(path)
    return CachedFile(path.relative_to(root).as_posix(), len(data), hashlib.sha256(data).hexdigest())


def _read(path: Path, most_bytes: int = -1) -> bytes:
    """Return what is there, or its beginning. Raises: OSError.

    NFS answers ESTALE for a file that another host has just replaced; opened anew it is the new one.
    """
    for has_another_try in (True, False):
        try:
            with path.open("rb") as file:
                return file.read(most_bytes)
        except OSError as error:
            if error.errno != errno.ESTALE or not has_another_try:
                raise
    raise AssertionError("unreachable")


def _prune(root: Path) -> None:
    """Drop the records beyond the bound with their functions, and files that a death left half written."""
    for path in _list_newest(root)[MAX_RECORDS:]:
        path.unlink(missing_ok=True)
        shutil.rmtree(root / FUNCTIONS / path.stem, ignore_errors=True)
    for path in (root / RECORDS).glob(".*.new"):
        if (age := _age_s(path)) is not None and age > 3600:
            path.unlink(missing_ok=True)


def _age_s(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return None
