"""``python -m bench``: how the loader compares with safetensors on this CPU; ``--out FILE`` keeps the raw times.

On a GPU host ``python -m bench gpu`` measures everything that docs/performance.md shows, ``gpu-load FOLDER`` the loader
and its peers alone; ``gpu-report OUT …`` renders what ``gpu`` kept. ``folios`` shows how quick a file is read again, by
the way in which it got into the page cache.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from bench.pairs import compare

if TYPE_CHECKING:
    from bench.cpu_load import Timings

FEWEST = 5
MEMORY_LOADS = 3
ELSEWHERE = {
    "folios": "bench.folios",
    "gpu": "bench.gpu_run",
    "gpu-load": "bench.gpu_loader",
    "gpu-report": "bench.gpu_report",
}
"""Commands that are modules of their own."""


def main() -> int:
    """Measure cached and cold loads, print medians, spread and ratios; return 0."""
    if sys.argv[1:2] and sys.argv[1] in ELSEWHERE:
        command: Callable[[list[str]], int] = importlib.import_module(ELSEWHERE[sys.argv[1]]).main
        return command(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--size-mib", type=int, default=512, help="size of the checkpoint (default: 512)")
    parser.add_argument("--repetitions", type=int, default=7, help=f"loads of each kind, {FEWEST} or more (default: 7)")
    parser.add_argument(
        "--folder", type=Path, help="where to write the checkpoint meanwhile (default: a temporary folder)"
    )
    parser.add_argument("--out", type=Path, help="file for the raw times as JSON")
    arguments = parser.parse_args()
    if arguments.repetitions < FEWEST or arguments.size_mib < 32:
        parser.error(f"at least {FEWEST} repetitions and 32 MiB, or the figures mean nothing")
    from bench.cpu_load import measure, write_checkpoint  # only now: a usage error must not wait for torch
    from bench.cpu_memory import judge_memory, measure_memory

    results = {}
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-", dir=arguments.folder) as folder:
        shards = write_checkpoint(Path(folder), arguments.size_mib << 20)
        size_bytes = sum(path.stat().st_size for path in shards)
        print(f"{size_bytes / 1e6:.0f} MB in {len(shards)} shards, {arguments.repetitions} loads of each kind in turn")
        for state in ("cached", "cold"):
            results[state] = measure(Path(folder), shards, arguments.repetitions, is_cold=state == "cold")
            print_table(state, results[state], size_bytes)
        memory = {side: [measure_memory(side, Path(folder)) for _ in range(MEMORY_LOADS)] for side in results["cached"]}
    print("\npeak extra anonymous memory of a load in a fresh process")
    for side, loads in memory.items():
        print(f"{side:<22}{judge_memory([load.peak_extra_bytes for load in loads])}")
    if arguments.out:
        times = {state: {side: asdict(timings) for side, timings in sides.items()} for state, sides in results.items()}
        document = {
            "machine": describe_machine(),
            "size_bytes": size_bytes,
            "times": times,
            "memory": {side: [asdict(load) for load in loads] for side, loads in memory.items()},
            "argv": sys.argv[1:],
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"\nraw times: {arguments.out}")
    return 0


def print_table(state: str, sides: dict[str, Timings], size_bytes: int) -> None:
    """Print a line for each side and figure, and the ratio of loads beside each other with its spread and verdict."""
    print(f"\n{state:<9}{'':<13}{'median':>10}{'fastest':>10}{'slowest':>10}{'GB/s':>8}")
    for figure in ("returned", "touched", "worked"):
        for side, timings in sides.items():
            times_ns: list[int] = getattr(timings, f"{figure}_ns")
            median_ns = statistics.median(times_ns)
            cells = "".join(f"{value / 1e6:>7.1f} ms" for value in (median_ns, min(times_ns), max(times_ns)))
            print(f"{figure:<9}{side:<13}{cells}{size_bytes / median_ns:>8.2f}")
        ours, theirs = (getattr(sides[side], f"{figure}_ns") for side in ("glowplug", "safetensors"))
        print(f"{'':<9}ratio {compare(ours, theirs)}")


def describe_machine() -> dict[str, str | int | None]:
    """Return what the figures depend on."""
    return {
        "taken": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "safetensors": version("safetensors"),
        "glowplug": version("glowplug"),
    }


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


if __name__ == "__main__":
    sys.exit(main())
