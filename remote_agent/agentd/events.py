"""Events from the moment they happen until everyone has them: durable first, then told, trimmed last."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from remote_agent.agentd.cursors import Cursors
from remote_agent.agentd.files import read_json, write_whole
from remote_agent.agentd.journal import Journal
from remote_agent.agentd.ledger import Checkpoint, Ledger
from remote_agent.errors import JournalError, RefusedError
from remote_agent.protocol.codec import DecodeError, decode, encode
from remote_agent.protocol.messages import JOURNAL_UNWRITABLE, Event, EventData, Finding
from remote_agent.protocol.peer import decode_event

log = logging.getLogger(__name__)

RETRY_S = 1.0
SAVE_S = 1.0
READ_BATCH = 500
CHECKPOINT_EVENTS = 2000

_KINDS = {
    "DaemonStarted": "daemon.started",
    "RunAccepted": "run.accepted",
    "RunStarted": "run.started",
    "StageChanged": "run.stage",
    "RunFinished": "run.finished",
    "ResidentChanged": "resident",
    "Finding": "finding",
}


class EventLog:
    """The journal, its cursors and its ledger, tied to the event loop: one disk sync for each turn of it."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._checkpoint_path = journal.directory / "checkpoint.json"
        cursors_path = journal.directory / "cursors.json"
        self.cursors = Cursors(cursors_path, journal.journal_uuid)
        try:
            if self.cursors.highest > journal.newest_seq:
                raise JournalError(f"the journal ends at {journal.newest_seq}, before what was acknowledged")
            self.ledger = self._fold()
        except JournalError as error:
            journal.discard(str(error))
            self.cursors, self.ledger = Cursors(cursors_path, journal.journal_uuid), Ledger()
        self._checkpoint_seq = self.ledger.seq
        self.on_durable: Callable[[], None] = lambda: None
        self._commit_due: asyncio.Handle | None = None
        self._save_due: asyncio.Handle | None = None
        if journal.lost_reason:
            self.emit(Finding("journal_lost", "warning", f"{journal.lost_reason}; a new one was begun"))

    def emit(self, data: EventData, run_uid: str | None = None) -> None:
        """Let ``data`` become an event; it is told to subscribers once it is durable."""
        self.journal.append(_event(data, run_uid))
        self._schedule(0)

    def emit_or_refuse(self, data: EventData, run_uid: str) -> None:
        """Make ``data`` durable now. Raises: RefusedError if the disk does not take it."""
        event = _event(data, run_uid)
        self.journal.append(event)
        self.commit()
        if self.journal.failure is not None:
            reason = self.journal.failure.strerror
            self.journal.withdraw(event)
            raise RefusedError(JOURNAL_UNWRITABLE, f"the journal can't be written: {reason}")

    def findings(self) -> tuple[Finding, ...]:
        """Return what an operator should know of the journal itself, which can't tell it."""
        failure = self.journal.failure
        if failure is None:
            return ()
        waiting = self.journal.pending
        waits = "1 event waits" if waiting == 1 else f"{waiting} events wait"
        text = f"the journal can't be written: {failure.strerror}; {waits} for that"
        return (Finding(JOURNAL_UNWRITABLE, "error", text),)

    def commit(self) -> None:
        """Make what is queued durable and tell it; on failure say why, once, and try again later."""
        self._commit_due = None
        was_failing = self.journal.failure is not None
        events = self.journal.commit()
        for event in events:
            self.ledger.apply(event)
        if self.journal.failure is not None:
            if not was_failing:
                log.error("the journal can't be written, events wait: %s", self.journal.failure)
            self._schedule(RETRY_S)
        elif was_failing:
            log.warning("the journal can be written again")
        if events:
            self.on_durable()
            self.trim()
            if self.ledger.seq - self._checkpoint_seq >= CHECKPOINT_EVENTS:
                self._save_checkpoint()

    def ack(self, subscriber: str, seq: int) -> None:
        """Note what a subscriber has stored. Raises: RefusedError for a seq that does not exist yet."""
        if not 0 <= seq <= self.journal.newest_seq:
            raise RefusedError("bad_cursor", f"event {seq} does not exist; the newest is {self.journal.newest_seq}")
        self.cursors.ack(subscriber, seq, time.time_ns())
        self.cursors_changed()
        self.trim()

    def cursors_changed(self) -> None:
        """Write the cursors down soon."""
        if self._save_due is None:
            self._save_due = asyncio.get_running_loop().call_later(SAVE_S, self._save)

    def trim(self) -> None:
        """Let segments go that nobody needs, once what they left open is in the checkpoint."""
        acked = self.cursors.lowest_recent(time.time_ns())
        if not self.journal.trimmable(acked):
            return
        if not self._save_checkpoint():
            return
        try:
            self.journal.trim(acked)
        except OSError as error:
            log.warning("the journal can't be trimmed: %s", error)

    def close(self) -> None:
        """Write everything down that can be."""
        self.commit()
        for handle in (self._commit_due, self._save_due):
            if handle is not None:
                handle.cancel()
        self._save()
        self._save_checkpoint()
        self.journal.close()

    def _schedule(self, delay_s: float) -> None:
        if self._commit_due is None:
            loop = asyncio.get_running_loop()
            self._commit_due = loop.call_later(delay_s, self.commit) if delay_s else loop.call_soon(self.commit)

    def _save(self) -> None:
        self._save_due = None
        try:
            if self.cursors.changed:
                self.cursors.save()
        except OSError as error:
            log.warning("cursors can't be written: %s", error)

    def _save_checkpoint(self) -> bool:
        try:
            write_whole(self._checkpoint_path, encode(self.ledger.checkpoint(self.journal.journal_uuid)))
        except OSError as error:
            log.warning("the journal's checkpoint can't be written: %s", error)
            return False
        self._checkpoint_seq = self.ledger.seq
        return True

    def _fold(self) -> Ledger:
        """Return what is open: the checkpoint and every event after it. Raises: JournalError if it can't be read."""
        try:
            checkpoint = decode(Checkpoint, read_json(self._checkpoint_path) or {})
            usable = checkpoint.journal_uuid == self.journal.journal_uuid and checkpoint.seq <= self.journal.newest_seq
            ledger = Ledger(checkpoint if usable else None)
        except DecodeError:
            ledger = Ledger()
        while batch := self.journal.read(ledger.seq, READ_BATCH):
            for event in batch:
                try:
                    ledger.apply(decode_event(event))
                except DecodeError as error:  # another version's event; what it left open is not ours to end
                    log.warning("event %s does not fit its kind: %s", event.seq, error)
                    ledger.seq = event.seq
        return ledger


def _event(data: EventData, run_uid: str | None) -> Event:
    kind = _KINDS[type(data).__name__]
    return Event(0, run_uid, time.monotonic_ns(), time.time_ns(), kind, data)
