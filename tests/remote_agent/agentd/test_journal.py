"""The journal on disk: what a crash, a full disk, damage and trimming leave of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from remote_agent.agentd import segments
from remote_agent.agentd.cursors import MAX_SUBSCRIBERS, REMEMBERED_S, Cursors
from remote_agent.agentd.journal import RECENT_EVENTS, Journal, JournalLimits
from remote_agent.errors import JournalError, RefusedError
from remote_agent.protocol.messages import Event, Finding

MACHINE = "machine-one"
DAY_NS = 24 * 3600 * 10**9


def event(text: str = "x", kind: str = "finding") -> Event:
    return Event(0, None, 1, 2, kind, Finding("code", "info", text))


def opened(folder: Path, machine: str = MACHINE, limits: JournalLimits | None = None) -> Journal:
    return Journal(folder / "journal", machine, limits)


def filled(folder: Path, count: int, limits: JournalLimits | None = None) -> Journal:
    """Return a journal with ``count`` events, each committed by itself."""
    journal = opened(folder, limits=limits)
    for number in range(journal.newest_seq + 1, journal.newest_seq + 1 + count):
        journal.append(event(f"event {number}"))
        journal.commit()
    return journal


def only_segment(folder: Path) -> Path:
    (path,) = (folder / "journal").glob("*.jsonl")
    return path


def seqs(events: list[Event]) -> list[int]:
    return [found.seq for found in events]


def test_what_is_committed_is_there_after_a_restart(tmp_path: Path) -> None:
    """Seqs go on where they were, under the same uuid."""
    first = filled(tmp_path, 3)
    first.close()
    again = filled(tmp_path, 2)

    assert again.journal_uuid == first.journal_uuid
    assert seqs(again.read(0, 10)) == [1, 2, 3, 4, 5]
    again.close()


def test_a_group_is_synchronised_once_and_before_it_is_returned(tmp_path: Path) -> None:
    """One sync makes a whole group durable; nothing is returned without it."""
    synced: list[int] = []
    journal = Journal(tmp_path / "journal", MACHINE, sync=synced.append)
    for _ in range(5):
        journal.append(event())

    assert synced == []
    assert seqs(journal.commit()) == [1, 2, 3, 4, 5]
    assert len(synced) == 1
    journal.close()


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    """A crash in the middle of a write costs the event that was never told, and its seq is used again."""
    journal = filled(tmp_path, 3)
    journal.close()
    path = only_segment(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    again = opened(tmp_path)

    assert again.lost_reason is None
    assert again.journal_uuid == journal.journal_uuid
    assert seqs(again.read(0, 10)) == [1, 2]
    again.append(event("new"))
    assert seqs(again.commit()) == [3]
    again.close()
    assert opened_seqs(tmp_path) == [1, 2, 3]


def opened_seqs(folder: Path) -> list[int]:
    journal = opened(folder)
    found = seqs(journal.read(0, 1000))
    journal.close()
    return found


@pytest.mark.parametrize("position", [3, 60])
def test_damage_before_intact_lines_begins_a_new_journal(tmp_path: Path, position: int) -> None:
    """A changed byte that events follow can't be a torn write: the journal is put aside under a new uuid."""
    journal = filled(tmp_path, 3)
    journal.close()
    path = only_segment(tmp_path)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    again = opened(tmp_path)

    assert again.journal_uuid != journal.journal_uuid
    assert "damaged after event 0" in (again.lost_reason or "")
    assert (again.newest_seq, again.oldest_seq) == (0, 1)
    assert (tmp_path / "journal.lost" / path.name).read_bytes() == content
    again.close()


@pytest.mark.parametrize("lose", ["meta.json", "segment"])
def test_an_incomplete_journal_begins_anew(tmp_path: Path, lose: str) -> None:
    """Without its identity or its segments a journal can't go on, since seqs would be used twice."""
    journal = filled(tmp_path, 2)
    journal.close()
    (only_segment(tmp_path) if lose == "segment" else tmp_path / "journal" / lose).unlink()
    again = opened(tmp_path)

    assert again.journal_uuid != journal.journal_uuid
    assert again.lost_reason
    again.close()


def test_a_missing_segment_in_the_middle_begins_anew(tmp_path: Path) -> None:
    """A hole between segments is damage."""
    journal = filled(tmp_path, 10, JournalLimits(segment_bytes=200))
    journal.close()
    sorted((tmp_path / "journal").glob("*.jsonl"))[1].unlink()
    again = opened(tmp_path)

    assert again.journal_uuid != journal.journal_uuid
    again.close()


