"""The writer's thread: batches, durability before acknowledgement, trouble that passes, two at once."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from db import writer as writer_module
from db.database import connect, open_history
from db.errors import HistoryError, NoHistoryError, WriterFullError
from db.records import GapRow, Record, SampleRow
from db.store import Row, store_batch
from db.writer import Writer
from tests.db.disks import small_disk
from tests.db.histories import contents, event_row, whole_run

DEADLINE_S = 30.0


class Listener:
    """Keeps what a writer says, and lets a test wait for it."""

    def __init__(self) -> None:
        self.durable: list[tuple[str, int]] = []
        self.problems: list[str | None] = []
        self._changed = threading.Condition()

    def on_durable(self, journal_uuid: str, contiguous_seq: int) -> None:
        with self._changed:
            self.durable.append((journal_uuid, contiguous_seq))
            self._changed.notify_all()

    def on_problem(self, text: str | None) -> None:
        with self._changed:
            self.problems.append(text)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, DEADLINE_S)


@contextlib.contextmanager
def writing(path: Path, listener: Listener) -> Iterator[Writer]:
    writer = Writer(path, on_durable=listener.on_durable, on_problem=listener.on_problem)
    try:
        yield writer
    finally:
        writer.close(DEADLINE_S)


def test_what_is_submitted_becomes_durable_and_is_said_after_the_commit(history_path: Path) -> None:
    """When a seq is announced, another connection already sees everything up to it."""
    seen: list[tuple[int, int]] = []

    def look(journal_uuid: str, contiguous_seq: int) -> None:
        seen.append((contiguous_seq, len(contents(history_path)["events"])))

    writer = Writer(history_path, on_durable=look)
    for seq in range(1, 451):
        writer.submit(Record(event_row(seq)))

    assert writer.close(DEADLINE_S)
    assert seen[-1] == (450, 450)
    assert all(stored == contiguous_seq for contiguous_seq, stored in seen)


def test_a_batch_holds_at_most_two_hundred_rows(history_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much waits, one transaction stays small."""
    sizes: list[int] = []

    def measured(connection: sqlite3.Connection, rows: list[Row]) -> dict[str, int]:
        sizes.append(len(rows))
        return store_batch(connection, rows)

    monkeypatch.setattr(writer_module, "store_batch", measured)
    with writing(history_path, Listener()) as writer:
        for seq in range(1, 1001):
            writer.submit(Record(event_row(seq)))
        assert writer.flush(DEADLINE_S)

    assert sum(sizes) == 1000
    assert max(sizes) <= 200


def test_a_row_alone_is_stored_without_being_flushed(history_path: Path) -> None:
    """A batch that never fills is written all the same."""
    listener = Listener()
    with writing(history_path, listener) as writer:
        writer.submit(Record(event_row(1)))

        assert listener.wait_for(lambda: listener.durable == [("journal-1", 1)])


def test_a_replay_is_announced_again_and_stored_once(history_path: Path) -> None:
    """A host that lost the acknowledgement gets it with the repetition."""
    listener = Listener()
    with writing(history_path, listener) as writer:
        for _ in range(2):
            for record in whole_run("run-a"):
                writer.submit(record)
            assert writer.flush(DEADLINE_S)

    assert listener.durable == [("journal-1", 10)] * 2
    assert len(contents(history_path)["events"]) == 10


def test_a_hole_holds_the_acknowledgement_back_until_a_gap_explains_it(history_path: Path) -> None:
    """Seqs beyond a hole are stored and not acknowledged; a gap that the host announces closes it."""
    listener = Listener()
    with writing(history_path, listener) as writer:
        writer.submit(Record(event_row(1)))
        writer.submit(Record(event_row(5)))
        assert writer.flush(DEADLINE_S)
        writer.submit(GapRow("journal-1", "gpu-1", 2, 4))
        assert writer.flush(DEADLINE_S)

    assert listener.durable == [("journal-1", 1), ("journal-1", 5)]


