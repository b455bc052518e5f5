"""Rows of the history as frozen records. Times in nanoseconds, sizes in bytes; ``*_json`` is JSON text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EventRow:
    """A durable event as the host sent it; unique by ``(journal_uuid, seq)``."""

    journal_uuid: str
    seq: int
    node: str
    run_uid: str | None
    t_mono_ns: int
    t_wall_ns: int
    kind: str
    data_json: str


@dataclass(frozen=True)
class StageRow:
    """One stage of a run. ``ordinal`` is its place in canonical order, from 0."""

    ordinal: int
    name: str
    status: str
    start_ns: int | None = None
    duration_ns: int | None = None
    attributed_ns: int | None = None
    bytes: int | None = None
    rate_bytes_s: float | None = None
    ceiling_bytes_s: float | None = None
    path: str | None = None
    reason: str | None = None
    extra_json: str = "{}"


@dataclass(frozen=True)
class RunRow:
    """A run; ``started_ns`` is the host's wall time of its acceptance."""

    run_uid: str
    node: str
    recipe: str
    recipe_hash: str
    model: str
    actor_user: str
    actor_host: str
    state: str
    tier_from: str
    tier_to: str | None
    started_ns: int
    devices: tuple[str, ...] = ()
    wall_ns: int | None = None
    unattributed_ns: int | None = None
    first_output_ns: int | None = None
    output: str | None = None
    failure_code: str | None = None
    failure_stage: str | None = None
    failure_detail: str | None = None


@dataclass(frozen=True)
class Record:
    """One event with what it changes: the run's row and some of its stages."""

    event: EventRow
    run: RunRow | None = None
    stages: tuple[StageRow, ...] = ()


@dataclass(frozen=True)
class SampleRow:
    """A 1 Hz sample taken while something ran."""

    node: str
    run_uid: str | None
    t_wall_ns: int
    data_json: str


@dataclass(frozen=True)
class GapRow:
    """Events a host had trimmed before they were stored here."""

    journal_uuid: str
    node: str
    from_seq: int
    to_seq: int


@dataclass(frozen=True)
class RunFilter:
    """Which runs to return, newest first; ``None`` means any. ``before_ns`` pages back."""

    node: str | None = None
    recipe: str | None = None
    state: str | None = None
    since_ns: int | None = None
    before_ns: int | None = None
    limit: int = 50


@dataclass(frozen=True)
class Baseline:
    """Medians over the newest ``count`` ready runs of one recipe on one node from one tier."""

    count: int
    wall_ns: int
    stages_ns: dict[str, int]
    first_output_ns: int | None = None
    recent_wall_ns: tuple[int, ...] = ()
