"""The GPU benchmark as one command: each part on its own, within a time, nothing left out silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_parts import PARTS, Part
from bench.gpu_run import main

ROOT = Path(__file__).resolve().parents[2]


def python(name: str, source: str, least_s: float = 0, most_s: float = 60, result: str | None = "stdout") -> Part:
    return Part(name, ("-c", source, "{model}", "{out}", "{seconds}"), least_s, most_s, result)


FINE = python("fine", "print('{\"answer\": 42}')")
MAKING = python("model", "import pathlib, sys; f = pathlib.Path(sys.argv[1]); f.mkdir(); (f / 'a.safetensors').touch()",
                result=None)  # fmt: skip


def run(tmp_path: Path, *parts: Part, budget_s: float = 60, making: Part = MAKING) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out"
    argv = ["--out", str(out), "--scratch", str(tmp_path), "--budget-s", str(budget_s)]
    code = main(argv, parts, making)
    return code, json.loads((out / "results.json").read_text(encoding="utf-8"))


def test_a_part_that_crashes_costs_no_other_part(tmp_path: Path) -> None:
    """What it said last is its reason, what it had found so far is kept, and the next part runs."""
    crash = "import os, sys; open(sys.argv[2] + '/r.jsonl', 'w').write('{\"n\": 1}\\n{\"n\":'); sys.exit('out of luck')"

    code, kept = run(tmp_path, python("crash", crash, result="r.jsonl"), FINE)

    parts = kept["parts"]
    assert code == 1
    assert (parts["crash"]["status"], parts["crash"]["reason"]) == ("failed", "exit 1: out of luck")
    assert parts["crash"]["data"] == [{"n": 1}]
    assert (parts["fine"]["status"], parts["fine"]["data"]) == ("done", {"answer": 42})
    assert kept["model"]["shards"] == {"a.safetensors": 0}
    assert {"machine", "command"} <= set(kept)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('import sys; print(\'{"problems": ["tokens differ"]}\'); sys.exit(1)', "exit 1: tokens differ"),
        ("import os; os.abort()", "exit -6, no result: no word"),
    ],
)
def test_a_part_says_itself_what_did_not_hold(tmp_path: Path, source: str, words: str) -> None:
    """Its own list of problems goes before what happens to stand on stderr; a death by signal is its number."""
    _, kept = run(tmp_path, python("part", source))

    assert kept["parts"]["part"]["reason"] == words


def test_a_part_s_records_say_what_went_wrong(tmp_path: Path) -> None:
    """An error among them is the reason, with the label of what had it."""
    source = """
import sys
open(sys.argv[2] + '/r.jsonl', 'w').write('{"label": "ours"}\\n{"label": "theirs", "error": "no GPU"}\\n')
sys.exit(1)
"""

    _, kept = run(tmp_path, python("part", source, result="r.jsonl"))

    assert kept["parts"]["part"]["reason"] == "exit 1: theirs: no GPU"


def test_a_part_that_is_late_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """It is interrupted first, so that it can clean up, and its child is gone as well."""
    source = """
import pathlib, subprocess, sys, time
deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", deaf])
folder = pathlib.Path(sys.argv[1])
(folder / "child").write_text(str(child.pid))
try:
    time.sleep(60)
finally:
    (folder / "cleaned").touch()
"""

    code, kept = run(tmp_path, python("late", source, most_s=3), FINE)

    model = tmp_path / "llama-7b"
    assert code == 1
    assert (kept["parts"]["late"]["status"], kept["parts"]["fine"]["status"]) == ("late", "done")
    assert (model / "cleaned").exists()
    state = Path(f"/proc/{(model / 'child').read_text()}/stat")
    assert not state.exists() or ") Z " in state.read_text()


def test_a_part_whose_time_is_not_left_is_skipped_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stands in the results, the log, the output and the table; that alone is no failure."""
    code, kept = run(tmp_path, FINE, python("long", "", least_s=1000))

    assert code == 0
    assert kept["parts"]["long"]["status"] == "skipped"
    assert kept["parts"]["long"]["reason"].startswith("it needs 1000 s and ")
    for text in (capsys.readouterr().out, *(path.read_text() for path in (tmp_path / "out").glob("*[tm][xd]*"))):
        assert "long: skipped" in text


def test_a_run_leaves_three_files_and_is_not_written_over(tmp_path: Path) -> None:
    """Results have to be copied off a machine: one document, one log with all output, one table."""
    run(tmp_path, FINE)
    out = tmp_path / "out"

    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.json", "table.md"]
    assert '{"answer": 42}' in (out / "log.txt").read_text()
    assert main(["--out", str(out), "--scratch", str(tmp_path)], [FINE], MAKING) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama-7b", "out"]


def test_a_model_that_can_not_be_written_is_named_and_never_taken_for_one(tmp_path: Path) -> None:
    """A half written folder stays half: no part runs on it."""
    source = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir(); sys.exit('no space left')"

    code, kept = run(tmp_path, FINE, making=python("model", source, result=None))

    assert code == 1
    assert list(kept["parts"]) == ["model"]
    assert kept["parts"]["model"]["reason"] == "exit 1: no space left"
    assert not (tmp_path / "llama-7b").exists()


def test_every_part_names_a_script_that_is_there() -> None:
    """A part can't be listed before what it runs; names are its only key."""
    for part in PARTS:
        first, second = part.command[:2]
        script = second.replace(".", "/") if first == "-m" else first
        assert any((ROOT / one).exists() for one in (script, f"{script}.py")), part.name
    assert len({part.name for part in PARTS}) == len(PARTS)
