"""What a run is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Union

from remote_agent.protocol.records import dataclass
from remote_agent.protocol.states import RunState, StageStatus, Tier


@dataclass(frozen=True)
class Actor:
    """Who asked for something, and from where."""

    user: str
    host: str


@dataclass(frozen=True)
class Failure:
    """Why something did not work: a stable ``code``, the stage, and one line for a person."""

    code: str
    detail: str
    stage: str | None = None
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageRecord:
    """One stage of one run. ``duration_ns`` is its span; ``attributed_ns`` its share of the wall time.

    ``rate_bytes_s`` and ``ceiling_bytes_s`` stand beside ``bytes`` where bytes move;
    ``path`` is the loader path taken, ``reason`` why it was reused, skipped or fell back.
    ``extra`` holds further figures by name (steps in nanoseconds, counters, short text).
    """

    name: str
    status: StageStatus
    start_ns: int | None = None
    duration_ns: int | None = None
    attributed_ns: int | None = None
    bytes: int | None = None
    rate_bytes_s: float | None = None
    ceiling_bytes_s: float | None = None
    path: str | None = None
    reason: str | None = None
    extra: Mapping[str, Union[int, float, str, bool, None]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """A run as the host knows it. The parts sum: attributed + unattributed = ``wall_ns``, once it is over."""

    run_uid: str
    recipe: str
    recipe_hash: str
    model: str
    actor: Actor
    state: RunState
    tier_from: Tier
    tier_to: Tier | None
    accepted_wall_ns: int
    devices: tuple[str, ...] = ()
    wall_ns: int | None = None
    unattributed_ns: int | None = None
    first_output_ns: int | None = None
    output: str | None = None
    stages: tuple[StageRecord, ...] = ()
    failure: Failure | None = None
