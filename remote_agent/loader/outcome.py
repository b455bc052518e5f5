"""What a load hands back, and how bytes in one allocation become tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.cleanup import Settling
from remote_agent.loader.plan import Plan
from remote_agent.loader.views import views_in

Memory = Callable[[int], torch.Tensor]
"""Gives a uint8 tensor of at least that many bytes on the device, at a multiple of 512; may raise OutOfMemoryError."""


@dataclass(frozen=True)
class Loaded:
    """Every tensor of a checkpoint on its device, and what that took.

    ``bytes`` are the tensors' own. ``path`` names the ways that bytes went (``mapped+staged``,
    ``direct``, ``read``, …), ``reason`` why it is not what was asked for. ``duration_ns`` and the rate end
    when every tensor can be used; what is given back afterwards (registrations) `settle` waits for.
    ``ceiling_bytes_s`` was measured beside the load. ``steps`` are nanoseconds by name, summed over
    threads; ``counters`` are counts; ``notes`` say in a line each what a caller may not expect of a tensor.
    Rates are None where no byte moved. ``base`` is the one allocation and ``plan`` says where in it
    each tensor lies; both are None where the tensors are views of the files.
    """

    tensors: dict[str, torch.Tensor]
    bytes: int
    path: str
    reason: str | None
    duration_ns: int
    rate_bytes_s: float | None
    ceiling_bytes_s: float | None
    steps: dict[str, int]
    counters: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    base: torch.Tensor | None = None
    plan: Plan | None = None
    settling: Settling | None = None

    def settle(self) -> int:
        """Wait until nothing of the load is left but its tensors; return the nanoseconds that took.

        ``settling`` can be begun before that, beside the caller.

        Raises: DeviceError or OSError if something could not be given back.
        """
        return 0 if self.settling is None else self.settling.finish()


@dataclass
class Outcome:
    """What one device's way of loading hands back."""

    tensors: dict[str, torch.Tensor]
    path: str
    reasons: list[str]
    steps: dict[str, int]
    begun_ns: int
    ended_ns: int
    ceiling_bytes_s: float | None
    counters: dict[str, int]
    base: torch.Tensor | None = None
    plan: Plan | None = None
    settling: Settling | None = None


def tensors_in(base: torch.Tensor, checkpoint: Checkpoint, plan: Plan) -> dict[str, torch.Tensor]:
    """Return every tensor as a view of ``base``, which holds all bytes at the plan's places."""
    places = [(entry, 0) for _, entry in checkpoint.entries() if not entry.nbytes]
    return views_in(base, [*places, *((placement.entry, placement.target) for placement in plan.placements)])


def odd_counters(plan: Plan) -> dict[str, int]:
    """Return how many tensors lie badly in their file."""
    return {"odd_tensors": plan.odd_tensors, "odd_bytes": plan.odd_bytes}
