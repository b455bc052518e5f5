"""Runs the native pipeline for one model and keeps every raw number; checks what a run must hold.

``python bench/gpu_pipeline.py MODEL --out RESULT.json``. Needs the repository and a Python with torch, safetensors
and transformers, no network. RESULT.json is written again after each step, so that an interrupted bench keeps what
it has. Every run but the first begins with the agent at rest: nothing has run for a second, and what the agent keeps
ready for a next run is ready. That is a preflight process and, unless everything was released before, a spare worker
for the device. Exit code 1 if a run failed, a stage is missing, a sum is not exact, a token differs from transformers',
or a run's ``init`` was not the spare worker's.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.gpu_daemon import daemon_memory  # noqa: E402
from bench.gpu_facts import describe_machine, drop_from_page_cache  # noqa: E402
from bench.raw_disk import refill_page_cache  # noqa: E402
from remote_agent.agentd.paths import StateDir  # noqa: E402
from remote_agent.client import connect_running, open_client  # noqa: E402
from remote_agent.errors import AgentError  # noqa: E402
from remote_agent.protocol.messages import NATIVE_STAGES, Empty, StatusResult  # noqa: E402

REUSED = {
    "standby": ("init", "context", "weights", "assign", "compile"),
    "resident": ("init", "weights"),
}
"""Stages that a run finds made, by the tier that it starts from, with a spare worker."""

STEP_LIMIT_S = 300
REST_LIMIT_S = 30.0


class Bench:
    """The result so far, the commands that gave it, and what did not hold."""

    def __init__(self, out: Path, folder: Path) -> None:
        self.out, self.folder = out, folder
        self.state_dir = folder / "state"
        self.result: dict[str, Any] = {"commands": [], "runs": [], "problems": []}

    def keep(self, name: str, value: object) -> None:
        """Put one value into the result and the result onto disk."""
        self.result[name] = value
        self.save()

    def save(self) -> None:
        """Write the result whole, or leave the last one."""
        part = self.out.with_name(self.out.name + ".part")
        part.write_text(json.dumps(self.result, indent=1) + "\n")
        part.replace(self.out)

    def problem(self, text: str) -> None:
        """Note what does not hold; the bench goes on."""
        print(f"PROBLEM: {text}", flush=True)
        self.result["problems"].append(text)
        self.save()

    def python(self, *arguments: str) -> Any:
        """Run this Python with ``arguments`` and return the JSON document it printed, or None."""
        command = [sys.executable, *arguments]
        begun = time.monotonic()
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=STEP_LIMIT_S,
            )
            code, output, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            code, output, errors = None, "", f"not done after {late.timeout} s"
        entry = {"argv": command, "exit": code, "seconds": round(time.monotonic() - begun, 3), "stderr": errors[-2000:]}
        self.result["commands"].append(entry)
        try:
            return json.loads(output[output.index("{") :])
        except ValueError:
            self.problem(f"{' '.join(command[1:4])}: exit {code}, no JSON; stderr ends: {errors.strip()[-500:]}")
            return None

    def agent(self, verb: str, *arguments: str) -> Any:
        """Run a verb of the agent on the bench's own state directory."""
        return self.python("-m", "remote_agent", verb, *arguments, "--json", "--state-dir", str(self.state_dir))

    def rest(self, has_spare: bool) -> list[str]:
        """Wait until the agent has ready what the next run will use, and return the names of all its processes."""
        give_up_s, there = time.monotonic() + REST_LIMIT_S, list[str]()
        try:
            with open_client(StateDir(self.state_dir), "bench", connect_running) as client:
                while time.monotonic() < give_up_s:
                    processes = client.call("status", Empty(), StatusResult).processes
                    there = sorted(name for name, pid in processes.items() if pid is not None)
                    if "preflight" in there and (not has_spare or any(name.startswith("spare ") for name in there)):
                        return there
                    time.sleep(0.05)
            self.problem(f"the agent is not at rest within {REST_LIMIT_S:g} s; there is: {', '.join(there)}")
        except AgentError as error:
            self.problem(f"the agent can't be asked whether it is at rest: {error}")
        return there


def main() -> int:
    """Run every step, keep what came out, return 0 if everything held."""
    arguments = parse_arguments()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-") as folder:
        bench = Bench(arguments.out.resolve(), Path(folder))
        bench.keep("machine", describe_machine())
        try:
            measure(bench, arguments)
        finally:
            bench.agent("stop", "--force", "--keeper")
    print_summary(bench.result)
    bench.save()
    return 1 if bench.result["problems"] else 0


