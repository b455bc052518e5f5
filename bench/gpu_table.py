"""Turns the records of ``gpu-load`` into a table in markdown: medians with their spread, beside the ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

COLUMNS = ("what", "way", "n", "median s", "fastest–slowest s", "GB/s", "of the ceiling", "bytes")


def make_table(records: Sequence[Record], size_bytes: int) -> str:
    """Return one table for each part that was measured.

    Ceiling: of a warm part the pinned copies measured beside, of a cold one the quicker raw read of the same round.
    """
    checks = {record["label"]: record for record in records if record.get("part") == "check"}
    absent = [f"- {record['label']}: {record['error']}" for record in records if record.get("part") == "absent"]
    parts = dict.fromkeys(record["part"] for record in records if "seconds" in record and record["part"] != "check")
    tables = [_part_table(part, records, checks, size_bytes) for part in parts]
    if absent:
        tables.append("Not measured:\n\n" + "\n".join(absent))
    return "\n\n".join(tables) + "\n"


def _part_table(part: str, records: Sequence[Record], checks: Mapping[str, Record], size_bytes: int) -> str:
    mine = [record for record in records if record.get("part") == part]
    lines = [f"### {part}", "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    is_cold = part.startswith("cold")
    ceiling = None if is_cold else _h2d_ceiling(records)
    rows = []
    for label in dict.fromkeys(record["label"] for record in mine if "seconds" in record):
        loads = [record for record in mine if record["label"] == label and "seconds" in record]
        times = [record["seconds"] for record in loads]
        rate = size_bytes / statistics.median(times)
        share = _share_of_raw(loads, mine) if is_cold else ""
        if ceiling is not None:
            share = f"{rate / ceiling:.2f}"
        spread = f"{min(times):.3f}–{max(times):.3f}"
        way = loads[-1].get("path") or ""
        cells = (label, way, len(times), f"{statistics.median(times):.3f}", spread, f"{rate / 1e9:.1f}", share)
        rows.append((statistics.median(times), [*map(str, cells), _equality(checks.get(label))]))
    lines += ["| " + " | ".join(cells) + " |" for _, cells in sorted(rows, key=lambda row: row[0])]
    if ceiling is not None:
        lines += ["", f"Ceiling: {ceiling / 1e9:.1f} GB/s, copies from one pinned buffer of 1 GiB."]
    reasons = dict.fromkeys(f"- {record['label']}: {record['reason']}" for record in mine if record.get("reason"))
    errors = dict.fromkeys(f"- {record['label']}: {record['error']}" for record in mine if record.get("error"))
    return "\n".join([*lines, *([""] if reasons or errors else []), *reasons, *errors])


def _h2d_ceiling(records: Sequence[Record]) -> float | None:
    found = [record["ceiling_bytes_s"] for record in records if record.get("label") == "pinned H2D ceiling"]
    return statistics.median(found) if found else None


def _share_of_raw(loads: Sequence[Record], mine: Sequence[Record]) -> str:
    """Return how much of the quicker raw read of its own round each load reached: median and spread."""
    shares = []
    for load in loads:
        raw = [
            record["seconds"]
            for record in mine
            if record.get("loader") == "raw" and record["round"] == load["round"] and "seconds" in record
        ]
        if raw:
            shares.append(min(raw) / load["seconds"])
    if not shares:
        return ""
    return f"{statistics.median(shares):.2f} ({min(shares):.2f}–{max(shares):.2f})"


def _equality(check: Record | None) -> str:
    if check is None or "differing" not in check:
        return ""
    return "equal" if check["differing"] == 0 else f"**{check['differing']} tensors differ**"
