"""What is no history, or can't be used as one: refused with the reason, and left alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from db import filesystems
from db.database import open_history
from db.errors import (
    ForeignFileError,
    HistoryError,
    NewerSchemaError,
    UnavailableError,
    UnsupportedFilesystemError,
)
from db.migrations import NEWEST
from tests.db.disks import small_disk


@contextlib.contextmanager
def without_rights() -> Iterator[Path]:
    """Yield a folder of this user's; root becomes nobody meanwhile, so that permissions count."""
    is_root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp())
    try:
        if is_root:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)
        shutil.rmtree(folder)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_schema_is_refused_with_both_versions(history_path: Path, read_only: bool) -> None:
    """A history that a newer Glowplug wrote is neither touched nor moved."""
    with contextlib.closing(sqlite3.connect(history_path)) as connection:
        connection.execute(f"PRAGMA user_version = {NEWEST + 6}")
    before = history_path.read_bytes()

    with pytest.raises(NewerSchemaError, match=rf"schema {NEWEST + 6}\b.* schema {NEWEST}\b"):
        open_history(history_path, read_only=read_only)
    assert history_path.read_bytes() == before


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A mistyped path to some other database costs that database nothing."""
    path = tmp_path / "places.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE places (name TEXT)")
    before = path.read_bytes()

    with pytest.raises(ForeignFileError, match=r"places\.db is a database of another program"):
        open_history(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("content", [b"groceries\n" * 500, b"x", bytes(8192)], ids=["text", "one byte", "zeros"])
def test_a_file_that_never_was_a_database_is_left_alone(tmp_path: Path, content: bytes, read_only: bool) -> None:
    """A mistyped path to a note moves nothing, writes nothing, and is refused again the next time."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content)

    for _ in range(2):
        with pytest.raises(ForeignFileError, match=r"notes\.txt is not a Glowplug history; name another file"):
            open_history(path, read_only=read_only)
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("notes.txt", content)]


def test_an_unwritable_folder_is_named() -> None:
    """Creating a history where the user may not write says which permission is missing."""
    with without_rights() as folder:
        folder.chmod(0o500)

        with pytest.raises(UnavailableError, match="Permission denied"):
            open_history(folder / "history.db")


def test_a_file_that_may_not_be_written_is_named() -> None:
    """A history that is another user's, or write-protected, is refused with the reason."""
    with without_rights() as folder:
        path = open_history(folder / "history.db").path
        path.chmod(0o400)

        with pytest.raises(UnavailableError, match="no permission to write the file"):
            open_history(path)


def test_a_history_in_a_write_protected_folder_can_be_read() -> None:
    """A copy on a read-only medium answers, although there is no room for the log's index."""
    with without_rights() as folder:
        path = open_history(folder / "history.db").path
        folder.chmod(0o500)

        assert open_history(path, read_only=True).history_uuid


def test_a_folder_in_place_of_the_file_is_an_error_not_damage(tmp_path: Path) -> None:
    """A directory is never moved aside."""
    (tmp_path / "history.db").mkdir()

    with pytest.raises(UnavailableError, match="is a directory"):
        open_history(tmp_path / "history.db")
    assert (tmp_path / "history.db").is_dir()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "device", "link to itself"])
def test_what_can_never_be_a_history_is_refused_with_the_reason(tmp_path: Path, kind: str, read_only: bool) -> None:
    """A pipe, a device and a loop of links are told apart from damage, and opening none of them waits."""
    path = tmp_path / "history.db"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null" if kind == "device" else path)

    with pytest.raises(UnavailableError, match="symbolic links" if kind == "link to itself" else "not a regular file"):
        open_history(path, read_only=read_only)
    assert [found.name for found in tmp_path.iterdir()] == ["history.db"]


def test_no_room_for_the_log_is_said_to_be_a_full_disk(tmp_path: Path) -> None:
    """SQLite calls it an I/O error when the log's index can't grow; the disk is what to look at."""
    with small_disk(tmp_path / "small", "tmpfs") as disk:
        if not disk.folder.is_mount():
            pytest.skip("a small filesystem can't be mounted here")
        path = open_history(disk.folder / "history.db").path
        disk.fill()
        with pytest.raises(UnavailableError, match=r"history\.db.*no space left on device"):
            open_history(path)
        disk.make_room()


@pytest.mark.parametrize("kind", ["tmpfs", "limit"])
def test_a_full_disk_is_said_at_the_start(tmp_path: Path, kind: str) -> None:
    """Without room for a new history the error says so, and with room again it is created."""
    with small_disk(tmp_path / "small", kind) as disk:
        disk.fill()
        with pytest.raises(UnavailableError):
            open_history(disk.folder / "history.db")
        disk.make_room()

        assert open_history(disk.folder / "history.db").moved_aside is None


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_filesystem_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The write-ahead log is never put where processes can't share memory; the error says how to move it."""
    table = tmp_path / "mountinfo"
    table.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / {tmp_path} rw - {kind} server:/x rw\n", encoding="utf-8"
    )
    monkeypatch.setattr(filesystems, "MOUNTINFO", table)

    with pytest.raises(UnsupportedFilesystemError, match=rf"{kind}.*copy it to a local disk"):
        open_history(tmp_path / "data" / "history.db")
    assert not (tmp_path / "data").exists()


def test_an_old_sqlite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python whose SQLite has no STRICT tables says so instead of taking the schema for damage."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))

    with pytest.raises(HistoryError, match=r"SQLite 3\.37 or newer"):
        open_history(tmp_path / "history.db")