def parse_arguments() -> argparse.Namespace:
    """Return what to run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a checkpoint, for example from bench/make_llama.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto", help="auto (the first GPU), cpu, cuda:N or a GPU UUID")
    parser.add_argument("--runs", type=int, default=6, help="runs from the page cache, each released (default: 6)")
    parser.add_argument("--reuses", type=int, default=5, help="runs that find a standby (default: 5)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--compile", choices=("off", "layer", "model"), default="off")
    parser.add_argument("--no-cold", action="store_true", help="leave out the run with the page cache dropped")
    return parser.parse_args()


def measure(bench: Bench, arguments: argparse.Namespace) -> None:
    """Take the ceiling, then the runs from coldest to warmest, then transformers' own answer."""
    model = arguments.model.resolve()
    recipe = bench.folder / "bench.json"
    content = {
        "name": "bench",
        "model": {"path": str(model)},
        "devices": [arguments.device],
        "compile": {"mode": arguments.compile},
        "request": {
            "kind": "generate",
            "prompt_tokens": arguments.prompt_tokens,
            "max_new_tokens": arguments.new_tokens,
        },
    }
    recipe.write_text(json.dumps(content))
    bench.keep("recipe", content)
    bench.keep("model_bytes", sum(path.stat().st_size for path in model.glob("*.safetensors")))
    if arguments.device != "cpu":
        bench.keep("h2d_ceiling", bench.python("-c", CEILING))
    shards = sorted(model.glob("*.safetensors"))
    run_once(bench, recipe, "zygote cold", "--release", before=lambda: refill_page_cache(shards), is_first=True)
    if not arguments.no_cold:
        run_once(bench, recipe, "page cache dropped", "--release", before=lambda: drop_from_page_cache(shards))
    for _ in range(arguments.runs):
        run_once(bench, recipe, "cached", "--release")
    run_once(bench, recipe, "cached, kept")
    daemon = []
    for _ in range(arguments.reuses):
        run_once(bench, recipe, "standby")
        status = bench.agent("status")
        daemon.append(daemon_memory(status["processes"] if status else {}))
    bench.keep("daemon", daemon)
    bench.keep("released", bench.agent("release", "--all"))
    measure_resident(bench, content, arguments.reuses, arguments.device)
    script = [str(model), str(arguments.prompt_tokens), str(arguments.new_tokens), arguments.device]
    bench.keep("transformers", bench.python("-c", REFERENCE, *script))
    compare_tokens(bench)


def measure_resident(bench: Bench, content: dict[str, Any], count: int, device: str) -> None:
    """Leave the weights with the keeper, start from them, and attach to them from a process of its own.

    Everything was released before, so that the first run has no spare worker.
    """
    recipe = bench.folder / "resident.json"
    recipe.write_text(json.dumps({**content, "name": "resident", "target_tier": "resident"}))
    run_once(bench, recipe, "cached, left resident", has_spare=False)
    for _ in range(count):
        run_once(bench, recipe, "resident")
    bench.keep("attach", bench.python("-c", ATTACH, "resident", str(bench.state_dir), str(count), device))
    bench.keep("released_resident", bench.agent("release", "--all"))


def run_once(
    bench: Bench,
    recipe: Path,
    label: str,
    *options: str,
    before: Callable[[], object] | None = None,
    is_first: bool = False,
    has_spare: bool = True,
) -> None:
    """Do one run of an agent at rest, keep its record and note what does not hold; the first one starts the agent."""
    prepared = before() if before is not None else None
    at_rest = [] if is_first else bench.rest(has_spare)
    record = bench.agent("run", str(recipe), *options)
    if record is None:
        return
    bench.result["runs"].append({"label": label, "prepared": prepared, "at_rest": at_rest, "record": record})
    bench.save()
    reused = REUSED.get(label, ("init",) if has_spare and not is_first else ())
    for text in find_problems(record, label if label in REUSED else "", reused):
        bench.problem(f"{label}: {text}")
    seconds = {stage["name"]: (stage["duration_ns"] or 0) / 1e9 for stage in record["stages"]}
    spans = "  ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    print(f"{label:<20}{(record['wall_ns'] or 0) / 1e9:8.3f} s  {spans}", flush=True)


def find_problems(record: dict[str, Any], tier: str, reused: tuple[str, ...]) -> list[str]:
    """Return what does not hold of a run that should have become ready. ``reused``: the stages that it found made."""
    if record["state"] != "ready":
        return [f"the run is {record['state']}: {record['failure']}"]
    problems = []
    stages = {stage["name"]: stage for stage in record["stages"]}
    if tuple(stages) != NATIVE_STAGES:
        problems.append(f"stages are {tuple(stages)}")
    for name, stage in stages.items():
        wanted = "reused" if name in reused else "done"
        if stage["status"] != wanted and not (name == "compile" and stage["extra"].get("rehearsed")):
            problems.append(f"{name} is {stage['status']}, not {wanted}: {stage['reason']}")
    parts = sum(stage["attributed_ns"] or 0 for stage in stages.values()) + (record["unattributed_ns"] or 0)
    if parts != record["wall_ns"]:
        problems.append(f"the parts sum to {parts} ns and the wall time is {record['wall_ns']} ns")
    if tier != (record["tier_from"] if record["tier_from"] in REUSED else ""):
        problems.append(f"tier_from is {record['tier_from']}")
    return problems


