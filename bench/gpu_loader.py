"""``python -m bench gpu-load FOLDER``: every path of the loader, and its peers, on one GPU, beside their ceilings.

Loaders live in processes of their own and take turns. Each is compared with safetensors byte by byte at
its first load, which is not counted. ``warm`` has the files in the page cache, ``cold`` drops them before each
load; a cold round reads the disk raw as well, so that each load stands beside what the disk gave just then.
``--parts peers cold-peers`` measures the other loaders that this Python has, in the same rounds as this one, and
``--parts sweep`` readers, buffers, registrations and memory, with a line and its steps for each (`bench.gpu_sweep`).
Cold, ``page_cache=bypass`` is the path ``direct``.
``--parts host`` has processes keep the shards registered, as tier ``host`` does, and loads from there in turns with
the pinned ceiling: the whole load, with memory, views and checks of the files, and its copies alone. Each of them loads
once, as in use.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import gpu_sweep
from bench.gpu_facts import describe_machine
from bench.gpu_table import make_table
from bench.raw_disk import THREADS, drop_page_cache, fill_page_cache, refill_page_cache, time_raw_read

ROOT = Path(__file__).resolve().parents[1]
WARM_PEERS = (
    "safetensors", "instanttensor-buffered", "instanttensor", "runai-model-streamer", "runai-model-streamer-ring",
    "fastsafetensors-buffered", "transformers",
)  # fmt: skip
COLD_PEERS = (
    "safetensors", "instanttensor-buffered", "instanttensor", "runai-model-streamer-ring",
    "runai-model-streamer-direct", "fastsafetensors", "transformers",
)  # fmt: skip
"""Each library by what it has for the case; `bench.peers` says what that is."""
PEERS_OF = {"peers": WARM_PEERS, "cold-peers": COLD_PEERS}
PEERS = tuple(dict.fromkeys(WARM_PEERS + COLD_PEERS))
PARTS = ("warm", "cold", "host", "peers", "cold-peers", "sweep", "cold-sweep")
DEFAULT_PARTS = ("warm", "cold")
HOST = "glowplug-host"
HOST_REQUESTS = ({}, {"memory": "shared"})

WARM = ({"path": "auto"}, {"path": "mapped"}, {"path": "staged"}, {"path": "auto", "memory": "shared"})
"""``memory``: ``shared`` is what a standby or a resident is loaded into; else torch's."""

COLD = ({"page_cache": "keep"}, {"page_cache": "bypass"})

Request = dict[str, Any]


