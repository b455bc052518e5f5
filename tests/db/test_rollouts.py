"""Rollouts in the history: turns stored whole, one holder at a time, and what operators ask."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlite_utils import Database, Migrations

from db import migrations, rollouts
from db.database import connect, open_history
from db.errors import (
    AmbiguousRolloutError,
    DamagedError,
    LeaseHeldError,
    LeaseLostError,
    RolloutError,
    UnavailableError,
)
from db.queries import History
from db.rollout_records import Entry, Lease, RolloutNodeRow, RolloutRow, Turn, Unfinished
from db.rollout_store import RolloutStore, lease_of

UID = "aaaa0000"
NODES = (RolloutNodeRow(0, "a", 0, "pending"), RolloutNodeRow(1, "b", 1, "pending"))
S = 1_000_000_000


def rollout_row(uid: str = UID, name: str = "pre-warm") -> RolloutRow:
    return RolloutRow(uid, name, "llama", "ada", "desk", "{}", '{"v": 0}', "running", "", 0, 0)


def turn(*entries: Entry, **changes: object) -> Turn:
    plain = Turn('{"v": 1}', "running", "", False, entries=entries)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


class Clock:
    """Wall time that the test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * S

    def __call__(self) -> int:
        return self.now_ns


class Desk:
    """A history, and as many processes as a test wants to have writing to it."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self.path = path
        self.clock = Clock()
        self.slept_s: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self._stack = stack

    def store(self, holder: str, may_live: Callable[[str], bool] = lambda holder: True) -> RolloutStore:
        store = RolloutStore(self.path, holder, lease_s=10.0, clock_ns=self.clock, may_live=may_live, sleep=self._sleep)
        self._stack.callback(store.close)
        return store

    def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.meanwhile()

    def read(self, name: str = UID, after_entry: int = 0) -> rollouts.RolloutRecord:
        with History(self.path) as history:
            found = rollouts.read(history, name, after_entry)
        assert found is not None
        return found


@pytest.fixture
def desk(history_path: Path) -> Iterator[Desk]:
    with contextlib.ExitStack() as stack:
        yield Desk(history_path, stack)


def test_a_history_without_rollouts_gets_their_tables_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the first version wrote is brought up to date when it is opened."""
    path = tmp_path / "history.db"
    first = Migrations("glowplug")

    @first(name="0001_first")
    def create(db: Database) -> None:
        migrations.create_tables(db)

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "migrations", first)
        patch.setattr(migrations, "NEWEST", 1)
        uuid = open_history(path).history_uuid

    assert open_history(path).history_uuid == uuid
    with History(path) as history:
        assert rollouts.listed(history) == ()
        assert rollouts.read(history, "pre-warm") is None


def test_a_rollout_is_read_as_it_was_stored(desk: Desk) -> None:
    """State, the nodes that changed, and the timeline in order, outcomes naming their intents."""
    store = desk.store("one")
    store.create(rollout_row(), NODES)
    (intent,) = store.record(UID, turn(Entry("intent", "StartNode", "a", 1, data_json='{"run_uid": "r"}')))
    warming = dataclasses.replace(NODES[0], state="warming", attempt=1, is_out=True)
    store.record(UID, turn(Entry("outcome", "StartNode", "a", 1, intent), nodes=(warming,), state_json='{"v": 2}'))
    found = desk.read("pre-warm")

    assert (found.row.state_json, found.row.finished_ns) == ('{"v": 2}', None)
    assert found.nodes == (warming, NODES[1])
    assert [(one.kind, one.node, one.intent_id) for one in found.timeline] == [
        ("intent", "a", None),
        ("outcome", "a", intent),
    ]
    assert desk.read(UID[:4], after_entry=intent).timeline == found.timeline[1:]


def test_a_rollout_is_found_by_name_the_newest_first_and_by_how_its_uid_begins(desk: Desk) -> None:
    """Where two uids begin so, both are named."""
    store = desk.store("one")
    store.create(rollout_row(), NODES)
    store.record(UID, turn(is_over=True, phase="done"))
    desk.clock.now_ns += S
    store.create(rollout_row("aaaa1111"), NODES)

    assert desk.read("pre-warm").row.rollout_uid == "aaaa1111"
    assert desk.read("aaaa0").row.finished_ns == 1_000 * S
    with pytest.raises(AmbiguousRolloutError, match="aaaa fits 2 rollouts: aaaa0000, aaaa1111"):
        desk.read("aaaa")
    with History(desk.path) as history:
        assert [row.rollout_uid for row in rollouts.listed(history)] == ["aaaa1111", UID]