def compare_tokens(bench: Bench) -> None:
    """Hold every run's tokens against transformers' own for the same weights and ids."""
    reference = bench.result.get("transformers")
    if not reference:
        bench.problem("transformers gave no answer to compare with")
        return
    if not bench.result["runs"]:
        bench.problem("no run to compare")
    for number, run in enumerate(bench.result["runs"]):
        stages = {stage["name"]: stage for stage in run["record"]["stages"]}
        text = stages.get("first_request", {}).get("extra", {}).get("token_ids")
        tokens = [int(word) for word in text.split()] if text else []
        run["tokens_equal"] = tokens == reference["tokens"]
        if tokens[:1] != reference["tokens"][:1]:
            bench.problem(f"run {number} ({run['label']}): tokens {tokens}, transformers' {reference['tokens']}")
    bench.save()


def print_summary(result: dict[str, Any]) -> None:
    """Print medians by label, and keep them."""
    summary: dict[str, dict[str, float]] = {}
    for label in dict.fromkeys(run["label"] for run in result["runs"]):
        records = [run["record"] for run in result["runs"] if run["label"] == label]
        rows: dict[str, list[float]] = {}
        for record in records:
            rows.setdefault("wall", []).append((record["wall_ns"] or 0) / 1e9)
            rows.setdefault("first_output", []).append((record["first_output_ns"] or 0) / 1e9)
            for stage in record["stages"]:
                rows.setdefault(stage["name"], []).append((stage["duration_ns"] or 0) / 1e9)
                if stage["name"] == "weights" and stage["rate_bytes_s"]:
                    rows.setdefault("weights_gb_s", []).append(stage["rate_bytes_s"] / 1e9)
        summary[label] = {name: round(statistics.median(values), 6) for name, values in rows.items()}
        print(
            f"{label} ({len(records)}): " + "  ".join(f"{name} {value:.3f}" for name, value in summary[label].items())
        )
    result["medians_s"] = summary
    ceiling = result.get("h2d_ceiling")
    if ceiling:
        print(f"pinned host to device: {ceiling['best_bytes_s'] / 1e9:.1f} GB/s")
    print(f"problems: {len(result['problems'])}")


CEILING = """
import json, time, torch
size, chunk = 1 << 30, 64 << 20
host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
host.fill_(1)
device = torch.empty(size, dtype=torch.uint8, device="cuda")
rates = []
for _ in range(8):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for start in range(0, size, chunk):
        device[start:start + chunk].copy_(host[start:start + chunk], non_blocking=True)
    torch.cuda.synchronize()
    rates.append(size / (time.perf_counter() - begun))
print(json.dumps({"chunk_bytes": chunk, "size_bytes": size, "rates_bytes_s": rates, "best_bytes_s": max(rates)}))
"""
"""The most that pinned memory gives to the device, measured beside the loads."""

ATTACH = """
import json, sys, time
from pathlib import Path
import torch
from remote_agent import attach
if sys.argv[4] != "cpu":
    torch.cuda.init()
    torch.ones(1, device="cuda")
rounds = []
for _ in range(int(sys.argv[3]) + 1):
    begun = time.perf_counter()
    with attach(sys.argv[1], state_dir=Path(sys.argv[2])) as attached:
        taken = time.perf_counter() - begun
        rounds.append({"seconds": taken, "steps_ns": dict(attached.steps), "tensors": len(attached.tensors)})
print(json.dumps({"first": rounds[0], "rounds": rounds[1:]}))
"""
"""A serving process that has a context already attaches; its first time imports what attaching needs."""

REFERENCE = """
import json, os, sys, time
os.environ["HF_HUB_OFFLINE"] = "1"
begun = time.perf_counter()
import torch, transformers
from transformers import AutoModelForCausalLM
imported = time.perf_counter()
path, prompt, new, name = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
device = "cpu" if name == "cpu" else name if name.startswith("cuda:") else "cuda"
if name.startswith(("GPU-", "MIG-")):
    os.environ["CUDA_VISIBLE_DEVICES"] = name
model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype="auto").to(device).eval()
loaded = time.perf_counter()
ids = (torch.arange(prompt, device=device) % model.config.vocab_size)[None]
with torch.inference_mode():
    logits = model(ids).logits[0, -1].float()
    first = int(logits.argmax())
    answered = time.perf_counter()
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)[0, prompt:]
values, best = logits.topk(5)
print(json.dumps({"transformers": transformers.__version__, "dtype": str(model.dtype), "tokens": tokens.tolist(),
    "forward_token": first, "top_ids": best.tolist(), "top_logits": values.tolist(), "import_s": imported - begun,
    "from_pretrained_to_device_s": loaded - imported, "first_forward_s": answered - loaded}))
"""
"""transformers by itself: load, one forward, and generate, on the ids that the pipeline uses without a prompt."""


if __name__ == "__main__":
    sys.exit(main())