def test_an_impossible_seq_is_left_out(history_path: Path) -> None:
    """What a hostile host makes up neither stops the writer nor is stored."""
    with writing(history_path, Listener()) as writer:
        writer.submit(Record(event_row(2**70)))
        writer.submit(Record(event_row(1)))
        assert writer.flush(DEADLINE_S)

    assert [row[1] for row in contents(history_path)["events"]] == [1]


@pytest.mark.parametrize("kind", ["tmpfs", "limit"])
def test_a_full_disk_loses_nothing_and_acknowledges_nothing(tmp_path: Path, kind: str) -> None:
    """The problem is said, nothing is announced while it lasts, and all is there once there is room again."""
    listener = Listener()
    rows = [Record(event_row(seq, data_json=json.dumps("x" * 2000))) for seq in range(1, 401)]
    with small_disk(tmp_path / "small", kind) as disk:
        path = open_history(disk.folder / "history.db").path
        with writing(path, listener) as writer:
            disk.fill()
            for row in rows:
                writer.submit(row)
            assert listener.wait_for(lambda: bool(listener.problems))
            problem = listener.problems[0]
            assert not writer.flush(0.2)
            assert listener.durable == []
            disk.make_room()
            assert writer.flush(DEADLINE_S)
        stored = contents(path)["events"]

    assert problem is not None
    assert "nothing is lost" in problem
    assert listener.problems[-1] is None
    assert listener.durable[-1] == ("journal-1", 400)
    assert len(stored) == 400