def test_another_machine_begins_anew(tmp_path: Path) -> None:
    """A copied state directory does not continue the other machine's history."""
    journal = filled(tmp_path, 2)
    journal.close()
    again = opened(tmp_path, "machine-two")

    assert again.journal_uuid != journal.journal_uuid
    assert "another machine" in (again.lost_reason or "")
    again.close()


class FailingDisk:
    """A disk that writes ``room`` more bytes and then is full, until it is told otherwise."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, descriptor: int, data: bytes, offset: int) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = os.pwrite(descriptor, data[: self.room], offset)
        self.room -= done
        return done


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """Events wait while the disk is full, none is returned before it is durable, and all are there afterwards."""
    disk = FailingDisk(300)
    journal = Journal(tmp_path / "journal", MACHINE, write=disk.write)
    told: list[int] = []
    for number in range(10):
        journal.append(event(f"event {number}"))
        told += seqs(journal.commit())
    failure, waiting = journal.failure, journal.pending

    assert failure is not None
    assert failure.errno == errno.ENOSPC
    assert len(told) + waiting == 10
    assert seqs(journal.read(0, 100)) == told
    disk.room = 1 << 20
    told += seqs(journal.commit())
    journal.close()
    assert told == list(range(1, 11))
    assert journal.failure is None
    assert opened_seqs(tmp_path) == told


def test_a_restart_on_a_full_disk_keeps_what_was_told(tmp_path: Path) -> None:
    """A half-written group is cut off at the next start; what was committed before it is whole."""
    disk = FailingDisk(1 << 20)
    journal = Journal(tmp_path / "journal", MACHINE, write=disk.write)
    journal.append(event("told"))
    journal.commit()
    disk.room = 20
    journal.append(event("never told"))
    journal.commit()
    journal.close()

    assert opened_seqs(tmp_path) == [1]


def test_a_failing_sync_is_a_failing_write(tmp_path: Path) -> None:
    """What could not be synchronised was not told, and is written again."""
    outcomes: list[Exception | None] = [OSError(errno.EIO, "I/O error"), None]

    def sync(descriptor: int) -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    journal = Journal(tmp_path / "journal", MACHINE, sync=sync)
    journal.append(event())

    assert journal.commit() == []
    assert seqs(journal.commit()) == [1]
    journal.close()


def test_what_waits_for_a_full_disk_is_bounded_and_ends_of_runs_are_kept(tmp_path: Path) -> None:
    """Stage events go first: the end of a run repeats them."""
    disk = FailingDisk(0)
    journal = Journal(tmp_path / "journal", MACHINE, JournalLimits(pending_events=10), write=disk.write)
    for kind in ["run.accepted", *["run.stage"] * 50, "run.finished"]:
        journal.append(event(kind=kind))
        journal.commit()
    disk.room = 1 << 20
    kinds = [found.kind for found in journal.commit()]

    assert len(kinds) == 10
    assert (kinds[0], kinds[-1]) == ("run.accepted", "run.finished")
    journal.close()


def test_events_are_read_back_from_memory_and_disk_alike(tmp_path: Path) -> None:
    """Any place in the journal gives the same events, however long ago they were committed."""
    count = RECENT_EVENTS + 50
    journal = filled(tmp_path, count, JournalLimits(segment_bytes=2000))
    replayed: list[int] = []
    while len(replayed) < count:
        replayed += seqs(journal.read(len(replayed), 7))

    assert replayed == list(range(1, count + 1))
    assert seqs(journal.read(count - 2, 7)) == [count - 1, count]
    assert journal.read(count, 7) == []
    journal.close()


def test_trimming_deletes_whole_segments_that_everyone_has(tmp_path: Path) -> None:
    """The oldest event moves up to a segment's start, never past what is acknowledged."""
    journal = filled(tmp_path, 20, JournalLimits(segment_bytes=300))
    journal.trim(9)
    oldest = journal.oldest_seq

    assert 1 < oldest <= 10
    assert seqs(journal.read(0, 100))[0] == oldest
    journal.close()
    assert opened_seqs(tmp_path)[0] == oldest


def test_without_subscribers_nothing_is_trimmed_below_the_cap(tmp_path: Path) -> None:
    """Events that nobody asked for yet are kept for the first who does."""
    journal = filled(tmp_path, 20, JournalLimits(segment_bytes=300))

    assert not journal.trimmable(None)
    journal.trim(None)
    assert journal.oldest_seq == 1
    journal.close()


