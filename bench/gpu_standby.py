"""Measures what a standby waits with and how soon it answers, for one model; checks its tokens against transformers'.

``python bench/gpu_standby.py MODEL --out RESULT.json``: about two minutes for 13 GB on a GPU. An agent in a directory
of its own makes the model resident; then, eager and with compiled layers, one process is armed and answers again and
again (`bench/standby_rounds.py`), and whole runs of the agent start from armed processes. RESULT.json is written again
after each step; with ``--profile`` what the device does in one answer lies beside it. Exit code 1 if a run failed, a
first answer was no replay on a GPU, its logits are further from an ordinary pass's than compiled ones may be, or such a
pass, where nothing is compiled, has another token than transformers'.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.gpu_facts import describe_machine  # noqa: E402
from bench.gpu_pipeline import REFERENCE, Bench  # noqa: E402
from bench.raw_disk import refill_page_cache  # noqa: E402


def main() -> int:
    """Run every step, keep what came out, return 0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a checkpoint, for example from bench/make_llama.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto", help="auto (the first GPU), cpu, cuda:N or a GPU UUID")
    parser.add_argument("--rounds", type=int, default=15, help="answers of one armed process (default: 15)")
    parser.add_argument("--runs", type=int, default=3, help="runs from armed processes of the agent (default: 3)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--compile", nargs="+", choices=("off", "layer", "model"), default=["off", "layer"])
    parser.add_argument("--profile", action="store_true", help="write the kernels of one answer to RESULT.MODE.txt")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-") as folder:
        bench = Bench(arguments.out.resolve(), Path(folder))
        bench.keep("machine", describe_machine())
        try:
            measure(bench, arguments)
        finally:
            bench.agent("stop", "--force", "--keeper")
    bench.save()
    print(f"problems: {len(bench.result['problems'])}")
    return 1 if bench.result["problems"] else 0


def measure(bench: Bench, arguments: argparse.Namespace) -> None:
    """Make the model resident, let one process answer, let the agent's runs answer, and ask transformers."""
    model = arguments.model.resolve()
    bench.result.update(processes={}, verified={})
    write_recipe(bench, arguments, "resident", target_tier="resident")
    recipes = {
        mode: write_recipe(
            bench, arguments, f"standby-{mode}", compile={"mode": mode, "cache_directory": str(bench.folder / "cache")}
        )
        for mode in arguments.compile
    }
    (bench.folder / "cache").mkdir()
    refill_page_cache(sorted(model.glob("*.safetensors")))
    bench.keep("resident", bench.agent("run", str(bench.folder / "resident.json")))
    for mode, recipe in recipes.items():
        words = ["-m", "bench.standby_rounds", str(recipe), "--state-dir", str(bench.state_dir)]
        words += ["--rounds", str(arguments.rounds), "--cache", str(bench.folder / "cache")]
        words += ["--profile", str(bench.out.with_suffix(f".{mode}.txt"))] if arguments.profile else []
        bench.result["processes"][mode] = bench.python(*words)
        bench.save()
    script = [str(model), str(arguments.prompt_tokens), "1", arguments.device]
    for mode, recipe in recipes.items():
        for _ in range(arguments.runs):
            run_from_armed(bench, mode, recipe)
    bench.keep("released", bench.agent("release", "--all"))
    bench.keep("transformers", bench.python("-c", REFERENCE, *script))
    check(bench, arguments.device != "cpu")


def write_recipe(bench: Bench, arguments: argparse.Namespace, name: str, **more: object) -> Path:
    """Return a file with the recipe of that name."""
    content = {
        "name": name,
        "model": {"path": str(arguments.model.resolve())},
        "devices": [arguments.device],
        "request": {"kind": "generate", "prompt_tokens": arguments.prompt_tokens},
        **more,
    }
    path = bench.folder / f"{name}.json"
    path.write_text(json.dumps(content))
    bench.keep(f"recipe {name}", content)
    return path


