"""The parts of ``make bench-gpu`` in their order, and how one is run: each a process of its own, with its own time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SPARE_S = 10
"""What a part has left of its time when it should begin no further round."""
PATIENCE_S = 20
"""How long a part that was told to end may take to give back what it holds."""


@dataclass(frozen=True)
class Part:
    """One process of the benchmark.

    ``command``: arguments of this Python; ``{model}``, ``{out}`` (a folder of the part's own) and ``{seconds}`` are
    filled in. ``least_s``: it is skipped where less is left. ``most_s``: it is ended then. ``result``: the file in
    its folder that holds what it found, as JSON or a record a line; ``stdout`` where it prints one document; None
    where it finds nothing.
    """

    name: str
    command: tuple[str, ...]
    least_s: float
    most_s: float
    result: str | None = "stdout"


def loading(name: str, least_s: float, most_s: float, rounds: int = 5) -> Part:
    """Return a part of ``gpu-load`` as a part of its own."""
    command = ("-m", "bench", "gpu-load", "{model}", "--parts", name, "--out", "{out}", "--budget-s", "{seconds}")
    return Part(name, (*command, "--rounds", str(rounds)), least_s, most_s, "raw.jsonl")


PARTS = (
    Part("ceilings", ("-m", "bench.gpu_ceilings", "{model}", "--budget-s", "{seconds}"), 30, 120),
    loading("warm", 45, 120, rounds=11),  # some are slower by a fifth, for no known reason
    loading("host", 60, 180),
    Part("pipeline", ("bench/gpu_pipeline.py", "{model}", "--out", "{out}/r.json", "--no-cold"), 90, 300, "r.json"),
    Part("standby", ("bench/gpu_standby.py", "{model}", "--out", "{out}/r.json"), 90, 270, "r.json"),
    Part("park", ("bench/gpu_park.py", "{model}", "--out", "{out}/r.json"), 60, 180, "r.json"),
    Part("folios", ("-m", "bench", "folios", "--gpu", "--out", "{out}/r.json"), 30, 120, "r.json"),
    Part("compile", ("bench/gpu_compile.py", "{model}", "--graphs", "0"), 90, 240),
    loading("peers", 90, 400),
    loading("cold-peers", 150, 900, rounds=8),  # a disk's rounds differ by a fifth
)
"""Everything that the table of docs/performance.md is made of. What is quick and matters most comes first."""


def run_part(part: Part, model: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Run one part for at most ``seconds`` and return its record; it never raises for what the part does.

    ``folder`` is the part's own; its output stays there in ``stdout`` and ``stderr``. ``status``: ``done``,
    ``failed`` or ``late``, with ``reason``; ``data`` is what it found, as far as it came.
    """
    folder.mkdir(parents=True)
    filled = {"model": str(model), "out": str(folder), "seconds": f"{max(1, seconds - SPARE_S):.0f}"}
    argv = [sys.executable, *(fill(word, filled) for word in part.command)]
    record: dict[str, Any] = {"argv": argv, "limit_s": round(seconds, 1)}
    begun = time.monotonic()
    with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            argv, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    record.update(exit=code, seconds=round(time.monotonic() - begun, 1), data=read_result(part, folder))
    record.update(_judge(part, folder, code, record["data"], seconds))
    return record


def fill(word: str, values: Mapping[str, str]) -> str:
    """Return a word of a command with its names in braces replaced; other braces stay."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def read_result(part: Part, folder: Path) -> Any:
    """Return what a part left in its folder, or None; a record that it was writing when it ended is left out."""
    if part.result is None:
        return None
    try:
        text = (folder / part.result).read_text(encoding="utf-8", errors="replace")
        if part.result.endswith(".jsonl"):
            lines = text.splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")] or None
        return json.loads(text[text.index("{") :])
    except (OSError, ValueError):
        return None


def _judge(part: Part, folder: Path, code: int | None, data: object, seconds: float) -> dict[str, str | None]:
    if code is None:
        return {"status": "late", "reason": f"ended after {seconds:.0f} s"}
    if code == 0 and (data is not None or part.result is None):
        return {"status": "done", "reason": None}
    last = (folder / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    if isinstance(data, Mapping):
        told = data.get("problems") or []
    else:
        errors = sorted((one for one in data or () if one.get("error")), key=lambda one: one.get("part") == "absent")
        told = [f"{one.get('label')}: {one['error']}" for one in errors]  # what is not installed comes last
    said = [*map(str, told), *last, "no word"][0]
    return {
        "status": "failed",
        "reason": f"exit {code}{', no result' if data is None and part.result else ''}: {' '.join(said.split())[:300]}",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it started in its session: an interrupt first, so that it can give back its agent."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            _signal(process.pid, number)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                continue
    _signal(process.pid, signal.SIGKILL)


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def _environment() -> dict[str, str]:
    path: Sequence[str] = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
