"""Opens the history: checks it, moves a damaged one aside, migrates, and gives out connections.

Every writing connection has foreign keys on, a write-ahead log, `synchronous=FULL` and no implicit transactions.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from db.errors import (
    DamagedError,
    ForeignFileError,
    HistoryError,
    NewerSchemaError,
    NoHistoryError,
    UnavailableError,
    UnsupportedFilesystemError,
)
from db.filelock import file_lock
from db.filesystems import network_filesystem
from db.migrations import APPLICATION_ID, NEWEST, migrate

BUSY_TIMEOUT_S = 5.0
LOG_INDEX_BYTES = 32768
MAGIC = b"SQLite format 3\0"
SCHEMA_MARK = b"contiguous_seq INTEGER NOT NULL"
SCHEMA_WITHIN_BYTES = 262144
OLDEST_SQLITE = (3, 37, 0)
"""STRICT tables came with 3.37."""

_READER_SETTINGS = ("trusted_schema = OFF",)
_WRITER_SETTINGS = (*_READER_SETTINGS, "foreign_keys = ON", "synchronous = FULL", "journal_size_limit = 67108864")
_DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True)
class OpenedHistory:
    """A history that is sound and has the newest schema.

    ``history_uuid`` is the subscriber's name on every host. ``moved_aside`` is where a damaged
    predecessor lies now, and ``notice`` says so in one line.
    """

    path: Path
    history_uuid: str
    moved_aside: Path | None = None
    notice: str | None = None


def open_history(path: Path, *, read_only: bool = False) -> OpenedHistory:
    """Return the history at ``path`` checked and migrated; created, or moved aside and created anew, where needed.

    With ``read_only`` nothing is created, checked page by page, moved or migrated.

    Raises: HistoryError, of the kind that `db.errors` names, with what is wrong and what to do.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise HistoryError(f"the history needs SQLite 3.37 or newer; this Python has {sqlite3.sqlite_version}")
    path = Path(os.path.realpath(path))
    _refuse_what_is_no_file(path)
    refuse_network_filesystem(path)
    if read_only:
        with contextlib.closing(connect(path, read_only=True)) as connection:
            return OpenedHistory(path, history_uuid(connection))
    _create_file(path)
    _refuse_other_files(path)
    with file_lock(path.with_name(path.name + ".lock")):
        damage = _find_damage(path)
        moved_aside = _move_aside(path) if damage else None
        if moved_aside:
            _create_file(path)
        with explained(path), contextlib.closing(_connect(path, read_only=False)) as connection:
            _identify(connection, path)
            _enable_wal(connection, path)
            migrate(connection)
            uuid = history_uuid(connection)
    notice = f"the history was damaged ({damage}); it was moved to {moved_aside} and a new one begun"
    return OpenedHistory(path, uuid, moved_aside, notice if moved_aside else None)


def connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Return a connection to a history that exists and has the newest schema; for one thread at a time.

    Raises: HistoryError
    """
    path = Path(os.path.realpath(path))
    status = _refuse_what_is_no_file(path)
    if status is None or status.st_size == 0:
        raise NoHistoryError(f"there is no history at {path} yet")
    _refuse_other_files(path)
    with explained(path):
        connection = _connect(path, read_only=read_only)
        try:
            version = _identify(connection, path)
            if version == 0:
                raise NoHistoryError(f"there is no history at {path} yet")
            if version < NEWEST:
                raise HistoryError(f"{path} has schema {version}; start the console once to bring it to {NEWEST}")
        except BaseException:
            connection.close()
            raise
    return connection


def history_uuid(connection: sqlite3.Connection) -> str:
    """Return the history's own name."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'history_uuid'").fetchone()
    return str(row[0])