def run_from_armed(bench: Bench, mode: str, recipe: Path) -> None:
    """Arm a process, do one run from it, end it; keep both records."""
    armed = bench.agent("standby", "start", str(recipe))
    status = bench.agent("status")
    record = bench.agent("run", str(recipe))
    bench.agent("standby", "stop", recipe.stem)
    if armed is None or record is None:
        return
    entries = [one for one in (status or {}).get("residents", ()) if one["tier"] == "armed"]
    row: dict[str, Any] = {"mode": mode, "armed": armed, "listed": entries, "record": record}
    bench.result["runs"].append(row)
    weights = next(stage for stage in record["stages"] if stage["name"] == "weights")
    if record["first_output_ns"] is not None and weights["start_ns"] is not None:
        row["attach_to_first_output_ms"] = (record["first_output_ns"] - weights["start_ns"]) * 1e-6
        print(f"run, {mode}: attach to first output {row['attach_to_first_output_ms']:.2f} ms", flush=True)
    bench.save()


def check(bench: Bench, has_graphs: bool) -> None:
    """Note whatever does not hold."""
    reference = bench.result.get("transformers")
    if not reference:
        bench.problem("transformers gave nothing to compare")
        return
    expected = reference["tokens"][0]
    for mode, process in bench.result["processes"].items():
        problems = check_process(mode, process, expected, has_graphs) if process else [f"{mode}: no rounds"]
        for problem in problems:
            bench.problem(problem)
        bench.result["verified"][mode] = not problems
    for row in bench.result["runs"]:
        problem = check_run(row["mode"], row["record"], expected, has_graphs)
        if problem is not None:
            bench.problem(f"a run from an armed process, {row['mode']}: {problem}")


def check_process(mode: str, process: dict[str, Any], expected: int, has_graphs: bool) -> list[str]:
    """Return what does not hold of a process's answers, and print their medians.

    Another token than an ordinary pass's is right where its logits are as near as rounding in another order explains;
    that pass, where nothing is compiled, has transformers' token.
    """
    print(f"{mode}, medians, ms: " + "  ".join(f"{name} {value}" for name, value in process["medians_ms"].items()))
    problems = []
    for number, row in enumerate([process["first"], *process["rounds"]]):
        if not row["is_right"]:
            told = f"token {row['token']}, a pass's {row['pass_token']}, logits off by {row.get('difference')}"
            problems.append(f"{mode}, round {number}: {told}")
        if mode == "off" and row["pass_token"] != expected:
            problems.append(f"{mode}, round {number}: a pass's token {row['pass_token']}, transformers' {expected}")
        if row["replayed"] is not has_graphs:
            problems.append(f"{mode}, round {number}: replayed is {row['replayed']}")
    armed = process["armed"]
    print(f"{mode}: graph {armed.get('graph')}; prompt {armed.get('prompt', 'eager')}")
    if mode == "layer" and has_graphs and not str(armed.get("prompt")).startswith("compiled"):
        problems.append(f"{mode}: the graph is not of compiled layers: {armed.get('prompt')}")
    return problems


def check_run(mode: str, record: dict[str, Any], expected: int, has_graphs: bool) -> str | None:
    """Return what does not hold of a run from an armed process."""
    stages = {stage["name"]: stage for stage in record["stages"]}
    tiers = (record["state"], record["tier_from"], record["tier_to"])
    if tiers != ("ready", "armed", "standby"):
        return f"it is {tiers}: {record['failure']}"
    first, hold = stages["first_request"]["extra"], stages["hold"]["extra"]
    # A graph that is further off than another order explains is not used, and a finding says so.
    is_near = "graph_difference" in hold and not (mode == "off" and hold["graph_equal"])
    if not (first["token_ids"] == str(expected) or is_near) or first["replayed"] is not has_graphs:
        return f"it answered {first}"
    return None


if __name__ == "__main__":
    sys.exit(main())