def test_over_the_cap_the_oldest_go_whoever_lacks_them(tmp_path: Path) -> None:
    """The size on disk is bounded, the segment in use left alone."""
    journal = filled(tmp_path, 100, JournalLimits(segment_bytes=300, cap_bytes=1500))
    journal.trim(0)
    size = sum(path.stat().st_size for path in (tmp_path / "journal").glob("*.jsonl"))

    assert size <= 1500
    assert 1 < journal.oldest_seq < journal.newest_seq
    journal.close()


@given(st.lists(st.text(max_size=30), max_size=20), st.integers(min_value=0), st.integers(0, 255))
def test_any_damage_to_a_segment_gives_a_prefix_or_is_seen(texts: list[str], where: int, what: int) -> None:
    """After any one changed byte, what counts as intact is a prefix of what was written, unchanged."""
    lines = [segments.encode_line(Event(i, None, 1, 2, "finding", {"text": t})) for i, t in enumerate(texts, 1)]
    data = bytearray(b"".join(lines))
    if data:
        data[where % len(data)] = what
    found = segments.scan(bytes(data), 1)

    assert b"".join(lines).startswith(bytes(data[: found.good_bytes]))
    assert found.good_bytes == sum(len(line) for line in lines[: found.last_seq])


@given(st.lists(st.text(max_size=30), min_size=1, max_size=20), st.integers(min_value=0))
def test_any_cut_of_a_segment_is_torn_and_never_broken(texts: list[str], where: int) -> None:
    """A write that a crash cut short anywhere leaves whole lines and one torn tail."""
    lines = [segments.encode_line(Event(i, None, 1, 2, "finding", {"text": t})) for i, t in enumerate(texts, 1)]
    data = b"".join(lines)
    found = segments.scan(data[: where % len(data)], 1)

    assert not found.broken
    assert found.good_bytes == sum(len(line) for line in lines[: found.last_seq])


def test_a_line_that_changed_since_it_was_written_is_not_read(tmp_path: Path) -> None:
    """Reading checks again: a damaged event is an error, never a wrong event."""
    journal = filled(tmp_path, RECENT_EVENTS + 5)
    path = only_segment(tmp_path)
    content = bytearray(path.read_bytes())
    content[30] ^= 1
    path.write_bytes(content)

    with pytest.raises(JournalError, match="a damaged line"):
        journal.read(0, 10)
    journal.close()


# --- cursors ---


@pytest.fixture
def cursors(tmp_path: Path) -> Callable[[], Cursors]:
    """Return a function that opens the same cursors again."""
    return lambda: Cursors(tmp_path / "cursors.json", "journal-1")


def test_cursors_are_kept_whole(cursors: Callable[[], Cursors], tmp_path: Path) -> None:
    """What was saved is there again; another journal's cursors are not taken over."""
    first = cursors()
    first.subscribe("laptop", 5, DAY_NS)
    first.ack("laptop", 9, DAY_NS)
    first.save()

    assert cursors().highest == 9
    assert Cursors(tmp_path / "cursors.json", "journal-2").highest == 0


def test_a_torn_cursor_file_is_as_good_as_none(cursors: Callable[[], Cursors], tmp_path: Path) -> None:
    """Subscribers say where they are when they come back, so nothing depends on the file."""
    (tmp_path / "cursors.json").write_bytes(b'{"journal_uuid": "journal-1", "subscr')

    assert cursors().highest == 0


def test_only_subscribers_of_the_last_week_hold_events_back(cursors: Callable[[], Cursors]) -> None:
    """A laptop that was thrown away does not fill the disk for ever."""
    now_ns = (REMEMBERED_S + 100) * 10**9
    known = cursors()
    known.subscribe("old", 1, 0)
    known.subscribe("new", 7, now_ns)

    assert known.lowest_recent(now_ns) == 7
    known.touch("old", now_ns)
    assert known.lowest_recent(now_ns) == 1


def test_an_ack_never_takes_a_cursor_back(cursors: Callable[[], Cursors]) -> None:
    """Late acknowledgements change nothing; a restored history subscribes from further back, and that counts."""
    known = cursors()
    known.subscribe("laptop", 9, 1)
    known.ack("laptop", 4, 1)
    assert known.lowest_recent(1) == 9
    known.subscribe("laptop", 2, 1)
    assert known.lowest_recent(1) == 2


def test_subscribers_are_bounded(cursors: Callable[[], Cursors]) -> None:
    """Names are short and few; the one not seen for longest makes room."""
    known = cursors()
    for number in range(MAX_SUBSCRIBERS + 1):
        known.subscribe(f"s{number}", number, number)
    with pytest.raises(RefusedError):
        known.subscribe("x" * 1000, 0, 0)
    with pytest.raises(RefusedError):
        known.ack("s0", 1, 1)
