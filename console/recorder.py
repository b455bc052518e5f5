"""Turns what nodes say into rows of the history, and the history's commits into acknowledgements.

Every durable event becomes one record, in the order it came; it is acknowledged only
after its commit. Of the droppable samples one a second is kept, while something runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import Callable
from typing import Protocol

from console.state import RunView
from db.errors import HistoryError
from db.records import EventRow, GapRow, Record, RunRow, SampleRow, StageRow
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import (
    STAGES,
    Event,
    Gap,
    RunAccepted,
    RunFinished,
    RunRecord,
    RunStarted,
    Sample,
    StageChanged,
    StageRecord,
)

SAMPLE_EVERY_NS = 1_000_000_000
FULL_PAUSE_S = 0.05
_KEYS_KEPT = 4096
_UNKNOWN_STAGE = 1000
"""Ordinals of stages that this version does not know start here; the name alone decides which."""

log = logging.getLogger(__name__)

Acknowledge = Callable[[str, int], None]
"""``(journal_uuid, seq)``: everything up to ``seq`` is stored."""


class Store(Protocol):
    """The history's writer, as far as the recorder needs it."""

    @property
    def full(self) -> bool:
        """Whether so much waits that links should not be read further."""

    def submit(self, row: Record | SampleRow | GapRow, /) -> None:
        """Take a row to be stored in order. Raises: HistoryError if it can't."""


class Recorder:
    """Writes one fleet's events to one history. Lives on the event loop; `durable` may be called from any thread.

    Once a record was refused, nothing more of its journal is written until `resume`: the
    records behind it would only have to be sent again.
    """

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._listeners: dict[str, Acknowledge] = {}
        self._sampled: dict[tuple[str, str | None], int] = {}
        self._refused: set[str] = set()

    @property
    def refused(self) -> frozenset[str]:
        """Journals of which a record could not be taken; they must be sent again from their cursor."""
        return frozenset(self._refused)

    def resume(self, journal_uuid: str) -> None:
        """Write that journal again: its link starts anew from the history's cursor."""
        self._refused.discard(journal_uuid)

    async def ready(self) -> None:
        """Wait until the store takes more without growing: a host keeps what is not read."""
        while self._store.full:  # noqa: ASYNC110 - the store is a thread's, and rarely full
            await asyncio.sleep(FULL_PAUSE_S)

    def follow(self, journal_uuid: str, acknowledge: Acknowledge) -> None:
        """Have ``acknowledge`` called, on the loop, whenever that journal's cursor is durable."""
        self._listeners[journal_uuid] = acknowledge

    def event(self, node: str, journal_uuid: str, event: Event, data_json: str, run: RunView | None) -> None:
        """Store an event with the row and stages of its run; ``run`` is the view after the event."""
        row = EventRow(
            journal_uuid, event.seq, node, event.run_uid, event.t_mono_ns, event.t_wall_ns, event.kind, data_json
        )
        self._submit(Record(row, _run_row(node, event, run), _stage_rows(event)), journal_uuid)

    def gap(self, node: str, journal_uuid: str, gap: Gap) -> None:
        """Store that events are lost, so that the cursor may pass over them."""
        self._submit(GapRow(journal_uuid, node, gap.from_seq, gap.to_seq), journal_uuid)

    def sample(self, node: str, sample: Sample, run: RunView | None) -> None:
        """Keep one sample a second of each kind while ``run`` is going on; none otherwise."""
        if run is None or run.state.is_terminal or not run.is_accepted:
            return
        key = (node, sample.progress.run_uid if sample.progress else None)
        last_ns = self._sampled.get(key)
        if last_ns is not None and 0 <= sample.t_mono_ns - last_ns < SAMPLE_EVERY_NS:
            return
        if len(self._sampled) >= _KEYS_KEPT:
            self._sampled.clear()
        self._sampled[key] = sample.t_mono_ns
        content = sample.progress or sample.host
        run_uid = sample.progress.run_uid if sample.progress else run.run_uid
        self._submit(SampleRow(node, run_uid, sample.t_wall_ns, json.dumps(encode(content))), None)

    def durable(self, journal_uuid: str, seq: int) -> None:
        """Pass on, from the writer's thread, that everything up to ``seq`` is committed."""
        try:
            self._loop.call_soon_threadsafe(self._acknowledge, journal_uuid, seq)
        except RuntimeError:  # the loop is closed: the hosts will send it again, and it is there already
            log.debug("no loop to acknowledge %s to", journal_uuid)

    def _acknowledge(self, journal_uuid: str, seq: int) -> None:
        listener = self._listeners.get(journal_uuid)
        if listener is not None and seq > 0:
            listener(journal_uuid, seq)

    def _submit(self, row: Record | SampleRow | GapRow, journal_uuid: str | None) -> None:
        if journal_uuid in self._refused:
            return
        try:
            self._store.submit(row)
        except HistoryError as error:
            if journal_uuid is not None:
                self._refused.add(journal_uuid)
                log.warning("the history takes no more of journal %s for now: %s", journal_uuid, error)


def _run_row(node: str, event: Event, run: RunView | None) -> RunRow | None:
    """The run's row where the event changes it; only its last event writes how it ended."""
    data = event.data
    if isinstance(data, RunFinished):
        return run_row(node, data.run)
    changes = isinstance(data, (RunAccepted, RunStarted)) or (
        isinstance(data, StageChanged) and "tier_from" in data.stage.extra
    )
    if not changes or run is None or run.run_uid != event.run_uid or run.state.is_terminal:
        return None
    return run_row(node, run)


def run_row(node: str, run: RunView | RunRecord) -> RunRow:
    """Return the run as the history keeps it."""
    failure = run.failure
    return RunRow(
        run_uid=run.run_uid,
        node=node,
        recipe=run.recipe,
        recipe_hash=run.recipe_hash,
        model=run.model,
        actor_user=run.actor.user,
        actor_host=run.actor.host,
        state=run.state.value,
        tier_from=run.tier_from.value,
        tier_to=run.tier_to.value if run.tier_to else None,
        started_ns=run.accepted_wall_ns,
        devices=run.devices,
        wall_ns=run.wall_ns,
        unattributed_ns=run.unattributed_ns,
        first_output_ns=run.first_output_ns,
        output=run.output,
        failure_code=failure.code if failure else None,
        failure_stage=failure.stage if failure else None,
        failure_detail=failure.detail if failure else None,
    )


def _stage_rows(event: Event) -> tuple[StageRow, ...]:
    if isinstance(event.data, StageChanged) and event.run_uid is not None:
        return (stage_row(event.data.stage),)
    if isinstance(event.data, RunFinished):
        return tuple(stage_row(stage) for stage in event.data.run.stages)
    return ()


def stage_row(stage: StageRecord) -> StageRow:
    """Return the stage as the history keeps it."""
    return StageRow(
        ordinal=_ordinal(stage.name),
        name=stage.name,
        status=stage.status.value,
        start_ns=stage.start_ns,
        duration_ns=stage.duration_ns,
        attributed_ns=stage.attributed_ns,
        bytes=stage.bytes,
        rate_bytes_s=stage.rate_bytes_s,
        ceiling_bytes_s=stage.ceiling_bytes_s,
        path=stage.path,
        reason=stage.reason,
        extra_json=json.dumps(encode(stage.extra)),
    )


def _ordinal(name: str) -> int:
    """The stage's place in canonical order: the same for a name in whatever order events come."""
    if name in STAGES:
        return STAGES.index(name)
    return _UNKNOWN_STAGE + zlib.crc32(name.encode("utf-8", "replace"))