class Child:
    """One loader's process, stopped while it is not asked: some libraries have threads that never sleep."""

    def __init__(self, name: str, folder: Path, device: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.loaders", name, str(folder), device],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.checked: set[str] = set()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.communicate()  # its stdin ends, and so does it

    def answer(self) -> Request:
        """Return its next answer; one that died answers with how."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            found: Request = json.loads(line)
            self._process.send_signal(signal.SIGSTOP)
            return found
        _, errors = self._process.communicate()
        last = errors.strip().splitlines()[-1:] or ["no word"]
        return {"error": f"exited with {self._process.returncode}: {last[0][:300]}"}

    def ask(self, request: Request) -> Request:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone; the answer says how
        return self.answer()


class Bench:
    """The measurements so far, on disk as they come."""

    def __init__(self, arguments: argparse.Namespace, shards: list[Path], children: dict[str, Child]) -> None:
        self.arguments, self.shards, self.children = arguments, shards, children
        self.size_bytes = sum(shard.stat().st_size for shard in shards)
        self.records: list[Request] = []
        self._file = None if arguments.out is None else (arguments.out / "raw.jsonl").open("a", encoding="utf-8")

    def keep(self, **record: object) -> None:
        """Add one measurement."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        figure = record.get("seconds")
        text = f"{figure:8.3f} s" if isinstance(figure, float) else str(record.get("error", ""))
        print(
            f"{record.get('part', ''):<11}{record.get('round', ''):>3} {record.get('label', ''):<44}{text}", flush=True
        )

    def has_time(self, needed_s: float) -> bool:
        return time.monotonic() + needed_s < self.arguments.deadline

    def loaders(self, part: str) -> list[str]:
        """Return what takes turns in a part: Glowplug, and those of the part's peers that are there."""
        return [name for name in self.children if name == "glowplug" or name in PEERS_OF[part]]

    def load(self, part: str, number: int, loader: str, request: Request, is_cold: bool) -> None:
        """Do one load, with the page cache as asked, and keep what came of it; the first is checked instead."""
        child = self.children[loader]
        label = " ".join([loader, *(f"{name}={value}" for name, value in request.items() if name != "limits")])
        if "limits" in request:
            label += " " + json.dumps(request["limits"])
        if label not in child.checked and "limits" not in request:
            fill_page_cache(self.shards)
            answer = child.ask({"do": "load", "check": True, **request})
            child.checked.add(label)
            self.keep(part="check", round=0, loader=loader, label=label, request=request, **answer)
        dropped = drop_page_cache(self.shards) if is_cold else None
        if not is_cold and request.get("path") != "direct":
            fill_page_cache(self.shards)
        answer = child.ask({"do": "load", **request})
        self.keep(part=part, round=number, loader=loader, label=label, request=request, dropped=dropped, **answer)

    def read_raw(self, part: str, number: int) -> None:
        """Read the disk alone, both ways, with the page cache dropped before each."""
        for is_direct in (True, False):
            drop_page_cache(self.shards)
            label = f"raw read, {THREADS} threads, {'O_DIRECT' if is_direct else 'buffered'}"
            try:
                seconds = time_raw_read(self.shards, is_direct)
            except OSError as error:
                self.keep(part=part, round=number, loader="raw", label=label, error=str(error))
                continue
            self.keep(part=part, round=number, loader="raw", label=label, seconds=seconds)

    def ceiling(self, part: str) -> None:
        if self.arguments.device != "cpu":
            self.keep(part=part, label="pinned H2D ceiling", **self.children["glowplug"].ask({"do": "ceiling"}))


def main(argv: list[str]) -> int:
    """Measure, print a table, keep it and the raw records in ``--out``; return 1 if a load failed or bytes differ."""
    arguments = parse_arguments(argv)
    shards = sorted(arguments.folder.glob("*.safetensors"))
    if not shards:
        print(f"{arguments.folder}: no *.safetensors there", file=sys.stderr)
        return 2
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        children, refusals = start_children(arguments, stack)
        bench = Bench(arguments, shards, children)
        bench.keep(part="machine", label="", size_bytes=bench.size_bytes, argv=argv, **describe_machine())
        for name, why in refusals.items():
            bench.keep(part="absent", label=name, error=why)
        if "glowplug" not in children:
            return 1
        for part in arguments.parts:
            if not part.startswith("cold"):  # which may have left the page cache in folios of its own making
                refill_page_cache(shards)
            RUN[part](bench)
    table = make_table(bench.records, bench.size_bytes)
    print("\n" + table)
    if arguments.out is not None:
        (arguments.out / "table.md").write_text(table, encoding="utf-8")
    ours = [record for record in bench.records if record.get("loader") in ("glowplug", HOST)]
    return int(any("error" in record or record.get("differing") for record in ours))


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench gpu-load", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder of safetensors, for example from bench/make_llama.py")
    parser.add_argument("--out", type=Path, help="folder for raw.jsonl and table.md")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(DEFAULT_PARTS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5, help="loads of each kind (default: 5)")
    parser.add_argument(
        "--budget-s", type=float, default=225, help="begin no round that would end after that (default: 225)"
    )
    parser.add_argument("--quick", action="store_true", help="two rounds: a look, no figures")
    arguments = parser.parse_args(argv)
    arguments.rounds = 2 if arguments.quick else arguments.rounds
    arguments.folder = arguments.folder.resolve()
    arguments.deadline = time.monotonic() + arguments.budget_s
    return arguments


def start_children(arguments: argparse.Namespace, stack: ExitStack) -> tuple[dict[str, Child], dict[str, str]]:
    """Start every loader that a part needs, all at once; return those that are ready, and why others are not."""
    wanted = {name for part, names in PEERS_OF.items() if part in arguments.parts for name in names}
    names = ["glowplug", *(name for name in arguments.peers if name in wanted)]
    started = [stack.enter_context(Child(name, arguments.folder, arguments.device)) for name in names]
    answers = {child.name: child.answer() for child in started}
    ready = {child.name: child for child in started if "ready" in answers[child.name]}
    return ready, {name: answer["error"] for name, answer in answers.items() if "error" in answer}


