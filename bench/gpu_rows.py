"""What the GPU benchmark has to reach, and how each figure is read out of what the parts found. Pure.

A part that is not there leaves its row "not measured". Where a ceiling was measured in the same part, a figure is
judged by its share of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.pairs import is_behind

Parts = Mapping[str, Any]
"""What each part found, by the part's name."""
Records = Sequence[Mapping[str, Any]]
Request = Mapping[str, object]

CEILING = "pinned H2D ceiling"

ENOUGH = 5
"""Fewer values than that make no median to be judged by."""


@dataclass(frozen=True)
class Measured:
    """Values of one figure in ``unit``, and what they stand beside. ``notes`` are words, not figures."""

    values: tuple[float, ...]
    unit: str
    is_reached: bool
    ceiling: str = ""
    ratio: str = ""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table; ``measure`` returns None where the part was not run."""

    what: str
    to_reach: str
    measure: Callable[[Parts], Measured | None]


def of_ceiling(
    what: str,
    part: str,
    request: Request | None,
    least: float,
    threads_max: int | None = None,
    loader: str = "glowplug",
) -> Row:
    """Return the row of loads from memory, judged by their share of the pinned copies that ``part`` measured."""

    def measure(parts: Parts) -> Measured | None:
        records = parts.get(part, ())
        times = seconds(records, loader, request)
        ceilings = [record["ceiling_bytes_s"] for record in records if record.get("label") == CEILING]
        if not times or not ceilings:
            return None
        ceiling = statistics.median(ceilings)
        share = model_bytes(records) / statistics.median(times) / ceiling
        used = max((one["threads"] for one in records if is_of(one, loader, request) and "threads" in one), default=0)
        wrong = misfit(records, loader, request)
        reached = share >= least and (threads_max is None or used <= threads_max) and not wrong
        note = wrong or (f"{used} threads" if used else "")
        return Measured(times, "s", reached, f"{ceiling / 1e9:.1f} GB/s pinned", f"{share:.2f}", note)

    return Row(what, f"≥ {least:.2f} of the ceiling", measure)


def of_raw_read(page_cache: str, least: float) -> Row:
    """Return the row of cold loads, each judged by the quicker raw read of its own round."""
    request = {"page_cache": page_cache}

    def measure(parts: Parts) -> Measured | None:
        records = cold_records(parts)
        times, pairs = seconds(records, "glowplug", request), pairs_with_raw(records, request)
        if not pairs:
            return None
        shares = [raw / ours for ours, raw in pairs]
        ceiling, wrong = (
            f"{statistics.median(raw for _, raw in pairs):.2f} s raw read",
            misfit(records, "glowplug", request),
        )
        reached = statistics.median(shares) >= least and not wrong
        return Measured(times, "s", reached, ceiling, spread(shares, "", 2), wrong)

    return Row(f"disk, cache dropped, `page_cache={page_cache}`", f"≥ {least:.2f} of the raw read beside it", measure)


def beside_peers(page_cache: str) -> Row:
    """Return the row of cold loads, judged by every peer, in pairs of one round each."""
    request = {"page_cache": page_cache}

    def measure(parts: Parts) -> Measured | None:
        records = parts.get("cold-peers", ())
        times = seconds(records, "glowplug", request)
        ratios = {peer: pairs_with(records, request, peer) for peer in loaders(records)}
        ratios = {peer: found for peer, found in ratios.items() if found}
        if not times or not ratios:
            return None
        nearest = min(ratios, key=lambda peer: statistics.median(ratios[peer]))
        reached = not misfit(records, "glowplug", request) and not any(is_behind(found) for found in ratios.values())
        return Measured(times, "s", reached, nearest, spread(ratios[nearest], "", 2), "its time ÷ ours")

    return Row(f"the same, `page_cache={page_cache}`, beside every peer", "not behind any beyond the spread", measure)


def at_most(
    what: str,
    limit: float,
    unit: str,
    figures: Callable[[Parts], Sequence[float]],
    note: Callable[[Parts], str] = lambda parts: "",
) -> Row:
    """Return the row of a figure whose median may be ``limit`` at most, with a ``note`` beside it."""
    scale = {"s": 1.0, "ms": 1e3, "MiB": 1.0}[unit]

    def measure(parts: Parts) -> Measured | None:
        values = tuple(value * scale for value in figures(parts))
        return Measured(values, unit, statistics.median(values) <= limit, note=note(parts)) if values else None

    return Row(what, f"≤ {limit:g} {unit}" if limit else "0", measure)


def is_of(record: Mapping[str, Any], loader: str, request: Request | None) -> bool:
    """Whether a record is of a load by ``loader`` with just that request; None takes any."""
    return record.get("loader") == loader and request in (None, record.get("request"))


def loads(records: Records, loader: str, request: Request | None = None) -> Records:
    """Return a loader's counted loads: a first one, which is compared byte by byte, is none."""
    return [one for one in records if is_of(one, loader, request) and "seconds" in one and one["part"] != "check"]


