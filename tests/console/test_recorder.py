"""What the recorder writes, what it leaves out, and when it acknowledges."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.recorder import Recorder
from console.reduce import reduce
from console.state import EventReceived, HelloReceived, NodeState
from db.database import open_history
from db.errors import WriterFullError
from db.queries import History
from db.records import GapRow, Record, SampleRow
from db.writer import Writer
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import (
    Event,
    Gap,
    HostSample,
    Progress,
    RunFinished,
    RunStarted,
    RunState,
    Sample,
    StageStatus,
)
from tests.console.happenings import accepted, event, hello, journals, record, resident, stage

UID = "run-00000001"
JOURNAL = "journal-1"
SECOND_NS = 1_000_000_000


class Rows:
    """A store that keeps what it is given, and can be full."""

    def __init__(self) -> None:
        self.taken: list[Record | SampleRow | GapRow] = []
        self.is_full = False

    @property
    def full(self) -> bool:
        return self.is_full

    def submit(self, row: Record | SampleRow | GapRow, /) -> None:
        if self.is_full:
            raise WriterFullError("40000 rows wait")
        self.taken.append(row)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def feed(recorder: Recorder, events: list[Event], state: NodeState | None = None) -> NodeState:
    state = state or reduce(NodeState("n1"), HelloReceived(hello(), 1))
    for one in events:
        state = reduce(state, EventReceived(one, 1))
        recorder.event(
            "n1", JOURNAL, one, json.dumps(encode(one.data)), state.runs.get(one.run_uid) if one.run_uid else None
        )
    return state


WHOLE_RUN = [
    event(1, accepted()),
    event(2, RunStarted()),
    event(3, stage("preflight", StageStatus.DONE, 0, 5, tier_from="cached")),
    event(4, stage("weights", StageStatus.RUNNING, 5)),
    event(5, RunFinished(record())),
    event(6, resident()),
]


def test_an_event_becomes_a_record_with_what_it_changes(loop: asyncio.AbstractEventLoop) -> None:
    """The run's row is written when it changes, a stage's with each of its events, all at the end."""
    rows = Rows()

    feed(Recorder(rows, loop), WHOLE_RUN)

    records = [row for row in rows.taken if isinstance(row, Record)]
    assert [row.event.seq for row in records] == [1, 2, 3, 4, 5, 6]
    assert [row.run.state if row.run else None for row in records] == [
        "queued", "running", "running", None, "ready", None,
    ]  # fmt: skip
    assert records[2].run is not None
    assert records[2].run.tier_from == "cached"
    assert [[one.name for one in row.stages] for row in records[2:4]] == [["preflight"], ["weights"]]
    assert [one.ordinal for one in records[4].stages] == list(range(10))
    assert json.loads(records[0].event.data_json)["recipe"]["name"] == "llama"


@given(journals(), st.lists(st.integers(0, 30), max_size=4))
@settings(deadline=None, max_examples=25)
def test_a_replay_leaves_the_history_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event], restarts: list[int]
) -> None:
    """Whatever part is sent again, by whatever console, each event is stored once and every run stays the same."""
    once, often = (_store(tmp_path_factory.mktemp("h"), events, cuts) for cuts in ([], restarts))

    assert once == often


def _store(directory: Path, events: list[Event], restarts: list[int]) -> object:
    path = open_history(directory / "history.db").path
    loop = asyncio.new_event_loop()
    writer = Writer(path)
    try:
        recorder = Recorder(writer, loop)
        state = feed(recorder, events)
        for at in restarts:
            feed(recorder, events[at:], state)
        assert writer.flush(20)
        with History(path) as history:
            uids = sorted({one.run_uid for one in events if one.run_uid})
            return [(history.run(uid), history.events(uid)) for uid in uids]
    finally:
        writer.close()
        loop.close()


def test_a_run_that_is_known_to_be_over_is_finished_by_its_last_event_only(loop: asyncio.AbstractEventLoop) -> None:
    """Status may tell the end first; the history waits for the event that says it."""
    rows = Rows()
    over = feed(Recorder(Rows(), loop), WHOLE_RUN)

    Recorder(rows, loop).event("n1", JOURNAL, event(2, RunStarted()), "{}", over.runs[UID])

    assert isinstance(rows.taken[0], Record)
    assert rows.taken[0].run is None


def test_stages_of_a_later_version_keep_one_place_each(loop: asyncio.AbstractEventLoop) -> None:
    """An unknown stage has the same ordinal in every event, behind the known ones."""
    rows = Rows()
    one, other = stage("teleport", StageStatus.RUNNING), stage("teleport", StageStatus.DONE)

    feed(Recorder(rows, loop), [event(1, accepted()), event(2, one), event(3, other)])

    ordinals = {row.stages[0].ordinal for row in rows.taken if isinstance(row, Record) and row.stages}
    assert len(ordinals) == 1
    assert ordinals.pop() >= 1000


def sample(at_ns: int, progress: bool = False) -> Sample:
    moved = Progress(UID, "weights", at_ns, None)
    return Sample(at_ns, at_ns, progress=moved if progress else None, host=None if progress else HostSample(2, 1, 0.5))


def test_samples_are_kept_once_a_second_while_something_runs(loop: asyncio.AbstractEventLoop) -> None:
    """Ten a second become one of each kind; a clock that went back does not stop them; idle nodes write nothing."""
    rows = Rows()
    recorder = Recorder(rows, loop)
    running = feed(Recorder(Rows(), loop), WHOLE_RUN[:2]).run
    over = replace(running, state=RunState.READY) if running else None

    for tenth in range(25):
        for progress in (False, True):
            recorder.sample("n1", sample(tenth * SECOND_NS // 10, progress), running)
    assert [row.t_wall_ns // SECOND_NS for row in rows.taken if isinstance(row, SampleRow)] == [0, 0, 1, 1, 2, 2]

    recorder.sample("n1", sample(0), running)
    assert len(rows.taken) == 7
    recorder.sample("n1", sample(90 * SECOND_NS), over)
    recorder.sample("n1", sample(91 * SECOND_NS), None)
    assert len(rows.taken) == 7


def test_a_refused_record_stops_its_journal_until_it_is_sent_again(loop: asyncio.AbstractEventLoop) -> None:
    """Nothing is written past a hole; after resume the replay goes in."""
    rows = Rows()
    recorder = Recorder(rows, loop)
    rows.is_full = True
    feed(recorder, WHOLE_RUN[:2])
    rows.is_full = False
    feed(recorder, WHOLE_RUN[2:])
    assert rows.taken == []
    assert recorder.refused == {JOURNAL}

    recorder.resume(JOURNAL)
    feed(recorder, WHOLE_RUN)

    assert len(rows.taken) == 6


def test_gaps_are_stored_so_that_the_cursor_can_pass(loop: asyncio.AbstractEventLoop) -> None:
    """What was trimmed on the host is known to be lost."""
    rows = Rows()

    Recorder(rows, loop).gap("n1", JOURNAL, Gap(3, 9))

    assert rows.taken == [GapRow(JOURNAL, "n1", 3, 9)]


async def test_an_acknowledgement_comes_on_the_loop_after_the_commit(tmp_path: Path) -> None:
    """The writer's thread never calls a link; what is acknowledged is in the file."""
    path = open_history(tmp_path / "history.db").path
    writer = Writer(path)
    recorder = Recorder(writer, asyncio.get_running_loop())
    writer.on_durable = recorder.durable
    acked: asyncio.Queue[tuple[str, int, int]] = asyncio.Queue()
    recorder.follow(JOURNAL, lambda journal, seq: acked.put_nowait((journal, seq, threading.get_ident())))

    feed(recorder, WHOLE_RUN[:3])
    seq = 0
    while seq < 3:
        journal, seq, thread = await asyncio.wait_for(acked.get(), 20)
        assert (journal, thread) == (JOURNAL, threading.get_ident())
        with History(path) as history:
            assert history.cursor(JOURNAL) >= seq

    writer.close()


def test_a_commit_after_the_loop_has_closed_is_harmless(loop: asyncio.AbstractEventLoop) -> None:
    """At the end of a console the writer may still be at work."""
    recorder = Recorder(Rows(), loop)
    loop.close()

    recorder.durable(JOURNAL, 3)


async def test_links_are_read_no_further_while_the_store_is_full() -> None:
    """Back-pressure reaches the host: ready ends only when there is room again."""
    rows = Rows()
    rows.is_full = True
    waiting = asyncio.ensure_future(Recorder(rows, asyncio.get_running_loop()).ready())
    await asyncio.sleep(0)
    assert not waiting.done()

    rows.is_full = False

    await asyncio.wait_for(waiting, 20)
