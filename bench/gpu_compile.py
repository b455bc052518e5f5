"""What a kept compile cache is worth: empty, kept whole, and without the functions compiled ahead of time.

``python bench/gpu_compile.py FOLDER``: FOLDER is a checkpoint, for example from ``bench/make_llama.py FOLDER
--layers 4``. Every start is a process of its own, forked from this one, which has imported what a zygote imports
and initialised nothing; its weights come as a run's do, a rehearsal beside them. Prints one JSON document. Each start
names what was imported only then; with ``--profile`` one more start from the kept cache says where its time goes. Exit
code 1 where the first token is not eager's (later ones may part at a tie, since compiled code rounds less), a kept
cache is no hit, or a start fails.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.gpu_facts import describe_machine  # noqa: E402
from remote_agent import caches, zygote  # noqa: E402
from remote_agent.pipeline import imports  # noqa: E402

REQUESTS = 3
CALLS_SHOWN = 80


def main() -> int:
    """Run every start and print what each took; return 0 if everything held."""
    arguments = parse_arguments()
    found: dict[str, Any] = {"machine": describe_machine(), "argv": sys.argv[1:]}
    given = {name: os.environ.get(name) for name in imports.THREAD_VARIABLES}
    imports.settle_environment(os.environ, {**imports.QUIET_IMPORTS, **caches.NOWHERE})
    begun = time.monotonic()
    imports.import_everything()
    imports.import_model_code(arguments.folder)
    found["import_s"] = round(time.monotonic() - begun, 3)
    zygote.freeze_objects()
    folder = Path(tempfile.mkdtemp(prefix="glowplug-compile-", dir=arguments.cache_parent))
    try:
        starts = measure(arguments, folder, lambda mode: start(arguments, folder, mode, given))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found.update(starts=starts, summary=summarise(starts), problems=find_problems(starts))
    print(json.dumps(found, indent=1, ensure_ascii=False))
    return 1 if found["problems"] else 0


def parse_arguments() -> argparse.Namespace:
    """Return what to run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:0", help="cpu, cuda:N or a GPU UUID (default: cuda:0)")
    parser.add_argument("--kept", type=int, default=5, help="starts from the kept cache (default: 5)")
    parser.add_argument("--graphs", type=int, default=2, help="starts without the kept functions (default: 2)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--profile", action="store_true", help="profile one more start from the kept cache")
    parser.add_argument("--cache-parent", type=Path, help="folder for the cache (default: the temporary one)")
    return parser.parse_args()


