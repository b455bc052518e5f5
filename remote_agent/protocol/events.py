"""What happens on a host, durable: journalled before it is sent, acknowledged once it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, Union

from remote_agent.protocol.hosts import Finding, Resident
from remote_agent.protocol.recipes import Recipe
from remote_agent.protocol.records import dataclass
from remote_agent.protocol.runs import Actor, RunRecord, StageRecord
from remote_agent.protocol.states import Tier


@dataclass(frozen=True)
class DaemonStarted:
    agent_version: str
    boot_id: str
    pid: int


@dataclass(frozen=True)
class RunAccepted:
    """``tier_from`` is that of a process that waits, or ``cold``; the rest preflight finds (`StageRecord.extra`)."""

    recipe: Recipe
    recipe_hash: str
    actor: Actor
    tier_from: Tier
    devices: tuple[str, ...]


@dataclass(frozen=True)
class RunStarted:
    """The run left the queue."""


@dataclass(frozen=True)
class StageChanged:
    stage: StageRecord


@dataclass(frozen=True)
class RunFinished:
    """Terminal. ``run`` carries every stage with its final attribution."""

    run: RunRecord


@dataclass(frozen=True)
class ResidentChanged:
    """A warm model appeared on a device or is another one now (``held``), or is gone, with the reason.

    ``steps``: what parking or unparking it took, in nanoseconds by name.
    """

    resident: Resident
    state: Literal["held", "gone"]
    reason: str | None = None
    steps: Mapping[str, int] = field(default_factory=dict)


JOURNAL_UNWRITABLE = "journal_unwritable"
"""Code of a refusal, and of a probe's finding: what happens is told only once the host's disk takes it."""


@dataclass(frozen=True)
class UnknownData:
    """Event data that this version can't read; kept, never guessed at.

    ``problem``: what in them does not fit their kind; None where the kind itself is not known.
    """

    raw: object
    problem: str | None = None


EventData = Union[
    DaemonStarted, RunAccepted, RunStarted, StageChanged, RunFinished, ResidentChanged, Finding, UnknownData
]

EVENT_KINDS: dict[str, type] = {
    "daemon.started": DaemonStarted,
    "run.accepted": RunAccepted,
    "run.started": RunStarted,
    "run.stage": StageChanged,
    "run.finished": RunFinished,
    "resident": ResidentChanged,
    "finding": Finding,
}


@dataclass(frozen=True)
class Event:
    """A durable change of state; ``(journal_uuid, seq)`` names it for ever. ``data`` fits ``kind``."""

    seq: int
    run_uid: str | None
    t_mono_ns: int
    t_wall_ns: int
    kind: str
    data: object


@dataclass(frozen=True)
class Gap:
    """Events ``from_seq..to_seq`` were trimmed before this subscriber had them."""

    from_seq: int
    to_seq: int