def identity(path: Path) -> tuple[int, int] | None:
    """Return what a file of that name is, whatever it is called; None without one."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def refuse_replaced(path: Path, opened: tuple[int, int] | None) -> None:
    """Refuse a history that is not the file any more that was opened. Raises: DamagedError"""
    if identity(path) != opened:
        raise DamagedError(f"the history {path} was moved or replaced while in use; start the console again")


def refuse_network_filesystem(path: Path) -> None:
    """Refuse a path where the processes of one database can't share memory.

    Raises: UnsupportedFilesystemError
    """
    kind = network_filesystem(path)
    if kind is not None:
        raise UnsupportedFilesystemError(
            f"{path} lies on {kind}, a network filesystem, where SQLite's write-ahead log loses data; "
            f"copy it to a local disk (no console open) and name that path instead"
        )


def _refuse_what_is_no_file(path: Path) -> os.stat_result | None:
    """Return the status of the regular file at ``path``, None where there is nothing.

    Raises: UnavailableError for anything else; opening a pipe would wait for ever.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnavailableError(f"the history {path} can't be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        what = "is a directory" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
        raise UnavailableError(f"{path} {what}; name a file for the history")
    return status


def _refuse_other_files(path: Path) -> None:
    """Refuse a file that never was a database, before anything of ours lies beside it.

    A lock or log beside it, or our schema within it, shows a history whose header is damaged. Where neither lock
    nor log is there, no connection of this process has locks that closing a descriptor could drop.

    Raises: ForeignFileError
    """
    if any(path.with_name(path.name + suffix).exists() for suffix in (".lock", "-wal", "-shm")):
        return
    try:
        with path.open("rb") as file:
            head = file.read(SCHEMA_WITHIN_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UnavailableError(f"the history {path} can't be read: {error.strerror}") from error
    is_database = head[: len(MAGIC)] == MAGIC[: len(head)]
    if not is_database and not (b"\0" in head and SCHEMA_MARK in head):
        raise ForeignFileError(f"{path} is not a Glowplug history; name another file")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what SQLite raises about ``path`` into a HistoryError that a person can act on."""
    try:
        yield
    except sqlite3.Error as error:
        raise explain(error, path) from error


def explain(error: sqlite3.Error, path: Path) -> HistoryError:
    """Return the HistoryError for what SQLite raised about ``path``."""
    code = _primary_code(error)
    if code in _DAMAGE_CODES:
        return DamagedError(f"the history {path} is damaged ({error}); start the console to have it moved aside")
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_full(path.parent)):
        return UnavailableError(f"the disk that holds {path} is full: no space left on device")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return UnavailableError(f"another program keeps {path} locked")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return UnavailableError(f"the history {path} can't be {_hindrance(path)} ({error})")
    return UnavailableError(f"the history {path} can't be used: {error}")


def _is_full(folder: Path) -> bool:
    """Whether there is no room for the log's index, whose growth SQLite calls a mere I/O error."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < LOG_INDEX_BYTES


def _hindrance(path: Path) -> str:
    if not _may(path.parent, os.W_OK | os.X_OK):
        return f"used: no permission to write in the folder {path.parent}"
    return "opened"


def _may(path: Path, rights: int) -> bool:
    return os.access(path, rights, effective_ids=os.access in os.supports_effective_ids)


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    if not read_only and path.exists() and not _may(path, os.W_OK):
        raise UnavailableError(f"the history {path} can't be written: no permission to write the file")
    connection = _open(path, "rw" if not read_only else "ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        no_log = not path.with_name(path.name + "-wal").exists()
        if not (read_only and no_log and _primary_code(error) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)):
            raise
        # A folder that can't be written has no room for the log's index; without a log none is needed.
        return _open(path, "ro&immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _open(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=BUSY_TIMEOUT_S,
        check_same_thread=False,
    )
    for setting in _WRITER_SETTINGS if mode == "rw" else _READER_SETTINGS:
        connection.execute(f"PRAGMA {setting}")
    return connection


def _enable_wal(connection: sqlite3.Connection, path: Path) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise UnsupportedFilesystemError(f"SQLite can't keep a write-ahead log beside {path} (it stays at {mode})")


def _identify(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema's version, 0 for an empty file, once it is sure that the file is ours to use."""
    application_id = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    is_empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    _refuse_strangers(path, application_id, version, is_empty)
    return 0 if is_empty else version


def _refuse_strangers(path: Path, application_id: int, version: int, is_empty: bool) -> None:
    if application_id != APPLICATION_ID and not (is_empty and application_id == 0):
        raise ForeignFileError(f"{path} is a database of another program, not a history; name another path")
    if version > NEWEST:
        raise NewerSchemaError(
            f"{path} has schema {version}, written by a newer Glowplug; this one knows schema {NEWEST}: "
            f"update Glowplug, or name another path"
        )


def _find_damage(path: Path) -> str | None:
    """Return what is wrong with the file's content, None when it is sound; it is only read.

    All through SQLite: closing a descriptor of our own would drop the locks of this process's other connections.
    """
    try:
        with contextlib.closing(_open(path, "ro")) as connection:
            # From the header alone: a newer schema, or another program's file, must not be taken for damage.
            application_id = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            _refuse_strangers(path, application_id, version, is_empty=application_id == 0)
            answer: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        if _primary_code(error) in _DAMAGE_CODES:
            return str(error)
        raise explain(error, path) from error
    return None if answer == "ok" else " ".join(answer.split())[:200]


def _create_file(path: Path) -> None:
    """Create the folder and an empty file that only this user may read, unless they are there."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
    except OSError as error:
        raise UnavailableError(f"the history {path} can't be created or written: {error.strerror}") from error


def _move_aside(path: Path) -> Path:
    """Rename the file, its log first, and return its new name."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    names = (f"{path.name}.corrupt-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(1, 1000))))
    target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    try:
        for suffix in ("-wal", "-shm", ""):
            source = path.with_name(path.name + suffix)
            if source.exists():
                source.rename(target.with_name(target.name + suffix))
    except OSError as error:
        raise UnavailableError(f"the damaged history {path} can't be moved aside: {error.strerror}") from error
    return target
