"""``make faults``: many rounds from one seed, several worlds side by side; says what was struck and what was lost."""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.faults.rounds import Report, plan_of, play
from tests.faults.world import World


def play_all(seeds: Sequence[int], jobs: int, told: Callable[[Report], None], keep: bool = False) -> list[Report]:
    """Return the reports of rounds with these seeds, in their order; a world in which one went wrong is left.

    ``keep``: such a world's folder stays, to be looked at.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in seeds:
        waiting.put(seed)
    reports: list[Report] = []
    workers = [threading.Thread(target=_play, args=(waiting, reports, told, keep)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sorted(reports, key=lambda report: seeds.index(report.plan.seed))


def _play(waiting: queue.SimpleQueue[int], reports: list[Report], told: Callable[[Report], None], keep: bool) -> None:
    while not waiting.empty():
        folder = Path(tempfile.mkdtemp(prefix="glowplug-faults-"))
        world, report = World(folder), None
        try:
            while report is None or not report.problem:
                try:
                    seed = waiting.get_nowait()
                except queue.Empty:
                    break
                report = play(world, plan_of(seed))
                if report.problem and keep:
                    report.problem += f" (see {folder})"
                reports.append(report)
                told(report)
        finally:
            world.close()
            if not (report and report.problem and keep):
                shutil.rmtree(folder, ignore_errors=True)


def describe(report: Report) -> str:
    how = report.problem or f"ok, {report.checked.events} events, runs {report.checked.ended}"
    struck = report.struck or "nothing: it was over"
    return f"seed {report.plan.seed}  {report.plan}; struck {struck}: {how}  ({report.wall_s:.1f} s)"


def summary(reports: Sequence[Report]) -> dict[str, object]:
    """Return the figures of all rounds together."""
    struck = Counter(f"{one.plan.verb} {one.plan.way} {one.plan.target}" for one in reports if one.struck)
    ended: Counter[str] = Counter()
    for one in reports:
        ended.update(one.checked.ended)
    parts = ("events", "drained", "shifted", "backed_out")
    return {
        "rounds": len(reports),
        "survived": sum(not one.problem for one in reports),
        "struck": dict(sorted(struck.items())),
        "looks": sum(one.looks for one in reports),
        "runs": dict(ended),
        **{name: sum(getattr(one.checked, name) for one in reports) for name in parts},
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, help="of the first round; the others count on from it")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, help="write every round as JSON")
    options = parser.parse_args(argv)
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6) * 20
    print(f"seed {first}: make faults SEED={first} ROUNDS={options.rounds} plays these rounds again", flush=True)
    seeds = range(first, first + options.rounds)
    reports = play_all(seeds, options.jobs, lambda report: print(describe(report), flush=True), keep=True)
    figures = summary(reports)
    print(json.dumps(figures, indent=2))
    if options.out is not None:
        server = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr.strip()
        machine = {"system": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()}
        content = {
            "seed": first,
            **figures,
            "machine": {**machine, "ssh": server},
            "played": list(map(asdict, reports)),
        }
        options.out.write_text(json.dumps(content, indent=1, default=str) + "\n")
    return 0 if figures["survived"] == len(seeds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
