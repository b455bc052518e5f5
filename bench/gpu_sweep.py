"""What ``gpu-load --parts sweep cold-sweep`` varies, and a line for each: median, share of the ceiling, steps. Pure.

From a warm page cache one thing is varied at a time around the loader's own limits, but registrations with readers.
Steps are milliseconds, medians, summed over threads: ``register`` ``copy`` ``idle`` are the one thread's that makes
CUDA calls, ``read`` and ``wait`` the readers'.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

MIB = 1 << 20
RING_BYTES = 96 * MIB
STEPS = ("allocate", "route", "move", "register", "copy", "idle", "read", "wait", "views")

Request = dict[str, Any]


def pool(readers: int, buffer_mib: int, ring_bytes: int = RING_BYTES) -> list[int]:
    """Return a cut of the ring as a request has it: readers, buffers, bytes of a buffer."""
    return [readers, ring_bytes // (buffer_mib * MIB), buffer_mib * MIB]


def mixed(registration_mib: int = 32, cut: Sequence[int] = (), **limits: object) -> Request:
    chosen = list(cut) or pool(5, 4)
    return {"path": "auto", "limits": {"registration_bytes": registration_mib * MIB, "mixed": chosen, **limits}}


def staged(cut: Sequence[int], **limits: object) -> Request:
    return {"path": "staged", "limits": {"staged": list(cut), **limits}}


WARM: tuple[Request, ...] = (
    *(mixed(32, pool(5, 4, size * MIB)) for size in (48, 96, 144, 192, 256)),
    *(mixed(32, pool(4, 4, size * MIB)) for size in (96, 192)),
    *(mixed(32, pool(5, buffer, 192 * MIB)) for buffer in (2, 8)),
    *(mixed(registration, pool(5, 4, 192 * MIB)) for registration in (16, 64)),
    mixed(32, pool(5, 4, 192 * MIB), switch_interval_s=None),
    mixed(32, pool(5, 4, 192 * MIB), streams=1),
    {"path": "auto"},
    {"path": "mapped"},
    *(staged(pool(readers, 4, 192 * MIB)) for readers in (8, 12)),
)

COLD: tuple[Request, ...] = tuple(
    {"page_cache": page_cache, "limits": {"cold": pool(readers, buffer)}}
    for page_cache in ("bypass", "keep")
    for readers, buffer in ((32, 8), (64, 3), (64, 8), (128, 3), (128, 8), (256, 8))
)


def summarise(records: Sequence[Mapping[str, Any]], part: str, size_bytes: int) -> str:
    """Return a line for each configuration of a part, the quickest first."""
    ceilings = [record["ceiling_bytes_s"] for record in records if record.get("label") == "pinned H2D ceiling"]
    ceiling = statistics.median(ceilings) if ceilings else None
    mine = [record for record in records if record.get("part") == part and "seconds" in record and "label" in record]
    lines = []
    for label in dict.fromkeys(record["label"] for record in mine if "steps_ns" in record):
        loads = [record for record in mine if record["label"] == label]
        seconds = statistics.median(record["seconds"] for record in loads)
        share = "" if ceiling is None else f"{size_bytes / seconds / ceiling:5.3f}"
        steps = [f"{step} {_median_ms(loads, step):.1f}" for step in STEPS]
        mapped = statistics.median(record["counters"].get("mapped_bytes", 0) for record in loads) / size_bytes
        own = [record["ceiling_bytes_s"] / 1e9 for record in loads if record.get("ceiling_bytes_s")]
        text = f"{seconds:.4f} s {share} n={len(loads)} | {label}\n    {' '.join(steps)} | mapped {mapped:.2f}"
        lines.append((seconds, text + (f" own ceiling {statistics.median(own):.1f} GB/s" if own else "")))
    return "\n".join(text for _, text in sorted(lines))


def _median_ms(loads: Sequence[Mapping[str, Any]], step: str) -> float:
    return float(statistics.median(record["steps_ns"].get(step, 0) for record in loads)) / 1e6
