"""Rows of rollouts as frozen records. Times in nanoseconds of wall time; ``*_json`` is JSON text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["event", "intent", "outcome", "command", "controller"]


@dataclass(frozen=True)
class RolloutNodeRow:
    """Where a node stands, as the state has it. ``batch`` from 0; ``ordinal``: its place among all, from 0."""

    ordinal: int
    node: str
    batch: int
    state: str
    reason: str = ""
    attempt: int = 0
    is_out: bool = False


@dataclass(frozen=True)
class Lease:
    """Who carries a rollout out, and until when unless it is renewed."""

    holder: str
    expires_ns: int


@dataclass(frozen=True)
class RolloutRow:
    """One rollout. ``lease`` is the last one that was taken and not given back; it may have expired."""

    rollout_uid: str
    name: str
    recipe: str
    actor_user: str
    actor_host: str
    settings_json: str
    state_json: str
    phase: str
    reason: str
    created_ns: int
    updated_ns: int
    finished_ns: int | None = None
    lease: Lease | None = None


@dataclass(frozen=True)
class Unfinished:
    """A rollout that is not over, in short. ``lease``: as in `RolloutRow`. ``nodes_out``: nodes out of traffic."""

    rollout_uid: str
    name: str
    phase: str
    lease: Lease | None = None
    nodes_out: int = 0


@dataclass(frozen=True)
class TimelineRow:
    """One entry, in order of ``entry_id``. ``intent_id`` is that of the intent whose outcome it is."""

    entry_id: int
    t_wall_ns: int
    kind: str
    what: str
    node: str | None
    attempt: int | None
    intent_id: int | None
    data_json: str


@dataclass(frozen=True)
class CommandRow:
    """What an operator asked of a rollout from another process; ``answer`` is None until it was looked at."""

    command_id: int
    asked_ns: int
    actor_user: str
    actor_host: str
    verb: str
    arguments_json: str
    is_done: bool | None = None
    answer: str | None = None


@dataclass(frozen=True)
class RolloutRecord:
    """A rollout with its nodes in order and its timeline, oldest first, from one snapshot."""

    row: RolloutRow
    nodes: tuple[RolloutNodeRow, ...]
    timeline: tuple[TimelineRow, ...]


@dataclass(frozen=True)
class Entry:
    """An entry to append. ``intent_id``: for an outcome, the intent's."""

    kind: Kind
    what: str
    node: str | None = None
    attempt: int | None = None
    intent_id: int | None = None
    data_json: str = "{}"


@dataclass(frozen=True)
class Turn:
    """What becomes of a rollout at one moment, stored whole or not at all.

    ``nodes``: those that changed. ``answers``: by command id, whether it was done and what is to be said.
    """

    state_json: str
    phase: str
    reason: str
    is_over: bool
    nodes: tuple[RolloutNodeRow, ...] = ()
    entries: tuple[Entry, ...] = ()
    answers: Mapping[int, tuple[bool, str]] | None = None
