"""What ``attach`` itself costs, on the CPU: Llama-2-7B's tensors by name and number, their sizes scaled down.

``python -m bench.attach_cpu``: a real keeper holds the resident, and a process of its own attaches to it again and
again. A GPU's attach takes the same steps but for the map, and reads its samples by one copy from the device. Prints
one JSON document, times in milliseconds: medians and ranges of each step, of all of it, and with every tensor
touched once by name. The processor time is that of the attaching thread: what a busy machine adds is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCALED = ("--hidden", "128", "--intermediate", "344", "--heads", "32", "--vocabulary", "1000")
DEADLINE_S = 20
FEWEST = 9


def main() -> int:
    """Measure and print; return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=51, help=f"attaches, {FEWEST} or more (default: 51)")
    parser.add_argument("--residents", type=int, default=1, help="residents that the keeper has (default: 1)")
    parser.add_argument("--state-dir", type=Path, help="attach to what the keeper there has: for the measuring process")
    arguments = parser.parse_args()
    if arguments.rounds < FEWEST:
        parser.error(f"at least {FEWEST} rounds, or the median means nothing")
    if arguments.state_dir is not None:
        print(json.dumps(measure(arguments.state_dir, arguments.rounds), indent=1))
        return 0
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-") as folder:
        state, keeper = start_keeper(Path(folder) / "state")
        try:
            for number in range(arguments.residents):
                leave_resident(state, Path(folder) / f"llama-{number}")
            command = [sys.executable, "-m", "bench.attach_cpu", "--state-dir", str(state)]
            return subprocess.run([*command, "--rounds", str(arguments.rounds)], cwd=ROOT).returncode
        finally:
            keeper.terminate()
            keeper.wait()


def start_keeper(state: Path) -> tuple[Path, subprocess.Popen[bytes]]:
    """Return a state directory and the keeper that answers there."""
    from remote_agent.agentd.paths import StateDir
    from remote_agent.errors import KeeperError
    from remote_agent.keeper.client import KeeperAddress, list_residents

    directory = StateDir(state)
    directory.prepare()
    keeper = subprocess.Popen([sys.executable, "-m", "remote_agent", "keeper", "--state-dir", str(state)], cwd=ROOT)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            list_residents(KeeperAddress(directory))
            return state, keeper
        except KeeperError:
            time.sleep(0.02)
    keeper.kill()
    raise TimeoutError(f"the keeper did not answer within {DEADLINE_S} s")


def leave_resident(state: Path, folder: Path) -> None:
    """Write a checkpoint and leave its weights with the keeper, as a worker does."""
    from remote_agent.agentd.paths import StateDir
    from remote_agent.devices.cpu import CpuDevice
    from remote_agent.loader.checkpoint import inspect
    from remote_agent.pipeline.keeping import Keeping
    from remote_agent.pipeline.timing import Measure
    from remote_agent.pipeline.weights import load_weights
    from remote_agent.protocol.internal import WorkerGo, WorkerJob
    from remote_agent.protocol.messages import Hold, ModelSource, Recipe
    from remote_agent.resident.names import resident_name

    making = [sys.executable, "bench/make_llama.py", str(folder), *SCALED]
    subprocess.run(making, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    recipe = Recipe(folder.name, ModelSource(str(folder)), devices=("cpu",), target_tier="resident", hold=Hold())
    job = WorkerJob("run-00000001", recipe, "cpu", time.monotonic_ns(), "", None, str(StateDir(state).root), "bench")
    shards = inspect(folder).identities
    keeping = Keeping(job, WorkerGo(shards, resident_name(str(folder), shards, "cpu"), False))
    keepable = load_weights(recipe, CpuDevice(), (), Measure(0), lambda done, total: None).backing.keepable
    assert keepable is not None
    keeping.keep(keepable)


def measure(state: Path, rounds: int) -> dict[str, object]:
    """Return what attaching took in this process; its first time, which imports, is not counted."""
    import torch

    from remote_agent import attach

    model = "llama-0"
    attach(model, state_dir=state).close()
    times: dict[str, list[int]] = {"attach": [], "its processor time": [], "with every tensor touched": []}
    for _ in range(rounds):
        begun, worked = time.perf_counter_ns(), time.thread_time_ns()
        with attach(model, state_dir=state) as attached:
            times["attach"].append(time.perf_counter_ns() - begun)
            times["its processor time"].append(time.thread_time_ns() - worked)
            tensors = {name: attached.tensors[name] for name in attached.tensors}
            times["with every tensor touched"].append(time.perf_counter_ns() - begun)
            for step, taken in attached.steps.items():
                times.setdefault(step, []).append(taken)
            count = len(tensors)
            del tensors
    return {
        "tensors": count,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "ms": summarise(times),
    }


def summarise(times: Mapping[str, Sequence[int]]) -> dict[str, dict[str, float]]:
    """Return median, smallest, largest and number of some nanoseconds, in milliseconds."""
    return {
        name: {
            "median": round(statistics.median(found) / 1e6, 3),
            "min": round(min(found) / 1e6, 3),
            "max": round(max(found) / 1e6, 3),
            "n": len(found),
        }
        for name, found in times.items()
    }


if __name__ == "__main__":
    sys.exit(main())
