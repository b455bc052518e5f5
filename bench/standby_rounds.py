"""Arms one process for a resident model and lets it answer again and again, each time from the stand-in.

``python -m bench.standby_rounds RECIPE --state-dir FOLDER``: what a standby does from the word to go to its first
token, by the pipeline's own functions, without an agent around it. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.kernel_table import as_text, profile_kernels
from remote_agent.agentd.paths import StateDir
from remote_agent.devices import Device, open_device
from remote_agent.keeper.client import KeeperAddress, list_residents
from remote_agent.loader.checkpoint import inspect
from remote_agent.pipeline import arming, compilation, prompt_graph
from remote_agent.pipeline.compile_attempt import TOLERANCE
from remote_agent.pipeline.first_request import answer_request
from remote_agent.pipeline.keeping import Keeping
from remote_agent.pipeline.making import Held
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.internal import WorkerGo, WorkerJob
from remote_agent.protocol.messages import FirstRequest, Recipe
from remote_agent.recipe import read_recipe
from remote_agent.resident.stand_in import choose_chunk_bytes

MS = 1e-6


def main() -> int:
    """Print what each round took, and whether its token is an eager pass's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--state-dir", type=Path, required=True, help="of the agent whose keeper has the weights")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write there what the device does in one replay")
    parser.add_argument("--cache", type=Path, help="folder for what is compiled (default: one of its own, removed)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-") as folder:
        print(json.dumps(measure(arguments, arguments.cache or Path(folder))))
    return 0


def measure(arguments: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Return what arming took and what each round did, the first apart: it is all that a process armed once does."""
    state = StateDir(arguments.state_dir)
    recipe = read_recipe(arguments.recipe)
    (resident,) = [one.name for one in list_residents(KeeperAddress(state))]
    name = resident.rpartition("@")[2]
    job = WorkerJob("bench-00000001", recipe, name, 0, str(cache), None, str(state.root), "bench")
    go = WorkerGo(inspect(Path(recipe.model.path)).identities, resident, True)
    device = open_device(name)
    device.initialise()
    device.open_context()
    held, armed = arm(recipe, job, go, device)
    rounds = [answer(held, job, go, device) for _ in range(arguments.rounds)]
    found = {"armed": armed, "first": rounds[0], "rounds": rounds[1:], "medians_ms": medians(rounds[1:])}
    if arguments.profile is not None:
        found["kernels"] = profile(held, job, go, device, arguments.profile)
    return found


def arm(recipe: Recipe, job: WorkerJob, go: WorkerGo, device: Device) -> tuple[Held, dict[str, Any]]:
    """Return the armed model and what that took."""
    begun, (free_before, _) = time.monotonic_ns(), device.memory()
    measure, compiling = Measure(0), Measure(0)
    armed, warm, _ = arming.arm_module(recipe, go.shards, device, measure)
    cache = Path(job.cache_directory)
    compilation.warm_kernels(warm, recipe.request, recipe.compile, cache, compiling, lambda done, total: None)
    graph = prompt_graph.capture_prompt(warm, recipe.request, recipe.compile, cache, device, compiling)
    armed = replace(armed, graph=graph)
    arming.rehearse(armed)
    arming.settle_down()
    facts = {
        "seconds": (time.monotonic_ns() - begun) / 1e9,
        "taken_bytes": free_before - device.memory()[0],
        "stand_in_bytes": armed.range.stand_in_bytes,
        "chunk_limit_bytes": choose_chunk_bytes(armed.range.size_bytes, free_before),
        "compile_reason": compiling.reason,
        **measure.extra,
        **compiling.extra,
    }
    return Held(recipe, go.shards, warm, arming.Backing(), armed), facts


def answer(held: Held, job: WorkerJob, go: WorkerGo, device: Device) -> dict[str, Any]:
    """Attach, answer, compare, and leave the stand-in in place again; times in milliseconds.

    ``answer_ms``: what is still to be waited for once the weights were found right. ``replay_ms``: a replay alone.
    """
    assert held.armed is not None
    request, measure, keeping = held.recipe.request, Measure(0), Keeping(job, go)
    queued: list[prompt_graph.Queued | None] = []

    def ask() -> None:
        if held.graph is not None:
            queued.append(prompt_graph.queue_request(held.warm, request, held.graph))

    device.synchronise()
    begun = time.monotonic_ns()
    arming.attach_under(held.armed, keeping, measure, ask)
    attached = time.monotonic_ns()
    given = answer_request(held.warm, request, held.graph, *queued)
    row: dict[str, Any] = {
        "first_token_ms": (given.first_output_mono_ns - begun) * MS,
        "attach_ms": (attached - begun) * MS,
        "answer_ms": (given.first_output_mono_ns - attached) * MS,
        "replayed": given.is_replayed,
        "token": given.tokens[0][0],
    }
    row |= {key.replace("_ns", "_ms"): value * MS for key, value in measure.extra.items() if key.endswith("_ns")}
    if held.graph is not None:
        row["difference"] = prompt_graph.largest_deviation(held.warm, request, held.graph)
        row["replay_ms"] = timed(held.graph.replay, device)
    row["again_ms"] = timed(lambda: answer_request(held.warm, request, held.graph), device)
    row["pass_ms"] = timed(lambda: answer_request(held.warm, request), device)
    passed = answer_request(held.warm, request)
    row["pass_token"] = passed.tokens[0][0]
    row["tokens_equal"] = passed.tokens == given.tokens
    row["is_right"] = row["difference"] <= TOLERANCE[held.warm.dtype] if "difference" in row else row["tokens_equal"]
    other = FirstRequest(prompt_tokens=request.prompt_tokens - 51, max_new_tokens=4)
    row["other_length_ms"] = timed(lambda: answer_request(held.warm, other, held.graph), device)
    row["other_tokens"] = answer_request(held.warm, other, held.graph).tokens[0]
    keeping.detach()
    begun = time.monotonic_ns()
    held.armed.range.unmap(stand_in=True)
    row["back_to_stand_in_ms"] = (time.monotonic_ns() - begun) * MS
    return row


def profile(held: Held, job: WorkerJob, go: WorkerGo, device: Device, file: Path) -> dict[str, Any]:
    """Return what the device does in one answer over the weights, and write it as a table."""
    assert held.armed is not None
    keeping = Keeping(job, go)
    arming.attach_under(held.armed, keeping, Measure(0), lambda: None)
    found = profile_kernels(lambda: answer_request(held.warm, held.recipe.request, held.graph), device)
    keeping.detach()
    held.armed.range.unmap(stand_in=True)
    file.write_text(as_text(found), encoding="utf-8")
    return found


def timed(work: Any, device: Device) -> float:
    """Return the milliseconds that ``work`` takes on an idle device, to its end there."""
    device.synchronise()
    begun = time.monotonic_ns()
    work()
    device.synchronise()
    return (time.monotonic_ns() - begun) * MS


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0] if key.endswith("_ms")}


if __name__ == "__main__":
    sys.exit(main())