def test_a_lock_that_passes_is_waited_for(history_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program's long transaction delays the batch and loses nothing; a lasting one is said."""
    monkeypatch.setattr("db.database.BUSY_TIMEOUT_S", 0.01)
    listener = Listener()
    with contextlib.closing(connect(history_path, read_only=False)) as other, writing(history_path, listener) as writer:
        other.execute("BEGIN IMMEDIATE")
        writer.submit(Record(event_row(1)))
        assert listener.wait_for(lambda: bool(listener.problems))
        other.execute("ROLLBACK")
        assert writer.flush(DEADLINE_S)

    assert [text and "locked" in text for text in listener.problems] == [True, None]
    assert listener.durable == [("journal-1", 1)]


def test_a_history_replaced_while_open_is_said_and_not_written_to(history_path: Path) -> None:
    """Rows are never acknowledged into a file that has been moved away."""
    listener = Listener()
    writer = Writer(history_path, on_durable=listener.on_durable, on_problem=listener.on_problem)
    history_path.rename(history_path.with_name("moved.db"))
    open_history(history_path)
    writer.submit(Record(event_row(1)))

    assert listener.wait_for(lambda: bool(listener.problems))
    assert not writer.close(0.1)
    assert "moved or replaced" in str(listener.problems[0])
    assert listener.durable == []


def test_a_listener_that_fails_does_not_stop_the_writer(history_path: Path) -> None:
    """An error in a callback is logged and the next batch is written."""

    def fail(journal_uuid: str, contiguous_seq: int) -> None:
        raise RuntimeError("listener")

    writer = Writer(history_path, on_durable=fail)
    for seq in (1, 2):
        writer.submit(Record(event_row(seq)))
        assert writer.flush(DEADLINE_S)

    assert writer.close(DEADLINE_S)
    assert len(contents(history_path)["events"]) == 2


def test_back_pressure_drops_samples_and_then_refuses_records(
    history_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the full mark samples go first, far past it nothing more is taken; what was taken is stored."""
    monkeypatch.setattr(writer_module, "FULL_ROWS", 10)
    monkeypatch.setattr("db.database.BUSY_TIMEOUT_S", 0.01)
    with (
        contextlib.closing(connect(history_path, read_only=False)) as other,
        writing(history_path, Listener()) as writer,
    ):
        other.execute("BEGIN IMMEDIATE")
        accepted = 0
        with pytest.raises(WriterFullError):  # noqa: PT012
            for seq in range(1, 1000):
                writer.submit(Record(event_row(seq)))
                accepted = seq
        was_full = writer.full
        before = writer.pending
        writer.submit(SampleRow("gpu-1", None, 1, "{}"))
        assert writer.pending == before
        other.execute("ROLLBACK")
        assert writer.flush(DEADLINE_S)
        is_full = writer.full

    assert (was_full, is_full) == (True, False)
    assert 40 <= accepted < 400
    assert len(contents(history_path)["events"]) == accepted


def test_a_closed_writer_takes_nothing(history_path: Path) -> None:
    """After close a submit is an error, and closing again is none."""
    writer = Writer(history_path)

    assert writer.close()
    assert writer.close()
    with pytest.raises(HistoryError, match="closed"):
        writer.submit(Record(event_row(1)))


def test_a_writer_needs_a_history(tmp_path: Path) -> None:
    """Without an opened history the writer fails at once, in the caller's thread, and creates nothing."""
    with pytest.raises(NoHistoryError):
        Writer(tmp_path / "history.db")
    assert list(tmp_path.iterdir()) == []


WRITE_FOR_EVER = """
import itertools, sys
from pathlib import Path
from db.writer import Writer
from tests.db.histories import whole_run
journal, first = sys.argv[2], int(sys.argv[3])
def acked(journal_uuid, contiguous_seq):
    sys.stdout.write(f"{contiguous_seq}\\n"); sys.stdout.flush()
writer = Writer(Path(sys.argv[1]), on_durable=acked)
stop = int(sys.argv[4])
for number in itertools.count():
    seq = first + 10 * number
    if seq > stop:
        break
    while writer.full:
        writer.flush(1)
    for record in whole_run(f"{journal}-run-{seq}", seq, journal):
        writer.submit(record)
writer.close(60)
"""


@contextlib.contextmanager
def process_that_writes(path: Path, journal: str, first_seq: int, last_seq: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITE_FOR_EVER, str(path), journal, str(first_seq), str(last_seq)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def assert_whole(path: Path) -> int:
    """Check that the history holds whole events only: each with its run, stages and cursor; return how many."""
    held = contents(path)
    seqs = [int(str(row[1])) for row in held["events"]]
    assert sorted(seqs) == list(range(1, len(seqs) + 1))
    assert held["cursors"] == ([("journal", len(seqs))] if seqs else [])
    finished = [row[1] for row in held["events"] if row[3] == "run.finished"]
    assert len(finished) == len([row for row in held["runs"] if row[4] == "ready"])
    assert {row[0] for row in held["runs"] if row[4] is not None} == {row[2] for row in held["events"]}
    return len(seqs)


@pytest.mark.faults
def test_every_acknowledged_event_survives_sigkill_and_no_batch_is_half(history_path: Path) -> None:
    """A console killed at a random point has lost nothing that it had acknowledged; the next one goes on."""
    chance = random.Random(7)
    stored = 0
    for _ in range(6):
        first_seq = stored // 10 * 10 + 1
        with process_that_writes(history_path, "journal", first_seq, 10**9) as process:
            assert process.stdout is not None
            acked = [int(process.stdout.readline()) for _ in range(chance.randrange(1, 8))]
            process.send_signal(signal.SIGKILL)
            acked += [int(line) for line in process.stdout if line.endswith("\n")]
            process.wait(DEADLINE_S)
        assert open_history(history_path).moved_aside is None
        stored = assert_whole(history_path)

        assert stored >= acked[-1]
    assert stored > 200


def test_two_processes_write_one_history_at_once(history_path: Path) -> None:
    """Two consoles on one database both get everything in, their common journal once."""
    with (
        process_that_writes(history_path, "journal", 1, 2000) as first,
        process_that_writes(history_path, "journal", 1, 2000) as second,
    ):
        acked = [process.communicate(timeout=60)[0].split()[-1] for process in (first, second)]

    assert (first.returncode, second.returncode) == (0, 0)
    assert acked == ["2000", "2000"]
    assert assert_whole(history_path) == 2000