def test_what_is_not_over_is_told_in_short(desk: Desk) -> None:
    """Its phase, its last lease, and how many of its nodes are out of traffic; what is over is not among it."""
    store = desk.store("one")
    store.create(rollout_row(), NODES)
    store.record(UID, turn(is_over=True, phase="done"))
    store.create(rollout_row("aaaa1111"), NODES)
    out = dataclasses.replace(NODES[0], state="draining", is_out=True)
    store.record("aaaa1111", turn(nodes=(out,)))
    with History(desk.path) as history:
        before = rollouts.unfinished(history)
        store.give_back("aaaa1111")
        after = rollouts.unfinished(history)

    held = Unfinished("aaaa1111", "pre-warm", "running", Lease("one", desk.clock.now_ns + 10 * S), 1)
    assert before == (held,)
    assert after == (dataclasses.replace(held, lease=None),)


def test_intents_without_an_outcome_are_known(desk: Desk) -> None:
    """Those are what a controller that died may or may not have done."""
    store = desk.store("one")
    store.create(rollout_row(), NODES)
    first, second = store.record(UID, turn(Entry("intent", "StopNode", "a", 1), Entry("intent", "StartNode", "b", 1)))
    store.record(UID, turn(Entry("outcome", "StopNode", "a", 1, first)))

    assert [one.entry_id for one in store.open_intents(UID)] == [second]


@pytest.mark.parametrize("statement", ["DELETE FROM rollout_timeline", "UPDATE rollout_timeline SET what = 'x'"])
def test_the_timeline_is_only_appended_to(desk: Desk, statement: str) -> None:
    """SQLite itself refuses anything else."""
    store = desk.store("one")
    store.create(rollout_row(), NODES)
    store.record(UID, turn(Entry("event", "Begin")))
    with (
        contextlib.closing(connect(desk.path, read_only=False)) as connection,
        pytest.raises(sqlite3.IntegrityError, match="only appended to"),
    ):
        connection.execute(statement)


def test_a_second_holder_is_refused_with_the_first_ones_name_and_the_seconds_left(desk: Desk) -> None:
    """Every turn renews the lease; once it has run out the other takes it, and the first can store nothing."""
    first, second = desk.store("desk:1:aa"), desk.store("desk:2:bb")
    first.create(rollout_row(), NODES)
    desk.clock.now_ns += 6 * S
    first.record(UID, turn())
    desk.clock.now_ns += 6 * S
    with pytest.raises(LeaseHeldError, match=r"rollout pre-warm is carried out by desk:1:aa; its lease has 4\.0 s"):
        second.take(UID)
    desk.clock.now_ns += 4 * S
    assert second.take(UID).state_json == '{"v": 1}'

    for late in (lambda: first.record(UID, turn(state_json='{"v": 9}')), lambda: first.renew(UID)):
        with pytest.raises(LeaseLostError, match=r"rollout pre-warm was taken over by desk:2:bb; nothing more is done"):
            late()
    assert desk.read().row.state_json == '{"v": 1}'


def test_a_clock_that_was_set_back_keeps_no_dead_consoles_lease(desk: Desk) -> None:
    """Who asks for it has to wait for one whole lease at most; whoever is alive renews it meanwhile."""
    first, second = desk.store("one"), desk.store("two")
    first.create(rollout_row(), NODES)
    desk.clock.now_ns -= 3600 * S
    with pytest.raises(LeaseHeldError, match=r"has 10\.0 s left"):
        second.take(UID)
    desk.clock.now_ns += 9 * S
    first.renew(UID)
    desk.clock.now_ns += 9 * S
    with pytest.raises(LeaseHeldError):
        second.take(UID)

    desk.clock.now_ns -= 600 * S
    assert second.ask(UID, ("ada", "desk"), "abort", {}) is not None
    desk.clock.now_ns += 10 * S
    assert second.ask(UID, ("ada", "desk"), "abort", {}) is None
    assert second.take(UID).lease is not None


def test_a_clock_that_was_set_forward_takes_no_lease_from_who_renews_it(desk: Desk) -> None:
    """Nor does a machine that slept: a holder has the time to renew it that it would have had anyway."""
    first, second = desk.store("one"), desk.store("two")
    first.create(rollout_row(), NODES)
    desk.clock.now_ns += 3600 * S
    desk.meanwhile = lambda: first.renew(UID)
    with pytest.raises(LeaseHeldError, match=r"carried out by one; its lease has 10\.0 s left"):
        second.take(UID)
    first.record(UID, turn())
    assert desk.slept_s == [4.0]

    desk.meanwhile = lambda: None
    desk.clock.now_ns += 3600 * S
    assert second.take(UID).lease is not None
    with pytest.raises(LeaseLostError):
        first.record(UID, turn())
    assert desk.slept_s == [4.0, 4.0]


def test_nobody_waits_for_a_holder_that_is_gone_or_for_itself(desk: Desk) -> None:
    """What is known to have ended renews nothing."""
    desk.store("one").create(rollout_row(), NODES)
    desk.clock.now_ns += 11 * S
    second = desk.store("two", may_live=lambda holder: holder != "one")
    second.take(UID)
    desk.clock.now_ns += 11 * S
    second.take(UID)

    assert desk.slept_s == []