def measure(
    arguments: argparse.Namespace, root: Path, run: Callable[[str], dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return what each start told, in the order they ran; the first of all is eager."""
    starts = {"eager": [run("off")], "empty": [run("layer")]}
    starts["kept"] = [run("layer") for _ in range(arguments.kept)]
    if arguments.profile:
        starts["profiled"] = [run("profile")]
    starts["without functions"] = []
    for _ in range(arguments.graphs):
        shutil.rmtree(root / "functions", ignore_errors=True)
        starts["without functions"].append(run("layer"))
    return starts


def start(arguments: argparse.Namespace, root: Path, mode: str, given: dict[str, str | None]) -> dict[str, Any]:
    """Fork a process that warms the model with ``mode`` and return what it told."""
    reading, writing = os.pipe()
    begun = time.monotonic_ns()
    pid = zygote.fork()
    if pid == 0:
        try:
            os.close(reading)
            for name, value in given.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            try:
                told = warm_up(arguments, root, mode, begun)
            except BaseException as error:
                traceback.print_exc()
                told = {"error": f"{type(error).__name__}: {error}"}
            with open(writing, "w", encoding="utf-8") as pipe:
                json.dump(told, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"error": "the process died"}


def warm_up(arguments: argparse.Namespace, root: Path, mode: str, begun_ns: int) -> dict[str, Any]:
    """Do what a worker does up to its first request, and time each part. Runs in a process of its own."""
    from remote_agent.devices import open_device
    from remote_agent.loader.checkpoint import inspect
    from remote_agent.pipeline import assign, compilation, first_request, init, weights
    from remote_agent.pipeline.timing import Measure
    from remote_agent.protocol.messages import CompilePolicy, FirstRequest, ModelSource, Recipe

    request = FirstRequest("generate", prompt_tokens=arguments.prompt_tokens, max_new_tokens=arguments.new_tokens)
    policy = CompilePolicy("layer" if mode == "profile" else mode)
    recipe = Recipe("compile", ModelSource(str(arguments.folder)), request=request, compile=policy)
    device = open_device(arguments.device)
    init.set_threads()
    device.initialise()
    device.open_context()
    loading = Measure(0)
    shards = inspect(arguments.folder).identities
    found = weights.load_weights(recipe, device, shards, loading, lambda done, total: None)
    warm, _ = assign.assign_module(recipe, arguments.folder, found.tensors, device.torch_device, Measure(0))
    found.settle()
    device.synchronise()
    told: dict[str, Any] = {"before_compile_ns": time.monotonic_ns() - begun_ns, "weights": dict(loading.extra)}
    before, profiler = set(sys.modules), cProfile.Profile()
    if mode == "profile":
        profiler.enable()
    span = Measure(time.monotonic_ns())
    compiled = compilation.warm_kernels(warm, request, policy, root, span, lambda done, total: None)
    device.synchronise()
    told.update(compile_ns=time.monotonic_ns() - span.start_mono_ns, used=compiled.used, reason=span.reason)
    profiler.disable()
    told["extra"], told["imported"] = dict(span.extra), sorted(set(sys.modules) - before)
    if mode == "profile":
        told["profile"] = longest_calls(profiler)
    told["requests"] = []
    for _ in range(REQUESTS):
        asked = Measure(time.monotonic_ns())
        answer = first_request.answer_first_request(warm, request, asked)
        first, total = answer.first_output_mono_ns - asked.start_mono_ns, time.monotonic_ns() - asked.start_mono_ns
        told["requests"].append(
            {"first_ns": first, "next_ns": (total - first) // max(1, arguments.new_tokens - 1), **asked.extra}
        )
        told["tokens"] = answer.tokens
    return told


def longest_calls(profiler: cProfile.Profile) -> list[list[object]]:
    """Return the functions with the most time below them: name, calls, seconds in it, seconds in it and below."""
    found = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = [
        [f"{Path(file).name}:{line} {name}", calls, round(own, 4), round(below, 4)]
        for (file, line, name), (_, calls, own, below, _) in found.items()
    ]
    return sorted(rows, key=lambda row: row[3], reverse=True)[:CALLS_SHOWN]


def summarise(starts: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, object]]:
    """Return for each kind of start the median and range of its parts, in seconds."""
    summary: dict[str, dict[str, object]] = {}
    for kind, found in starts.items():
        good = [one for one in found if "error" not in one]
        parts: dict[str, list[float]] = {"compile": [one["compile_ns"] / 1e9 for one in good]}
        for name in ("eager_ns", "key_ns", "load_ns", "compiled_ns", "save_ns"):
            parts[name[: -len("_ns")]] = [one["extra"][name] / 1e9 for one in good if name in one["extra"]]
        parts["first token again"] = [one["requests"][-1]["first_ns"] / 1e9 for one in good]
        parts["next token"] = [one["requests"][-1]["next_ns"] / 1e9 for one in good]
        summary[kind] = {
            name: {"n": len(times), "median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}
            for name, times in parts.items()
            if times
        }
        summary[kind]["reasons"] = sorted({str(one["reason"]) for one in good})
    return summary


def find_problems(starts: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return what does not hold of the starts."""
    tokens = starts["eager"][0].get("tokens")
    problems = []
    for kind, found in starts.items():
        for number, one in enumerate(found, start=1):
            name = f"{kind} {number}"
            if "error" in one:
                problems.append(f"{name}: {one['error']}")
                continue
            if [row[:1] for row in one["tokens"]] != [row[:1] for row in tokens or ()]:
                problems.append(f"{name}: the first token of {one['tokens']} is not that of eager's {tokens}")
            if kind != "eager" and not one["used"]:
                problems.append(f"{name}: {one['reason']}")
            if kind in ("kept", "profiled") and one["extra"].get("cache") != "hit":
                problems.append(f"{name}: no hit: {one['reason']}")
            if kind != "eager" and not one["extra"].get("ahead"):
                problems.append(f"{name}: not ahead of time: {one['extra'].get('not_ahead')}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