def misfit(records: Records, loader: str, request: Request | None) -> str:
    """Return how many tensors of a loader's checked loads were not safetensors': speed counts for equal bytes alone."""
    checks = [one.get("differing", 0) for one in records if is_of(one, loader, request) and one["part"] == "check"]
    return f"**{max(checks)} tensors differ**" if any(checks) else ""


def seconds(records: Records, loader: str, request: Request | None = None) -> tuple[float, ...]:
    """Return the times of a loader's counted loads."""
    return tuple(record["seconds"] for record in loads(records, loader, request))


def model_bytes(records: Records) -> int:
    """Return the size of the model that was loaded."""
    return next((int(record["size_bytes"]) for record in records if "size_bytes" in record), 0)


def loaders(records: Records) -> list[str]:
    """Return the peers that were measured, in the order they came."""
    names = dict.fromkeys(record.get("loader") for record in records if "seconds" in record)
    return [name for name in names if name not in (None, "glowplug", "raw")]


def cold_records(parts: Parts) -> Records:
    """Return the records of cold loads: those with peers, or those without where there are no others."""
    found: Records = parts.get("cold-peers") or parts.get("cold") or ()
    return found


def pairs_with_raw(records: Records, request: Request) -> list[tuple[float, float]]:
    """Return the seconds of each cold load and of the quicker raw read of its round."""
    raw: dict[int, float] = {}
    for record in loads(records, "raw"):
        raw[record["round"]] = min(record["seconds"], raw.get(record["round"], record["seconds"]))
    ours = loads(records, "glowplug", request)
    return [(record["seconds"], raw[record["round"]]) for record in ours if record["round"] in raw]


def pairs_with(records: Records, request: Request, peer: str) -> list[float]:
    """Return a peer's time over Glowplug's in each round that has both: above 1 Glowplug is quicker."""
    ours = {record["round"]: record["seconds"] for record in loads(records, "glowplug", request)}
    theirs = {record["round"]: record["seconds"] for record in loads(records, peer)}
    return [theirs[number] / ours[number] for number in ours if number in theirs]


def spread(values: Sequence[float], unit: str, digits: int) -> str:
    """Return median, range and count of some values."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    after = f" {unit}" if unit else ""
    return f"{statistics.median(values):.{digits}f}{after} ({low}–{high}, n = {len(values)})"


def first_tokens(parts: Parts) -> list[float]:
    """Return the seconds from request to first token of runs whose agent was up and whose files were cached."""
    runs = parts.get("pipeline", {}).get("runs", ())
    found = [run["record"].get("first_output_ns") for run in runs if run["label"] == "cached"]
    return [value / 1e9 for value in found if value]


def attaches(parts: Parts) -> list[float]:
    """Return the seconds of each attach but a process's first."""
    attach = parts.get("pipeline", {}).get("attach") or {}
    return [one["seconds"] for one in attach.get("rounds", ())]


