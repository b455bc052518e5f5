"""Where each tensor of a checkpoint lies in one piece of memory, as a load makes it and a reserved range expects it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.header_text import TensorEntry
from remote_agent.loader.plan import Plan, plan_placement
from remote_agent.resident.manifest import write_table


@dataclass(frozen=True)
class Layout:
    """Each tensor's place, the bytes that all take together, and the table that a manifest has of them."""

    entries: tuple[TensorEntry, ...]
    size_bytes: int
    table: bytes


def plan_layout(checkpoint: Checkpoint) -> Layout:
    """Return how a load will lay a checkpoint out; its headers are all that is read."""
    plan = plan_placement(checkpoint)
    entries = tuple(placed_entries(checkpoint, plan))
    return Layout(entries, plan.size_bytes, write_table(entries))


def placed_entries(checkpoint: Checkpoint, plan: Plan) -> Iterator[TensorEntry]:
    """Yield every tensor with its place in memory; those of no bytes last, at 0."""
    for place in plan.placements:
        yield _moved(place.entry, place.target)
    for _, entry in checkpoint.entries():
        if not entry.nbytes:
            yield _moved(entry, 0)


def _moved(entry: TensorEntry, start: int) -> TensorEntry:
    return TensorEntry(entry.name, entry.dtype, entry.shape, start, start + entry.nbytes)