def rounds_of(bench: Bench) -> Iterator[int]:
    """Yield the numbers of the rounds that there is time for; the first two always are."""
    longest_s = 0.0
    for number in range(bench.arguments.rounds):
        if number >= 2 and not bench.has_time(longest_s):
            print(f"stopped after {number} rounds: another would end after {bench.arguments.budget_s:g} s", flush=True)
            return
        begun = time.monotonic()
        yield number
        longest_s = max(longest_s, time.monotonic() - begun)


def turned(items: list[Any], number: int) -> list[Any]:
    """Return the items with another one first in each round."""
    start = number % len(items)
    return items[start:] + items[:start]


def run_warm(bench: Bench) -> None:
    bench.ceiling("warm")
    for number in rounds_of(bench):
        for request in turned(list(WARM), number):
            bench.load("warm", number, "glowplug", request, is_cold=False)
    bench.ceiling("warm")


def run_cold(bench: Bench) -> None:
    for number in rounds_of(bench):
        bench.read_raw("cold", number)
        for request in turned(list(COLD), number):
            bench.load("cold", number, "glowplug", request, is_cold=True)


def run_host(bench: Bench) -> None:
    """Loads from shards that a process of its own keeps registered, each behind a look at the ceiling."""
    if bench.arguments.device == "cpu":
        print("host: a CPU has nothing to register with", flush=True)
        return
    for request in HOST_REQUESTS:
        load_from_host(bench, "check", 0, request, check=True)
    for number in rounds_of(bench):
        for request in turned(list(HOST_REQUESTS), number):
            bench.ceiling("host")
            load_from_host(bench, "host", number, request)


def load_from_host(bench: Bench, part: str, number: int, request: Request, **asked: object) -> None:
    """Load once in a process that has registered every shard before."""
    label = " ".join([HOST, *(f"{name}={value}" for name, value in request.items())])
    fill_page_cache(bench.shards)
    with Child(HOST, bench.arguments.folder, bench.arguments.device) as child:
        answer = child.answer()
        if "error" not in answer:
            answer = child.ask({"do": "load", **request, **asked})
    bench.keep(part=part, round=number, loader=HOST, label=label, request=request, **answer)
    if part != "check" and "move" in answer.get("steps_ns", {}):
        seconds = answer["steps_ns"]["move"] / 1e9
        bench.keep(part=part, round=number, label=f"{label}: copies alone", seconds=seconds)


def run_peers(bench: Bench) -> None:
    """Peers from a warm page cache, in the same rounds as the loader itself."""
    for number in rounds_of(bench):
        for name in turned(bench.loaders("peers"), number):
            bench.load("peers", number, name, {}, is_cold=False)


def run_cold_peers(bench: Bench) -> None:
    for number in rounds_of(bench):
        bench.read_raw("cold-peers", number)
        for name in turned(bench.loaders("cold-peers"), number):
            for request in COLD if name == "glowplug" else ({},):
                bench.load("cold-peers", number, name, request, is_cold=True)


def run_sweep(bench: Bench) -> None:
    sweep(bench, "sweep", gpu_sweep.WARM, is_cold=False)


def run_cold_sweep(bench: Bench) -> None:
    sweep(bench, "cold-sweep", gpu_sweep.COLD, is_cold=True)


def sweep(bench: Bench, part: str, requests: Sequence[Request], is_cold: bool) -> None:
    if bench.arguments.device == "cpu":
        print(f"{part}: a CPU has nothing to sweep", flush=True)
        return
    bench.ceiling(part)
    for number in rounds_of(bench):
        for request in turned(list(requests), number):
            bench.load(part, number, "glowplug", request, is_cold)
    print(gpu_sweep.summarise(bench.records, part, bench.size_bytes), flush=True)


RUN = {
    "warm": run_warm,
    "cold": run_cold,
    "host": run_host,
    "peers": run_peers,
    "cold-peers": run_cold_peers,
    "sweep": run_sweep,
    "cold-sweep": run_cold_sweep,
}