def compiles(parts: Parts) -> list[float]:
    """Return the seconds of each start from kept caches; a start that was no hit counts as what it took."""
    kept = parts.get("compile", {}).get("starts", {}).get("kept", ())
    return [one["compile_ns"] / 1e9 for one in kept if "compile_ns" in one]


def agreement(parts: Parts) -> str:
    """Return in words how far the compiled starts' tokens are eager's, where they part: a tie in bfloat16 can."""
    starts = parts.get("compile", {}).get("starts", {})
    (eager, *_), kept = starts.get("eager") or [{}], starts.get("kept", ())
    wanted = (eager.get("tokens") or [[]])[0]
    equal = min((count_equal(wanted, (one.get("tokens") or [[]])[0]) for one in kept), default=len(wanted))
    return "" if equal == len(wanted) else f"the first {equal} of {len(wanted)} tokens are eager's"


def count_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return after how many tokens two answers part."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def daemon_memory(parts: Parts) -> list[float]:
    """Return the MiB that NVML shows for agentd's own process, each time it was asked while a model was warm."""
    return [one["agentd_mib"] for one in parts.get("pipeline", {}).get("daemon", ()) if one["agentd_mib"] is not None]


def of_standby(what: str, limit_ms: float) -> Row:
    """Return the row of answers from the attach on: the quicker of a graph of eager and one of compiled layers.

    One whose tokens were not verified is left out; the note says which it is, what the others took, and whole runs.
    """

    def measure(parts: Parts) -> Measured | None:
        standby = parts.get("standby", {})
        found = {
            mode: tuple(one["first_token_ms"] for one in process["rounds"])
            for mode, process in standby.get("processes", {}).items()
            if process and process["rounds"]
        }
        right = {mode: times for mode, times in found.items() if standby.get("verified", {}).get(mode)}
        if not found:
            return None
        best = min(right or found, key=lambda mode: statistics.median(found[mode]))
        notes = [LAYERS.get(best, best) if right else f"**{LAYERS.get(best, best)}, tokens differ**"]
        notes += [
            f"{LAYERS.get(mode, mode)} {spread(times, 'ms', 2)}{'' if mode in right else ', **tokens differ**'}"
            for mode, times in found.items()
            if mode != best
        ]
        runs = [one.get("attach_to_first_output_ms") for one in standby.get("runs", ()) if one.get("mode") == best]
        runs = [one for one in runs if one is not None]
        notes += [f"in runs of the agent {spread(runs, 'ms', 2)}"] if runs else []
        reached = best in right and statistics.median(found[best]) <= limit_ms
        return Measured(found[best], "ms", reached, note="; ".join(notes))

    return Row(what, f"≤ {limit_ms:g} ms", measure)


LAYERS = {"off": "eager layers", "layer": "compiled layers", "model": "compiled whole"}
"""How a table names a recipe's ways to compile."""

ROWS = (
    of_ceiling("page cache → GPU, ≤ 6 threads", "warm", {"path": "auto"}, 0.90, threads_max=6),
    of_ceiling("page cache → GPU, `staged` alone", "warm", {"path": "staged"}, 0.80),
    of_ceiling("`host` tier → GPU", "host", {}, 0.98, loader="glowplug-host"),
    of_raw_read("keep", 0.95),
    of_raw_read("bypass", 0.95),
    beside_peers("keep"),
    beside_peers("bypass"),
    at_most("request → first token, agent up, page cache warm, eager", 0.9, "s", first_tokens),
    of_standby("attach to a standby → first token, 128 tokens in", 8),
    at_most("attach alone", 5, "ms", attaches),
    at_most("compile, caches kept, zygote up", 1, "s", compiles, agreement),
    at_most("GPU memory of agentd's own process", 0, "MiB", daemon_memory),
)
"""The figures of issue 3, in its order."""
