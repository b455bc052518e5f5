"""Whatever the order and however often events come, the history ends the same."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from db.database import connect, open_history
from db.records import GapRow, Record, SampleRow, StageRow
from db.store import Row, is_storable, store_batch
from tests.db.histories import contents, contiguous, event_row, run_row, whole_run

TWO_HOSTS = [*whole_run("run-a"), Record(event_row(11)), *whole_run("run-b", 1, "journal-2", state="failed")]


def store(path: Path, *batches: Sequence[Row]) -> dict[str, int]:
    """Store the batches one after the other; return what the last one made contiguous."""
    cursors: dict[str, int] = {}
    with contextlib.closing(connect(path, read_only=False)) as connection:
        for batch in batches:
            cursors = store_batch(connection, batch)
    return cursors


def canonical() -> dict[str, list[tuple[object, ...]]]:
    with tempfile.TemporaryDirectory() as folder:
        path = open_history(Path(folder) / "history.db").path
        store(path, TWO_HOSTS)
        return contents(path)


@st.composite
def deliveries(draw: st.DrawFn) -> list[list[Record]]:
    """Every record at least once, in any order, some again, cut into batches anywhere."""
    repeated = draw(st.lists(st.sampled_from(TWO_HOSTS), max_size=15))
    shuffled = draw(st.permutations([*TWO_HOSTS, *repeated]))
    cuts = sorted(draw(st.lists(st.integers(0, len(shuffled)), max_size=5)))
    return [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(shuffled)], strict=True)]


@given(deliveries())
@settings(max_examples=60, deadline=None)
def test_any_order_with_repetitions_ends_in_the_same_rows_and_cursors(batches: list[list[Record]]) -> None:
    """Replays, overlaps and events out of order leave exactly what one orderly delivery leaves."""
    with tempfile.TemporaryDirectory() as folder:
        path = open_history(Path(folder) / "history.db").path
        store(path, *batches)

        assert contents(path) == canonical()


@given(
    st.lists(st.integers(1, 12), max_size=20), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), max_size=3)
)
@settings(max_examples=60, deadline=None)
def test_the_cursor_is_the_highest_contiguous_seq_with_gaps_counted_as_stored(
    seqs: list[int], gaps: list[tuple[int, int]]
) -> None:
    """The cursor after each batch covers events and announced gaps from 1 on, and nothing beyond a hole."""
    with tempfile.TemporaryDirectory() as folder:
        path = open_history(Path(folder) / "history.db").path
        rows: list[Row] = [Record(event_row(seq)) for seq in seqs]
        rows += [GapRow("journal-1", "gpu-1", start, start + length) for start, length in gaps]
        covered = list(seqs)
        for start, length in gaps:
            covered += range(start, start + length + 1)

        for row in rows:
            store(path, [row])

        assert contents(path)["cursors"] == ([("journal-1", contiguous(covered))] if rows else [])


def test_a_batch_reports_the_cursor_of_each_journal_it_names(history_path: Path) -> None:
    """A hole holds one journal back and not the other."""
    cursors = store(history_path, [Record(event_row(1)), Record(event_row(3)), Record(event_row(1, journal="other"))])

    assert cursors == {"journal-1": 1, "other": 1}


def test_a_repetition_reports_the_cursor_again_and_changes_no_byte(history_path: Path) -> None:
    """A replay is acknowledged, and costs neither a row nor a write to the log."""
    store(history_path, TWO_HOSTS)
    with contextlib.closing(connect(history_path, read_only=False)) as connection:
        before = connection.total_changes
        cursors = store_batch(connection, TWO_HOSTS)

        assert cursors == {"journal-1": 11, "journal-2": 10}
        assert connection.total_changes == before


def test_a_late_event_never_turns_a_finished_run_back(history_path: Path) -> None:
    """A run that is ready stays ready when an earlier and a later word about it come in after that."""
    records = whole_run("run-a")
    store(history_path, [records[-1]])
    late = Record(event_row(50, "run-a"), run_row("run-a", state="running"), (StageRow(0, "queue", "running"),))
    store(history_path, records[:-1], [late])

    assert contents(history_path)["runs"][0][4] == "ready"
    assert {row[3] for row in contents(history_path)["stages"]} == {"done"}


def test_a_later_final_word_replaces_an_earlier_one(history_path: Path) -> None:
    """A run that was stuck and could be ended later shows how it ended."""
    stuck = Record(event_row(2, "run-a"), run_row("run-a", state="stuck"))
    ended = Record(event_row(3, "run-a"), run_row("run-a", state="cancelled"))
    store(history_path, [ended], [stuck])

    assert contents(history_path)["runs"][0][4] == "cancelled"


def test_a_batch_that_fails_leaves_nothing(history_path: Path) -> None:
    """An error in the last row takes back the rows before it."""
    broken = Record(event_row(2), run_row("run-a", state=None))

    with pytest.raises(sqlite3.IntegrityError):
        store(history_path, [Record(event_row(1)), broken])
    assert not any(contents(history_path).values())


def test_a_sample_is_stored_once_even_when_two_consoles_store_it(history_path: Path) -> None:
    """The same sample twice is one row; another content at the same instant is a second one."""
    sample = SampleRow("gpu-1", "run-a", 5, '{"done": 1}')
    store(history_path, [*whole_run("run-a"), sample, sample, dataclasses.replace(sample, data_json='{"done": 2}')])
    store(history_path, [sample, SampleRow("gpu-1", None, 5, "{}")])

    assert len(contents(history_path)["samples"]) == 3


@pytest.mark.parametrize("seq", [0, -1, 2**63])
def test_a_seq_that_no_journal_can_have_is_told_apart(seq: int) -> None:
    """A host's impossible number is refused before it reaches a batch."""
    assert not is_storable(Record(event_row(seq)))
    assert not is_storable(GapRow("journal-1", "gpu-1", seq, seq))
    assert is_storable(Record(event_row(2**63 - 1)))


def test_numbers_and_text_that_sqlite_cannot_hold_are_bent_to_fit(history_path: Path) -> None:
    """A host that sends huge integers or half a surrogate pair stops nothing."""
    store(history_path, [Record(event_row(1, t_mono_ns=2**80, data_json="half \ud83d pair \0"))])

    assert contents(history_path)["events"][0][4] == "half \\ud83d pair \0"
