"""How warm a model is, where a run stands, and the order of its stages."""

from __future__ import annotations

import enum


class Tier(str, enum.Enum):
    """How warm a model is on a node, coldest first.

    ``armed``: a process has all of it but the weights, which the keeper has when a run starts from there.
    """

    COLD = "cold"
    CACHED = "cached"
    HOST = "host"
    RESIDENT = "resident"
    ARMED = "armed"
    PARKED = "parked"
    STANDBY = "standby"


class RunState(str, enum.Enum):
    """Where a run stands, as its host says it."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    STUCK = "stuck"

    @property
    def is_terminal(self) -> bool:
        return self not in (RunState.QUEUED, RunState.RUNNING)


class StageStatus(str, enum.Enum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    REUSED = "reused"
    SKIPPED = "skipped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self not in (StageStatus.PENDING, StageStatus.RUNNING)


NATIVE_STAGES = (
    "queue",
    "probe",
    "preflight",
    "init",
    "context",
    "weights",
    "assign",
    "compile",
    "first_request",
    "hold",
)
"""Canonical order of a native run's stages; attribution follows it."""

STAGES = (*NATIVE_STAGES, "listening")
"""All of them in order: what follows ``hold`` belongs to recipes that serve, and to no other."""
