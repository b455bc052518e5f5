"""``python -m bench gpu``: every part of the GPU benchmark within a time, and the table that comes of it.

``--out`` gets three files: ``results.json``, written again after each part, ``log.txt`` with what each part printed,
and ``table.md``. A part whose time is not left is skipped by name; one that crashes or is late costs no other part.
Several runs, each with some of the ``--parts``, are joined by ``python -m bench gpu-report OUT OUT…``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu_facts import describe_machine
from bench.gpu_parts import PARTS, Part, run_part
from bench.gpu_report import render

MODEL = "llama-7b"
MAKING = Part("model", ("bench/make_llama.py", "{model}"), 0, 180, None)


class Results:
    """``results.json``: the machine and each part's record, whole on disk after each of them."""

    def __init__(self, out: Path, document: dict[str, Any]) -> None:
        self._out, self.document = out, document
        self._save()

    def keep(self, name: str, record: dict[str, Any], folder: Path | None = None) -> None:
        """Add a part's record, and what it printed to the log."""
        self.document["parts"][name] = record
        self._save()
        with (self._out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"==== {name}: {record['status']}, {record['reason'] or 'exit 0'}\n")
            log.write(f"{' '.join(record.get('argv', []))}\n")
            for stream in ("stdout", "stderr") if folder is not None else ():
                text = (folder / stream).read_text(encoding="utf-8", errors="replace")
                log.write(f"---- {stream}\n{text}\n")

    def _save(self) -> None:
        part = self._out / "results.json.part"
        part.write_text(json.dumps(self.document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(self._out / "results.json")


def main(argv: list[str], parts: Sequence[Part] = PARTS, making: Part = MAKING) -> int:
    """Run the parts and print the table; return 1 where a part failed or was late, 2 for a usage error."""
    arguments = parse_arguments(argv, parts)
    deadline = time.monotonic() + arguments.budget_s
    if (arguments.out / "results.json").exists():
        print(f"{arguments.out} has results already: say another --out", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    command = ["python", "-m", "bench", "gpu", *argv]
    machine = describe_machine()
    machine["commit"] = arguments.commit or machine["commit"]
    document: dict[str, Any] = {"machine": machine, "command": command, "model": None, "parts": {}}
    results = Results(arguments.out, document)
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-", dir=arguments.scratch) as scratch:
        model = find_model(arguments.model, making, Path(scratch), results, deadline)
        if model is not None:
            run_parts([part for part in parts if part.name in arguments.parts], model, Path(scratch), results, deadline)
    table = render([(arguments.out.name, results.document)])
    (arguments.out / "table.md").write_text(table, encoding="utf-8")
    print("\n" + table)
    return int(model is None or any(one["status"] in ("failed", "late") for one in document["parts"].values()))


def parse_arguments(argv: list[str], parts: Sequence[Part]) -> argparse.Namespace:
    """Return what to run, with absolute paths."""
    names = [part.name for part in parts]
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder of safetensors; one with random data is made if absent")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, log.txt and table.md")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="folder for what is written")
    parser.add_argument("--budget-s", type=float, default=1500, help="seconds for everything (default: 1500)")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help=" ".join(names))
    parser.add_argument("--commit", help="which commit this is, where git can't tell or tells of another checkout")
    arguments = parser.parse_args(argv)
    arguments.out, arguments.scratch = arguments.out.resolve(), arguments.scratch.resolve()
    arguments.model = (arguments.model or arguments.scratch / MODEL).resolve()
    return arguments


def find_model(model: Path, making: Part, scratch: Path, results: Results, deadline: float) -> Path | None:
    """Return the model's folder, written if it was not there; None where it can't be, which is then a part's failure.

    A model that is half written is never taken for one: it gets its name when it is whole.
    """
    if not model.exists():
        half = model.with_name(model.name + ".part")
        shutil.rmtree(half, ignore_errors=True)
        record = run_part(making, half, scratch / making.name, max(1, min(making.most_s, deadline - time.monotonic())))
        results.keep(making.name, record, scratch / making.name)
        tell(making.name, record)
        if record["status"] != "done":
            return None
        half.rename(model)
    shards = sorted(model.glob("*.safetensors"))
    sizes = {shard.name: shard.stat().st_size for shard in shards}
    results.document["model"] = {"folder": str(model), "size_bytes": sum(sizes.values()), "shards": sizes}
    return model


def run_parts(parts: Sequence[Part], model: Path, scratch: Path, results: Results, deadline: float) -> None:
    """Run the parts that there is time for; those that there is none for are kept as skipped."""
    for part in parts:
        left = deadline - time.monotonic()
        if left < part.least_s:
            reason = f"it needs {part.least_s:.0f} s and {max(0, left):.0f} s are left"
            record: dict[str, Any] = {"status": "skipped", "reason": reason}
            results.keep(part.name, record)
        else:
            print(f"{part.name}: at most {min(left, part.most_s):.0f} s", flush=True)
            record = run_part(part, model, scratch / part.name, min(left, part.most_s))
            results.keep(part.name, record, scratch / part.name)
        tell(part.name, record)


def tell(name: str, record: dict[str, Any]) -> None:
    """Print what came of a part in one line."""
    taken = f" in {record['seconds']:.0f} s" if "seconds" in record else ""
    print(f"{name}: {record['status']}{taken}{': ' + record['reason'] if record['reason'] else ''}", flush=True)
