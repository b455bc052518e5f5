"""Writes runs and stages as CSV and as JSON lines, every text passed through the caller's cleaning function."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from db.records import RunRow, StageRow

Clean = Callable[[str], str]
Entry = tuple[RunRow, Sequence[StageRow]]

RUN_COLUMNS = tuple(field.name for field in dataclasses.fields(RunRow))
STAGE_COLUMNS = ("run_uid", *(field.name for field in dataclasses.fields(StageRow)))

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def write_runs_csv(runs: Iterable[RunRow], out: TextIO, clean: Clean) -> None:
    """Write a header and a line a run; devices are separated by spaces.

    No cell can be taken for a formula. ``out`` must be opened with ``newline=""``.
    """
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(RUN_COLUMNS)
    for run in runs:
        fields = {**vars(run), "devices": " ".join(run.devices)}
        writer.writerow([_cell(fields[name], clean) for name in RUN_COLUMNS])


def write_stages_csv(entries: Iterable[Entry], out: TextIO, clean: Clean) -> None:
    """Write a header and a line a stage, its run's uid first, as `write_runs_csv` does."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(STAGE_COLUMNS)
    for run, stages in entries:
        for stage in stages:
            cells = [run.run_uid, *vars(stage).values()]
            writer.writerow([_cell(value, clean) for value in cells])


def write_json_lines(entries: Iterable[Entry], out: TextIO, clean: Clean) -> None:
    """Write one JSON object a run, in ASCII, with its ``stages``; a stage's ``extra_json`` becomes ``extra``."""
    for run, stages in entries:
        document = {**vars(run), "stages": [_stage_document(stage) for stage in stages]}
        out.write(json.dumps(_cleaned(document, clean)) + "\n")


def _stage_document(stage: StageRow) -> dict[str, object]:
    document = dict(vars(stage))
    text = document.pop("extra_json")
    try:
        document["extra"] = json.loads(text)
    except ValueError:
        document["extra"] = text
    return document


def _cleaned(value: object, clean: Clean) -> object:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(key): _cleaned(item, clean) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(item, clean) for item in value]
    return value


def _cell(value: object, clean: Clean) -> object:
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
