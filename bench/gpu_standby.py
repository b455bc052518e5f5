"""Measures what a standby waits with and how soon it answers, for one model; checks its tokens against transformers'.

``python bench/gpu_standby.py MODEL --out RESULT.json``: about a minute for 13 GB on a GPU. An agent in a directory of
its own makes the model resident; then one process is armed and answers again and again (`bench/standby_rounds.py`),
and whole runs of the agent start from armed processes. RESULT.json is written again after each step. Exit code 1 if a
run failed, a first answer was no replay on a GPU, or a token differs.
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
    parser.add_argument("--compile", choices=("off", "layer", "model"), default="off")
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
    content = {
        "model": {"path": str(model)},
        "devices": [arguments.device],
        "compile": {"mode": arguments.compile},
        "request": {"kind": "generate", "prompt_tokens": arguments.prompt_tokens},
    }
    bench.keep("recipe", content)
    recipe, resident = bench.folder / "standby.json", bench.folder / "resident.json"
    recipe.write_text(json.dumps({"name": "standby", **content}))
    plain = {**content, "compile": {"mode": "off"}}
    resident.write_text(json.dumps({"name": "resident", "target_tier": "resident", **plain}))
    refill_page_cache(sorted(model.glob("*.safetensors")))
    bench.keep("resident", bench.agent("run", str(resident)))
    rounds = ["-m", "bench.standby_rounds", str(recipe), "--state-dir", str(bench.state_dir)]
    bench.keep("process", bench.python(*rounds, "--rounds", str(arguments.rounds)))
    for _ in range(arguments.runs):
        run_from_armed(bench, recipe)
    bench.keep("released", bench.agent("release", "--all"))
    script = [str(model), str(arguments.prompt_tokens), "1", arguments.device]
    bench.keep("transformers", bench.python("-c", REFERENCE, *script))
    check(bench, arguments.device != "cpu")


def run_from_armed(bench: Bench, recipe: Path) -> None:
    """Arm a process, do one run from it, end it; keep both records."""
    armed = bench.agent("standby", "start", str(recipe))
    status = bench.agent("status")
    record = bench.agent("run", str(recipe))
    bench.agent("standby", "stop", "standby")
    if armed is None or record is None:
        return
    entries = [one for one in (status or {}).get("residents", ()) if one["tier"] == "armed"]
    row: dict[str, Any] = {"armed": armed, "listed": entries, "record": record}
    bench.result["runs"].append(row)
    stages = {stage["name"]: stage for stage in record["stages"]}
    if record["first_output_ns"] is not None and stages["weights"]["start_ns"] is not None:
        row["attach_to_first_output_ms"] = (record["first_output_ns"] - stages["weights"]["start_ns"]) * 1e-6
        print(f"run: attach to first output {row['attach_to_first_output_ms']:.2f} ms", flush=True)
    bench.save()


def check(bench: Bench, has_graphs: bool) -> None:
    """Note whatever does not hold."""
    reference, process = bench.result.get("transformers"), bench.result.get("process")
    if not reference or not process:
        bench.problem("a step gave nothing to compare")
        return
    expected = reference["tokens"][0]
    for number, row in enumerate([process["first"], *process["rounds"]]):
        if row["token"] != expected or not row["tokens_equal"]:
            bench.problem(
                f"round {number}: token {row['token']}, transformers' {expected}, eager {row['tokens_equal']}"
            )
        if row["replayed"] is not has_graphs:
            bench.problem(f"round {number}: replayed is {row['replayed']}")
    print("medians, ms: " + "  ".join(f"{name} {value}" for name, value in process["medians_ms"].items()))
    for row in bench.result["runs"]:
        record = row["record"]
        first = next(stage for stage in record["stages"] if stage["name"] == "first_request")
        tiers = (record["state"], record["tier_from"], record["tier_to"])
        if tiers != ("ready", "armed", "standby"):
            bench.problem(f"a run from an armed process is {tiers}: {record['failure']}")
        elif first["extra"]["token_ids"] != str(expected) or first["extra"]["replayed"] is not has_graphs:
            bench.problem(f"a run from an armed process answered {first['extra']}")


if __name__ == "__main__":
    sys.exit(main())