def test_a_lease_that_is_given_back_is_free_at_once(desk: Desk) -> None:
    """And nobody gives back another's."""
    first, second = desk.store("one"), desk.store("two")
    first.create(rollout_row(), NODES)
    second.give_back(UID)
    assert lease_of(desk.read().row, desk.clock()) is not None
    first.give_back(UID)

    assert second.take(UID).lease is None


def test_a_rollout_that_is_not_over_keeps_its_name_and_its_nodes(desk: Desk) -> None:
    """Neither the same one is begun twice, nor another with one of its nodes; once it is over both may be."""
    store = desk.store("one")
    store.create(rollout_row(), NODES)
    with pytest.raises(RolloutError, match=r"rollout pre-warm \(aaaa0000\) is running; resume or abort it before"):
        store.create(rollout_row("bbbb0000"), ())
    with pytest.raises(RolloutError, match=r"is running and has node a and 1 more too; resume or abort it first"):
        store.create(rollout_row("bbbb0000", "other"), NODES)
    store.record(UID, turn(is_over=True, phase="done"))

    store.create(rollout_row("bbbb0000", "other"), NODES)
    assert desk.read("other").nodes == NODES


def test_a_command_is_left_for_who_holds_the_lease_and_answered_with_its_turn(desk: Desk) -> None:
    """Without a holder nobody is asked; an answer comes once."""
    store, other = desk.store("one"), desk.store("two")
    store.create(rollout_row(), NODES)
    ident = other.ask(UID, ("ada", "desk"), "retry", {"node": "a"})
    assert ident is not None
    assert [(one.verb, one.arguments_json) for one in store.asked(UID)] == [("retry", '{"node": "a"}')]
    store.record(UID, turn(answers={ident: (True, "a is tried again")}))

    assert store.asked(UID) == ()
    assert not other.withdraw(ident)
    with History(desk.path) as history:
        answered = rollouts.command(history, ident)
    assert answered is not None
    assert (answered.is_done, answered.answer) == (True, "a is tried again")
    desk.clock.now_ns += 11 * S
    assert other.ask(UID, ("ada", "desk"), "pause", {}) is None


def test_what_was_asked_of_a_controller_that_is_gone_is_taken_back(desk: Desk) -> None:
    """The next one does not carry out what nobody waits for any more."""
    store = desk.store("one")
    store.create(rollout_row(), NODES)
    ident = store.ask(UID, ("ada", "desk"), "promote", {})
    assert ident is not None
    store.take(UID)
    assert [one.command_id for one in store.asked(UID)] == [ident]
    desk.clock.now_ns += 11 * S
    desk.store("two").take(UID)

    assert store.asked(UID) == ()
    with History(desk.path) as history:
        withdrawn = rollouts.command(history, ident)
    assert withdrawn is not None
    assert (withdrawn.is_done, withdrawn.answer) == (False, "withdrawn: its controller has ended")


_RACER = """
import sys
from pathlib import Path
from db.errors import LeaseHeldError
from db.rollout_store import RolloutStore
store = RolloutStore(Path(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
try:
    store.take(sys.argv[3])
except LeaseHeldError as error:
    print("refused", error.holder, flush=True)
else:
    print("taken", flush=True)
store.close()
"""


def test_of_processes_that_want_a_lease_at_one_moment_one_has_it(desk: Desk) -> None:
    """The others are told who."""
    store = desk.store("one")
    store.create(rollout_row(), NODES)
    store.give_back(UID)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(desk.path), f"racer-{number}", UID],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.communicate(timeout=60)[0].split() for racer in racers]

    winner = said.index(["taken"])
    assert [words for words in said if words != ["taken"]] == [["refused", f"racer-{winner}"]] * 2


def test_another_programs_write_lock_is_an_error_and_nothing_is_half_stored(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn is stored once the lock is gone."""
    monkeypatch.setattr("db.database.BUSY_TIMEOUT_S", 0.01)
    store = desk.store("one")
    store.create(rollout_row(), NODES)
    with contextlib.closing(connect(desk.path, read_only=False)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match=r"another program keeps .* locked"):
            store.record(UID, turn(Entry("event", "Begin")))
        connection.execute("ROLLBACK")

    assert len(store.record(UID, turn(Entry("event", "Begin")))) == 1
    assert len(desk.read().timeline) == 1


def test_nothing_more_is_stored_in_a_history_that_was_moved_aside(desk: Desk) -> None:
    """Else a rollout would go on whose state nobody can read."""
    store = desk.store("one")
    store.create(rollout_row(), NODES)
    desk.path.rename(desk.path.with_name("history.db.corrupt-1"))

    with pytest.raises(DamagedError, match="was moved or replaced while in use"):
        store.record(UID, turn())
