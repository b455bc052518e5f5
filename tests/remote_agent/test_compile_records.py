"""Records of warm-ups are whole, bounded, and believed only where they can be."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent import compile_records
from remote_agent.compile_keys import digest_key
from remote_agent.compile_records import (
    CachedFile,
    WarmUp,
    describe_files,
    find_damaged,
    find_missing,
    note_use,
    read_records,
    write_record,
)

RECORD = WarmUp({"torch": "2.13.0", "dtype": "bfloat16"}, (CachedFile("inductor/a.so", 3),), (), 1_700_000_000)


def record_path(root: Path, record: WarmUp = RECORD) -> Path:
    return root / "records" / f"{digest_key(record.key)}.json"


def change_record(root: Path, **changes: Any) -> None:
    """Write the record with other content under its own name."""
    write_record(root, RECORD)
    path = record_path(root)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    """And its folder holds nothing else."""
    write_record(tmp_path, RECORD)

    assert read_records(tmp_path) == (RECORD,)
    assert list((tmp_path / "records").iterdir()) == [record_path(tmp_path)]


def test_a_directory_without_records_has_none(tmp_path: Path) -> None:
    """Also one that is a file."""
    (tmp_path / "records").touch()

    assert read_records(tmp_path) == read_records(tmp_path / "absent") == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"key": {"torch": "another"}},
        {"key": {"torch": 2}},
        {"key": []},
        {"objects": None},
        {"objects": [{"path": "../../etc/passwd", "size_bytes": 1}]},
        {"objects": [{"path": "/etc/passwd", "size_bytes": 1}]},
        {"objects": [{"path": "a\0b", "size_bytes": 1}]},
        {"objects": [{"path": "a\ud800", "size_bytes": 1}]},
        {"functions": [{"path": "a", "size_bytes": "1"}]},
        {"functions": [{"path": 1, "size_bytes": 1}]},
        {"functions": ["a"]},
        {"objects": [{"path": "a", "size_bytes": 1}] * 5000},
        {"finished_unix_s": float("inf")},
    ],
)
def test_a_record_that_can_not_be_believed_is_skipped(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Foreign, hostile, of another version, or under a name that is not its own key's."""
    change_record(tmp_path, **changes)

    assert read_records(tmp_path) == ()


@given(st.integers(0, 300), st.binary(max_size=40))
def test_a_torn_record_is_skipped(tmp_path_factory: pytest.TempPathFactory, length: int, rest: bytes) -> None:
    """Whatever a death or a disk left of it."""
    root = tmp_path_factory.mktemp("torn")
    write_record(root, RECORD)
    whole = record_path(root).read_bytes()
    torn = whole[: min(length, len(whole) - 3)] + rest
    record_path(root).write_bytes(torn)

    assert read_records(root) in ((), (RECORD,))


def test_a_record_beyond_its_bound_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody fills a worker's memory through the cache's directory."""
    write_record(tmp_path, RECORD)
    monkeypatch.setattr(compile_records, "MAX_RECORD_BYTES", record_path(tmp_path).stat().st_size - 1)

    assert read_records(tmp_path) == ()


def test_a_link_is_no_record(tmp_path: Path) -> None:
    """What it points to is somebody else's."""
    (tmp_path / "other").mkdir()
    write_record(tmp_path / "other", RECORD)
    (tmp_path / "records").mkdir()
    record_path(tmp_path).symlink_to(record_path(tmp_path / "other"))

    assert read_records(tmp_path) == ()


def test_a_failed_write_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing half written beside it."""
    write_record(tmp_path, RECORD)

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_record(tmp_path, WarmUp(RECORD.key))

    assert read_records(tmp_path) == (RECORD,)
    assert list((tmp_path / "records").iterdir()) == [record_path(tmp_path)]


def test_workers_that_write_one_record_at_a_time_leave_a_whole_one(tmp_path: Path) -> None:
    """A reader sees one of theirs, never a part of one and never none."""
    records = [WarmUp(RECORD.key, tuple(CachedFile(f"{n}/{i}", i) for i in range(50 * n)), (), n) for n in range(1, 4)]
    write_record(tmp_path, records[0])
    seen: list[bool] = []

    def write(record: WarmUp) -> None:
        for _ in range(10):
            write_record(tmp_path, record)

    writers = [threading.Thread(target=write, args=(record,)) for record in records]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen += [len(found) == 1 and found[0] in records for found in (read_records(tmp_path),)]
    for writer in writers:
        writer.join()

    assert all(seen)
    assert read_records(tmp_path)[0] in records
    assert list((tmp_path / "records").iterdir()) == [record_path(tmp_path)]


def test_records_longest_unused_are_dropped_with_their_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that was used lately stays, however old it is."""
    monkeypatch.setattr(compile_records, "MAX_RECORDS", 2)
    records = [WarmUp({"torch": str(number)}) for number in range(3)]
    for number, record in enumerate(records[:2]):
        write_record(tmp_path, record)
        (tmp_path / "functions" / digest_key(record.key)).mkdir(parents=True)
        os.utime(record_path(tmp_path, record), (number, number))
    note_use(tmp_path, records[0])

    write_record(tmp_path, records[2])

    assert {record.key["torch"] for record in read_records(tmp_path)} == {"0", "2"}
    assert [path.name for path in (tmp_path / "functions").iterdir()] == [digest_key(records[0].key)]


@pytest.mark.parametrize("name", ["...json", "..json", "other.json"])
def test_a_foreign_name_drops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The functions of what is dropped are named by the file, which may lead out of their folder."""
    monkeypatch.setattr(compile_records, "MAX_RECORDS", 1)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / name).touch()
    os.utime(tmp_path / "records" / name, (0, 0))
    (tmp_path / "functions" / "kept").mkdir(parents=True)

    write_record(tmp_path, RECORD)

    assert (tmp_path / "functions" / "kept").is_dir()
    assert read_records(tmp_path) == (RECORD,)


def test_a_record_that_goes_while_it_is_listed_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker may drop some at any time."""
    write_record(tmp_path, RECORD)
    names = [f"{'0' * 32}.json", *(path.name for path in (tmp_path / "records").iterdir()), f"{'f' * 32}.json"]
    monkeypatch.setattr(os, "listdir", lambda folder: names)

    assert read_records(tmp_path) == (RECORD,)


def test_the_last_used_comes_first(tmp_path: Path) -> None:
    """It is the one to compare with where several are as near."""
    records = [WarmUp({"torch": str(number)}) for number in range(3)]
    for number, record in enumerate(records):
        write_record(tmp_path, record)
        os.utime(record_path(tmp_path, record), (number, number))

    assert read_records(tmp_path) == tuple(reversed(records))


def test_missing_and_damaged_files_are_told_apart_from_whole_ones(tmp_path: Path) -> None:
    """By size where only torch reads them, by digest where we load them."""
    for name in ("whole", "grown", "turned", "gone"):
        (tmp_path / name).write_bytes(b"abc")
    files = describe_files(tmp_path, tuple(tmp_path / name for name in ("whole", "grown", "turned", "gone")))
    (tmp_path / "grown").write_bytes(b"abcd")
    (tmp_path / "turned").write_bytes(b"abd")
    (tmp_path / "gone").unlink()

    assert [file.path for file in find_missing(tmp_path, files)] == ["grown", "gone"]
    assert [file.path for file in find_damaged(tmp_path, files)] == ["grown", "turned", "gone"]
    with pytest.raises(FileNotFoundError):
        describe_files(tmp_path, (tmp_path / "gone",))
