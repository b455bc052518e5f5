"""Parks a standby of one model and puts it back, on a real GPU: times, memory of both sides, and the same answer.

``python bench/gpu_park.py MODEL --out RESULT.json``. Needs the repository and a Python with torch, transformers and
cuda-python, no network; about a minute for a 7B model. The agent is a real one in a temporary directory. At the end a
throwaway process that has the resident mapped is checkpointed as it is: the driver takes that and refuses to restore
it, which is why a worker unmaps. Exit code 1 if a token differs, a step fails, or the driver restores that one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.gpu_facts import describe_machine  # noqa: E402
from bench.gpu_pipeline import Bench  # noqa: E402
from remote_agent.agentd.paths import StateDir  # noqa: E402
from remote_agent.client import connect_running, open_client  # noqa: E402
from remote_agent.devices.calls import Calls  # noqa: E402
from remote_agent.devices.cuda import DRIVER  # noqa: E402
from remote_agent.devices.process_checkpoint import ProcessCheckpoint  # noqa: E402
from remote_agent.errors import AgentError, DeviceError  # noqa: E402
from remote_agent.protocol.messages import ParkParams, ParkResult  # noqa: E402

LOCK_TIMEOUT_MS = 10_000


def main() -> int:
    """Run every step, keep what came out, return 0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a checkpoint, for example from bench/make_llama.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3, help="parks, each put back (default: 3)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-") as folder:
        bench = Bench(arguments.out.resolve(), Path(folder))
        bench.keep("machine", describe_machine())
        try:
            measure(bench, arguments.model.resolve(), arguments.rounds, arguments.prompt_tokens)
        finally:
            bench.agent("stop", "--force", "--keeper")
    bench.save()
    print(f"problems: {len(bench.result['problems'])}")
    return 1 if bench.result["problems"] else 0


def measure(bench: Bench, model: Path, rounds: int, prompt_tokens: int) -> None:
    """Warm a standby, park it and put it back, let a run wake it, then show what happens without unmapping."""
    recipe = bench.folder / "park.json"
    request = {"kind": "generate", "prompt_tokens": prompt_tokens, "max_new_tokens": 4}
    recipe.write_text(json.dumps({"name": "park", "model": {"path": str(model)}, "request": request}))
    memory: list[dict[str, Any]] = [{"when": "before", **used_memory(None)}]
    bench.keep("memory", memory)
    first = bench.agent("run", str(recipe))
    if first is None or first["state"] != "ready":
        bench.problem(f"the first run is not ready: {first and first['failure']}")
        return
    expected, uid = tokens_of(first), first["run_uid"]
    pid = bench.agent("status")["residents"][0]["pid"]
    memory.append({"when": "standby", **used_memory(pid)})
    moves = []
    for _ in range(rounds):
        moves.append(move(bench, "park", uid))
        memory.append({"when": "parked", **used_memory(pid)})
        moves.append(move(bench, "unpark", uid))
        memory.append({"when": "put back", **used_memory(pid)})
    bench.keep("moves", moves)
    after = bench.agent("run", str(recipe))
    check_run(bench, after, expected, "standby")
    if after is not None:
        move(bench, "park", after["run_uid"])
        woken = bench.agent("run", str(recipe))
        check_run(bench, woken, expected, "parked")
        bench.keep("runs", [first, after, woken])
    bench.keep("memory", memory)
    bench.keep("mapped_as_it_is", checkpoint_with_mapping(bench))
    for entry in memory:
        print(entry)


def move(bench: Bench, method: str, run_uid: str) -> dict[str, Any]:
    """Park or unpark by the agent's own protocol; return nanoseconds by step."""
    try:
        with open_client(StateDir(bench.state_dir), "bench", connect_running) as client:
            (steps,) = client.call(method, ParkParams(run_uid), ParkResult).steps.values()
    except (AgentError, ValueError) as error:
        bench.problem(f"{method}: {error}")
        return {"method": method, "error": str(error)}
    print(method, {name: round(value / 1e6, 1) for name, value in steps.items()}, "ms", flush=True)
    return {"method": method, "steps": dict(steps)}


def check_run(bench: Bench, run: dict[str, Any] | None, expected: str | None, tier: str) -> None:
    if run is None or run["state"] != "ready":
        bench.problem(f"the run from {tier} is not ready: {run and run['failure']}")
        return
    if run["tier_from"] != tier:
        bench.problem(f"the run started from {run['tier_from']}, not {tier}")
    if tokens_of(run) != expected:
        bench.problem(f"the run from {tier} answers {tokens_of(run)}, not {expected}")
    parts = sum(stage["attributed_ns"] or 0 for stage in run["stages"]) + run["unattributed_ns"]
    if parts != run["wall_ns"]:
        bench.problem(f"the parts sum to {parts} ns and the wall time is {run['wall_ns']} ns")


def tokens_of(run: dict[str, Any]) -> str | None:
    return next((stage["extra"].get("token_ids") for stage in run["stages"] if stage["name"] == "first_request"), None)


def used_memory(pid: int | None) -> dict[str, Any]:
    """Return what each GPU has in use, and what the worker has of the host's memory."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {"gpu_used_mib": [int(word) for word in told.stdout.split() if word.isdigit()]}
    if pid is not None:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found["worker_rss_kib"] = next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)
    return found


def checkpoint_with_mapping(bench: Bench) -> dict[str, Any]:
    """Checkpoint a process that has the resident attached, and try to restore it; return what the driver said."""
    command = [sys.executable, "-c", ATTACHED, str(bench.state_dir)]
    victim = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    found: dict[str, Any] = {"said": victim.stdout.readline().strip()}
    process = ProcessCheckpoint(Calls(DRIVER), victim.pid)
    try:
        process.require_support()
        process.park(LOCK_TIMEOUT_MS)
        found["checkpointed"] = process.left()
        process.unpark()
        bench.problem("the driver restored a process that had imported memory mapped: unmapping may not be needed")
    except DeviceError as error:
        found["error"] = str(error)
        if found.get("checkpointed") != "parked" or not found["said"]:
            bench.problem(f"the process with the resident mapped was not even checkpointed: {error}")
    finally:
        found.update(left=process.left(), steps=process.steps)
        victim.kill()
        victim.wait()
    print("checkpointed with the resident mapped:", found, flush=True)
    return found


ATTACHED = """
import sys
import remote_agent
with remote_agent.attach("park", state_dir=sys.argv[1]) as resident:
    total = sum(float(tensor[..., :1].float().sum()) for tensor in resident.tensors.values())
    print("attached", len(resident.tensors), total, flush=True)
    sys.stdin.read()
"""
"""A serving process as anybody would write it."""


if __name__ == "__main__":
    sys.exit(main())
