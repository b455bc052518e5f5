"""Decides where each tensor goes in one allocation, so that bytes move once and views need no copy.

A shard's data section keeps its layout from a 512-byte boundary on. Where a tensor would then
lie badly (an odd file offset) a new run begins at a better address: the bytes still travel from
the same reads, split into one more copy, and no second copy on the device is ever needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.headers import Header, TensorEntry

SECTION_ALIGNMENT_BYTES = 512
VECTOR_BYTES = 16
"""What compiled kernels assume of an address."""

LARGE_TENSOR_BYTES = 64 << 10
"""From this size on a tensor gets a section's alignment: one more copy costs nothing beside it."""


class Run(NamedTuple):
    """Bytes ``start..end`` of a shard's data section, contiguous at ``target`` in the allocation."""

    start: int
    end: int
    target: int


class Placement(NamedTuple):
    """Where one tensor lies in the allocation; tensors of no bytes have no place."""

    shard: int
    entry: TensorEntry
    target: int


class Segment(NamedTuple):
    """One read: ``length`` bytes at ``offset`` of a shard's data section."""

    shard: int
    offset: int
    length: int


@dataclass(frozen=True)
class Plan:
    """``odd_tensors`` lie badly in their file and begin a run of their own; ``odd_bytes`` is their size."""

    size_bytes: int
    runs: tuple[tuple[Run, ...], ...]
    placements: tuple[Placement, ...]
    odd_tensors: int
    odd_bytes: int

    def pieces(self, segment: Segment) -> Iterator[tuple[int, int, int]]:
        """Yield ``(offset in the segment, length, target)`` of each part of a segment that goes anywhere."""
        runs = self.runs[segment.shard]
        end = segment.offset + segment.length
        position = bisect_right(runs, segment.offset, key=attrgetter("end"))
        while position < len(runs) and runs[position].start < end:
            run = runs[position]
            first, last = max(run.start, segment.offset), min(run.end, end)
            yield first - segment.offset, last - first, run.target + first - run.start
            position += 1


def plan_placement(checkpoint: Checkpoint) -> Plan:
    """Return where every tensor of ``checkpoint`` goes."""
    size_bytes = odd_tensors = odd_bytes = 0
    shard_runs = []
    placements = []
    for shard, header in enumerate(checkpoint.shards):
        runs: list[Run] = []
        size_bytes = round_up(size_bytes, SECTION_ALIGNMENT_BYTES)
        target = size_bytes
        for entry in header.tensors:
            if not entry.nbytes or (shard, entry.name) in checkpoint.shadowed:
                continue
            if runs and runs[-1].end == entry.start:
                target = runs[-1].target + entry.start - runs[-1].start
            else:
                target = round_up(size_bytes, SECTION_ALIGNMENT_BYTES)
            better = round_up(target, alignment_of(entry))
            if better != target:
                target = better
                odd_tensors += 1
                odd_bytes += entry.nbytes
            if runs and runs[-1].end == entry.start and target - runs[-1].target == entry.start - runs[-1].start:
                runs[-1] = Run(runs[-1].start, entry.end, runs[-1].target)
            else:
                runs.append(Run(entry.start, entry.end, target))
            placements.append(Placement(shard, entry, target))
            size_bytes = target + entry.nbytes
        shard_runs.append(tuple(runs))
    return Plan(size_bytes, tuple(shard_runs), tuple(placements), odd_tensors, odd_bytes)


def cut_segments(checkpoint: Checkpoint, length: int) -> tuple[Segment, ...]:
    """Return reads that cover every data section, cut where the offset *in the file* is a multiple of ``length``.

    So a length of whole pages gives segments that share no page, and reads that O_DIRECT can widen to
    whole blocks without being longer than ``length``.
    """
    return tuple(
        segment for shard, header in enumerate(checkpoint.shards) for segment in cut_shard(shard, header, length)
    )


def cut_shard(shard: int, header: Header, length: int) -> Iterator[Segment]:
    """Yield the segments of one shard; see `cut_segments`."""
    start = header.data_start
    while start < header.size_bytes:
        end = min(start // length * length + length, header.size_bytes)
        yield Segment(shard, start - header.data_start, end - start)
        start = end


def alignment_of(entry: TensorEntry) -> int:
    """Return what a tensor's address must be a multiple of."""
    if entry.nbytes >= LARGE_TENSOR_BYTES:
        return SECTION_ALIGNMENT_BYTES
    return VECTOR_BYTES if entry.nbytes >= VECTOR_BYTES else DTYPES[entry.dtype].item_bytes


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
