"""Opening a history: what is created, what is refused, what is moved aside."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlite_utils import Database, Migrations

from db import database, migrations
from db.database import connect, open_history
from db.errors import (
    DamagedError,
    HistoryError,
    NoHistoryError,
    UnavailableError,
)
from db.filelock import file_lock
from db.migrations import NEWEST
from db.records import Record
from db.store import store_batch
from tests.db.histories import contents, event_row, whole_run


@pytest.fixture
def filled_path(history_path: Path) -> Path:
    """A history of many pages, all of them in the file itself."""
    with contextlib.closing(connect(history_path, read_only=False)) as connection:
        store_batch(connection, [Record(event_row(seq, f"run-{seq}")) for seq in range(1, 3000)])
    assert history_path.stat().st_size > 20 * 4096
    return history_path


def test_a_new_history_is_private_strict_and_durable(tmp_path: Path) -> None:
    """Folder and file are the user's alone, every table is STRICT, commits are synced, foreign keys hold."""
    opened = open_history(tmp_path / "data" / "history.db")
    with contextlib.closing(connect(opened.path, read_only=False)) as connection:
        loose = [row[1] for row in connection.execute("PRAGMA table_list") if row[2] == "table" and not row[5]]
        settings = [
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]

    assert set(loose) == {"_sqlite_migrations", "sqlite_schema", "sqlite_temp_schema"}
    assert settings == ["wal", 2, 1]
    assert stat.S_IMODE(opened.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(opened.path.parent.stat().st_mode) == 0o700
    assert (opened.moved_aside, opened.notice) == (None, None)


def test_a_history_keeps_its_name(tmp_path: Path) -> None:
    """The uuid that hosts know is the same at every opening, for readers too, and another history has another."""
    first = open_history(tmp_path / "history.db").history_uuid

    assert open_history(tmp_path / "history.db").history_uuid == first
    assert open_history(tmp_path / "history.db", read_only=True).history_uuid == first
    assert open_history(tmp_path / "other.db").history_uuid != first


def test_an_empty_file_becomes_a_history(tmp_path: Path) -> None:
    """A file that a crash left empty is no damage."""
    (tmp_path / "history.db").touch()

    assert open_history(tmp_path / "history.db").moved_aside is None


def overwrite(at: int, data: bytes) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(data)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated in the middle": lambda path: os.truncate(path, path.stat().st_size // 2 + 100),
    "half of it never written": lambda path: overwrite(path.stat().st_size // 2, bytes(path.stat().st_size // 2))(path),
    "cut to a few bytes": lambda path: os.truncate(path, 60),
    "cut to one page": lambda path: os.truncate(path, 4096),
    "not a database": lambda path: Path.write_bytes(path, b"nodes = []\n" * 5000),
    "zeroed header": overwrite(0, bytes(100)),
    "zeroed schema page": overwrite(100, bytes(3996)),
    "zeroed page": overwrite(4096, bytes(4096)),
    "random page": overwrite(3 * 4096, bytes(range(256)) * 16),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_history_is_moved_aside_whole_and_said_so(
    filled_path: Path, damage: Callable[[Path], object]
) -> None:
    """The damaged file keeps every byte under its new name, and a sound new history takes its place."""
    before = open_history(filled_path).history_uuid
    damage(filled_path)
    remains = filled_path.read_bytes()
    opened = open_history(filled_path)

    assert opened.moved_aside is not None
    assert opened.moved_aside.name.startswith("history.db.corrupt-2")
    assert opened.moved_aside.read_bytes() == remains
    assert opened.notice is not None
    assert str(opened.moved_aside) in opened.notice
    assert opened.history_uuid != before
    assert not any(contents(filled_path).values())


def test_the_log_goes_with_the_damaged_file(filled_path: Path, tmp_path: Path) -> None:
    """What a crash left in the write-ahead log is kept beside the file it belongs to."""
    copy = tmp_path / "crashed" / "history.db"
    copy.parent.mkdir()
    with contextlib.closing(connect(filled_path, read_only=False)) as connection:
        store_batch(connection, [Record(event_row(9000))])
        for suffix in ("", "-wal"):
            shutil.copy(filled_path.with_name(filled_path.name + suffix), copy.with_name(copy.name + suffix))
    log_bytes = copy.with_name("history.db-wal").read_bytes()
    overwrite(3 * 4096, bytes(range(256)) * 16)(copy)
    moved = open_history(copy).moved_aside

    assert moved is not None
    assert moved.with_name(moved.name + "-wal").read_bytes() == log_bytes


def test_two_damaged_histories_within_a_second_keep_two_names(history_path: Path) -> None:
    """A second file is never moved over the first."""
    moved = set()
    for _ in range(3):
        history_path.write_bytes(b"rubbish" * 1000)
        moved.add(open_history(history_path).moved_aside)

    assert len(moved) == 3


def test_a_reader_leaves_a_damaged_history_where_it_is(filled_path: Path) -> None:
    """Reading alone moves nothing and says what is wrong."""
    overwrite(0, bytes(100))(filled_path)

    with pytest.raises(DamagedError, match="damaged"):
        open_history(filled_path, read_only=True)
    assert [path.name for path in filled_path.parent.iterdir() if "corrupt" in path.name] == []


def test_a_reader_of_nothing_creates_nothing(tmp_path: Path) -> None:
    """Asking for a history that is not there says so, and leaves no file."""
    with pytest.raises(NoHistoryError, match="no history at"):
        open_history(tmp_path / "data" / "history.db", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_an_older_schema_is_brought_up_to_date_with_all_that_it_holds(
    filled_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next migration runs once, on the rows that are there; a reader waits for it and says so."""
    before = contents(filled_path)
    later = Migrations("glowplug")

    @later(name="0001_first")
    def create(db: Database) -> None:
        raise AssertionError("the first migration was applied long ago")

    @later(name="0002_rollouts")
    def roll_out(db: Database) -> None:
        raise AssertionError("and so was the second")

    @later(name="0003_watches")
    def watch(db: Database) -> None:
        raise AssertionError("and so was the third")

    @later(name="0004_fourth")
    def add(db: Database) -> None:
        db.execute("ALTER TABLE nodes ADD COLUMN note TEXT")

    monkeypatch.setattr(migrations, "migrations", later)
    for module in (migrations, database):
        monkeypatch.setattr(module, "NEWEST", NEWEST + 1)
    with pytest.raises(HistoryError, match=f"has schema {NEWEST}; start the console once to bring it to {NEWEST + 1}"):
        connect(filled_path, read_only=True)
    open_history(filled_path)
    opened = open_history(filled_path)

    assert opened.moved_aside is None
    with contextlib.closing(connect(filled_path, read_only=True)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (NEWEST + 1,)
        assert connection.execute("SELECT name, note FROM nodes").fetchall() == [("gpu-1", None)]
    assert contents(filled_path).keys() == before.keys()
    assert contents(filled_path)["events"] == before["events"]


def test_a_copy_with_a_damaged_header_is_known_by_its_schema(filled_path: Path, tmp_path: Path) -> None:
    """A history that lies alone, without its lock and log, is moved aside all the same."""
    copy = tmp_path / "copied" / "history.db"
    copy.parent.mkdir()
    shutil.copy(filled_path, copy)
    overwrite(0, bytes(100))(copy)

    assert open_history(copy).moved_aside is not None


OPEN_AT_ONCE = """
import sys
from pathlib import Path
from db.database import open_history
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.readline()
print(open_history(Path(sys.argv[1])).history_uuid)
"""


@pytest.mark.parametrize("content", ["nothing", "damage"])
def test_processes_that_start_at_once_agree(tmp_path: Path, content: str) -> None:
    """Four processes that create, or repair, one history at the same instant end with the same one."""
    path = tmp_path / "history.db"
    if content == "damage":
        open_history(path)
        path.write_bytes(b"rubbish" * 1000)
    command = [sys.executable, "-c", OPEN_AT_ONCE, str(path)]
    with contextlib.ExitStack() as stack:
        openers = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(4)
        ]
        for opener in openers:
            assert opener.stdout is not None
            assert opener.stdout.readline() == "ready\n"
        answers = []
        for opener in openers:
            assert opener.stdin is not None
            opener.stdin.write("go\n")
            opener.stdin.flush()
        for opener in openers:
            answers.append(opener.communicate(timeout=60)[0].strip())

    assert answers == [open_history(path).history_uuid] * 4
    assert len(list(tmp_path.glob("history.db.corrupt-*"))) == (content == "damage")


def test_a_lock_that_is_never_released_is_named(tmp_path: Path) -> None:
    """Waiting for another process ends, and the error names the lock."""
    held, wanted = (file_lock(tmp_path / "lock", timeout_s) for timeout_s in (60, 0.05))

    with held, pytest.raises(UnavailableError, match="another process has held"), wanted:
        pass


def test_opening_again_leaves_the_locks_of_an_open_connection(history_path: Path) -> None:
    """A second opening in one process doesn't make another process believe that nobody is here.

    It would then delete the log under the first connection.
    """
    with contextlib.closing(connect(history_path, read_only=False)) as connection:
        store_batch(connection, whole_run("run-a"))
        open_history(history_path)
        other = (
            f"import sqlite3; c = sqlite3.connect({str(history_path)!r}); c.execute('SELECT * FROM runs'); c.close()"
        )
        subprocess.run([sys.executable, "-c", other], check=True)

        assert history_path.with_name("history.db-wal").stat().st_size > 0
