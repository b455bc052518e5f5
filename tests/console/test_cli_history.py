"""``glowplug history`` and ``show``: what stands there, and what becomes of it on its way out."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from console.cli import run
from db.database import open_history
from db.records import EventRow, Record, RunRow, StageRow
from db.writer import Writer
from tests.console.verbs import REPOSITORY, document, glowplug


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, one of them with hostile text, an hour apart up to now."""
    path = tmp_path / "history.db"
    opened = open_history(path)
    writer = Writer(opened.path)
    now = time.time_ns()
    for number, (node, state, detail) in enumerate(
        [("a", "ready", None), ("a", "failed", "\x1b]52;c;eA==\x07\x1b[2Jno \u202ekernel"), ("=b", "ready", None)]
    ):
        uid = f"{number}aaaaaaa"
        event = EventRow("j", number + 1, node, uid, 1, now, "run.finished", "{}")
        row = RunRow(
            uid, node, "llama", "h", "/m", "ada", "ws", state, "cold", None, now - (2 - number) * 3600 * 10**9,
            ("cpu",), 1000, 100, 900, None, "worker_died" if detail else None, None, detail,
        )  # fmt: skip
        stages = (StageRow(5, "weights", "done", 0, 900 - number * 100, 900, 10**9, 4e9, 5e9, "mapped", None, "{}"),)
        writer.submit(Record(event, row, stages))
    assert writer.close()
    monkeypatch.setenv("GLOWPLUG_HISTORY", str(path))
    return path


def test_history_lists_the_newest_first_and_filters(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each filter narrows, and --since takes a span."""

    def uids(*argv: str) -> list[str]:
        assert run(["history", "--json", *argv]) == 0
        return [run["run_uid"][0] for run in document(capsys)["runs"]]  # type: ignore[attr-defined]

    assert uids() == ["2", "1", "0"]
    assert uids("--node", "a") == ["1", "0"]
    assert uids("--status", "ready", "--limit", "1") == ["2"]
    assert uids("--since", "90m") == ["2", "1"]
    assert uids("--since", "2999-01-01") == []
    assert uids("--recipe", "other") == []


def test_what_a_host_said_is_harmless_in_every_form(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences, bidi and spreadsheet formulas reach neither terminal nor file."""
    for argv in (["history"], ["history", "--json"], ["history", "--csv"], ["show", "1aaaaaaa"]):
        assert run(argv) == 0
        out = capsys.readouterr().out
        assert "kernel" in out
        assert not set(out) & set("\x1b\x07\u202e")
        assert "52;c" not in out

    assert run(["history", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["state"] for row in rows] == ["ready", "failed", "ready"]
    assert not any(cell.startswith("=") for row in rows for cell in row.values())


def test_show_draws_the_run_beside_the_one_before(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run before is of the same node and recipe, and each stage has its change."""
    assert run(["show", "1aaaaaaa"]) == 0

    out = capsys.readouterr().out
    assert "before: 0.0 ms from cold (0aaaaaaa" in out
    (weights,) = [line for line in out.splitlines() if " weights " in line]
    assert "−11 %" in weights
    assert "1.00 GB at 4.00 GB/s of 5.00 GB/s, mapped" in weights


def test_no_history_yet_is_an_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new machine has no past, and that is no error."""
    monkeypatch.setenv("GLOWPLUG_HISTORY", str(tmp_path / "none.db"))

    assert run(["history", "--json"]) == 0

    assert document(capsys) == {"runs": []}


def test_a_reader_that_has_had_enough_is_no_error(recorded: Path) -> None:
    """A closed pipe ends the verb quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "console", "history"],
            stdout=writer,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (0, b"")


def test_output_holds_no_escape_sequence(recorded: Path) -> None:
    """Plain text under NO_COLOR and without it: nothing here depends on colour."""
    for environment in ({}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}):
        done = glowplug("history", env={**os.environ, **environment})
        assert done.returncode == 0
        assert "\x1b" not in done.stdout + done.stderr


def test_a_terminal_that_knows_no_unicode_gets_replacements(recorded: Path) -> None:
    """A glyph that can't be written does not end the verb."""
    done = glowplug("history", env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"})

    assert done.returncode == 0
    assert "? ready" in done.stdout
