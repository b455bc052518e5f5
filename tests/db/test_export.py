"""Exports hold every field, and nothing a terminal or a spreadsheet would act on."""

from __future__ import annotations

import csv
import io
import json

from db.export import RUN_COLUMNS, STAGE_COLUMNS, write_json_lines, write_runs_csv, write_stages_csv
from db.records import StageRow
from tests.db.histories import run_row


def without_escapes(text: str) -> str:
    return text.replace("\x1b", "")


RUN = run_row(
    "run-a", devices=("cuda:0", "cuda:1"), wall_ns=-5, output='say "hi", twice\nand on', failure_detail="\x1b[2J"
)
STAGE = StageRow(2, "weights", "done", duration_ns=7, bytes=13, rate_bytes_s=1.5, extra_json='{"note": "\\u001b[31m"}')


def test_runs_come_back_from_csv() -> None:
    """A reader of CSV gets each field back, commas, quotes and line ends included."""
    out = io.StringIO(newline="")
    write_runs_csv([RUN], out, without_escapes)
    (row,) = csv.DictReader(io.StringIO(out.getvalue(), newline=""))

    assert tuple(row) == RUN_COLUMNS
    assert (row["run_uid"], row["devices"], row["wall_ns"]) == ("run-a", "cuda:0 cuda:1", "-5")
    assert (row["output"], row["failure_detail"], row["tier_to"]) == (RUN.output, "[2J", "")


def test_stages_come_back_from_csv_with_their_run() -> None:
    """Each stage is a line that names its run."""
    out = io.StringIO(newline="")
    write_stages_csv([(RUN, (STAGE,))], out, without_escapes)
    (row,) = csv.DictReader(io.StringIO(out.getvalue(), newline=""))

    assert tuple(row) == STAGE_COLUMNS
    assert (row["run_uid"], row["name"], row["bytes"], row["rate_bytes_s"]) == ("run-a", "weights", "13", "1.5")


def test_no_cell_begins_like_a_formula() -> None:
    """Text that a spreadsheet would calculate is kept as text, also when cleaning uncovers it."""
    out = io.StringIO(newline="")
    starts = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\x1b=1")
    write_runs_csv([run_row(f"run-{number}", output=text) for number, text in enumerate(starts)], out, without_escapes)

    for row in csv.DictReader(io.StringIO(out.getvalue(), newline="")):
        assert row["output"].startswith("'")


def test_json_lines_hold_a_run_with_its_stages_in_cleaned_ascii() -> None:
    """A line is one document; texts at any depth are cleaned, and nothing but ASCII is written."""
    out = io.StringIO()
    write_json_lines([(RUN, (STAGE,)), (run_row("run-b", output="héllo\u2028"), ())], out, without_escapes)
    first, second = (json.loads(line) for line in out.getvalue().splitlines())

    assert out.getvalue().isascii()
    assert "\\u001b" not in out.getvalue()
    assert (first["devices"], first["failure_detail"]) == (["cuda:0", "cuda:1"], "[2J")
    assert first["stages"][0]["extra"] == {"note": "[31m"}
    assert (second["output"], second["stages"]) == ("héllo\u2028", [])


def test_json_that_a_host_broke_is_exported_as_text() -> None:
    """A stage whose extra figures are no JSON keeps them as they are."""
    out = io.StringIO()
    write_json_lines([(RUN, (StageRow(0, "queue", "done", extra_json="{"),))], out, without_escapes)

    assert json.loads(out.getvalue())["stages"][0]["extra"] == "{"
