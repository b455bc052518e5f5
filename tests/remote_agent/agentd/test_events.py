"""Events between the journal and those who follow: never told before they are durable, never lost by a full disk."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from remote_agent.agentd.events import EventLog
from remote_agent.agentd.journal import Journal, JournalLimits
from remote_agent.errors import RefusedError
from remote_agent.protocol.messages import (
    Actor,
    Finding,
    ModelSource,
    Recipe,
    Resident,
    ResidentChanged,
    RunAccepted,
    Tier,
)
from tests.remote_agent.agentd.test_journal import FailingDisk

MACHINE = "machine-one"
UID = "run-one-1"


def finding(text: str) -> Finding:
    return Finding("code", "info", text)


def acceptance() -> RunAccepted:
    return RunAccepted(Recipe("tiny", ModelSource("/m")), "hash", Actor("ann", "laptop"), Tier.COLD, ("cpu",))


def resident() -> Resident:
    return Resident(UID, "tiny", "/m", "cpu", Tier.STANDBY, 1, 2, "ann", 3)


def opened(folder: Path, limits: JournalLimits | None = None, disk: FailingDisk | None = None) -> EventLog:
    return EventLog(Journal(folder / "journal", MACHINE, limits, disk.write if disk else os.pwrite))


async def test_events_of_one_turn_are_told_together_once_durable(tmp_path: Path) -> None:
    """Nothing is told in the turn it happens; then all of it is, in order."""
    events = opened(tmp_path)
    told = asyncio.Event()
    events.on_durable = told.set
    for number in range(3):
        events.emit(finding(str(number)))

    assert events.journal.newest_seq == 0
    await asyncio.wait_for(told.wait(), 10)
    assert events.journal.newest_seq == 3
    events.close()


async def test_a_full_disk_delays_events_and_refuses_new_runs(tmp_path: Path) -> None:
    """What happened waits and is told later, once; a run that can't be written down is not accepted."""
    disk = FailingDisk(0)
    events = opened(tmp_path, disk=disk)
    told = asyncio.Event()
    events.on_durable = told.set
    events.emit(finding("waits"))
    with pytest.raises(RefusedError, match="No space left") as refused:
        events.emit_or_refuse(acceptance(), UID)

    assert refused.value.code == "journal_unwritable"
    assert not told.is_set()
    assert events.journal.pending == 1
    assert [one.text for one in events.findings()] == [
        "the journal can't be written: No space left on device; 1 event waits for that"
    ]
    disk.room = 1 << 20
    await asyncio.wait_for(told.wait(), 10)
    assert [event.data for event in events.journal.read(0, 10)] == [finding("waits")]
    assert events.ledger.runs == {}
    assert events.findings() == ()
    events.close()


async def test_an_accepted_run_is_durable_when_it_is_answered(tmp_path: Path) -> None:
    """A crash right after the answer still knows the run."""
    events = opened(tmp_path)
    events.emit_or_refuse(acceptance(), UID)
    events.journal.close()

    again = opened(tmp_path)
    assert list(again.ledger.runs) == [UID]
    again.close()


async def test_what_is_open_is_known_after_its_events_are_trimmed(tmp_path: Path) -> None:
    """A checkpoint goes before the segments: an old run and an old holder are not forgotten."""
    events = opened(tmp_path, JournalLimits(segment_bytes=300, cap_bytes=2000))
    events.emit_or_refuse(acceptance(), UID)
    events.emit(ResidentChanged(resident(), "held"), UID)
    for number in range(50):
        events.emit(finding(f"finding {number}"))
        events.commit()
    oldest = events.journal.oldest_seq
    events.journal.close()

    again = opened(tmp_path)
    assert oldest > 2
    assert list(again.ledger.runs) == [UID]
    assert again.ledger.residents == {(UID, "cpu"): resident()}
    again.close()


async def test_a_journal_behind_what_was_acknowledged_begins_anew(tmp_path: Path) -> None:
    """A restored or damaged disk never gives a known seq to another event; subscribers start afresh and are told."""
    events = opened(tmp_path)
    for number in range(5):
        events.emit(finding(str(number)))
    events.commit()
    events.cursors.subscribe("laptop", 5, 1)
    events.close()
    uuid = events.journal.journal_uuid
    (segment,) = (tmp_path / "journal").glob("*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(lines[:3]))

    again = opened(tmp_path)
    again.commit()
    assert again.journal.journal_uuid != uuid
    assert again.cursors.highest == 0
    (told,) = again.journal.read(0, 10)
    assert isinstance(told.data, Finding)
    assert told.data.code == "journal_lost"
    again.close()
