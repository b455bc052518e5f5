"""A run out of the history tells what a live one tells."""

from __future__ import annotations

import json

import pytest

from console import report
from db.records import EventRow, RunRow, StageRow
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import Actor, Failure, RunFinished, RunRecord, RunState, Tier

RUN = RunRow(
    "0123456789abcdef", "gpu-1", "llama", "h", "/m", "ops", "desk", "failed", "cold", None, 1,
    failure_code="worker_died", failure_stage="assign", failure_detail="killed (SIGSEGV)",
)  # fmt: skip


def finished(data_json: str) -> EventRow:
    return EventRow("journal", 7, "gpu-1", RUN.run_uid, 1, 1, "run.finished", data_json)


def test_the_last_lines_of_a_failed_run_come_from_its_last_event() -> None:
    """They are cleaned on the way out, since the history keeps a host's bytes as they came."""
    failure = Failure("worker_died", "killed (SIGSEGV)", "assign", ("Fatal Python error", "\x1b[2Jframe"))
    record = RunRecord(
        RUN.run_uid, "llama", "h", "/m", Actor("ops", "desk"), RunState.FAILED, Tier.COLD, None, 1, failure=failure
    )

    shown = report.of_rows(RUN, (), (finished(json.dumps(encode(RunFinished(record)))),))

    assert shown.log_tail == ("Fatal Python error", "frame")
    assert report.document(shown)["failure"]["log_tail"] == ["Fatal Python error", "frame"]  # type: ignore[index]


@pytest.mark.parametrize("data_json", ["{", "[]", '{"run": 3}'])
def test_an_event_that_cannot_be_read_costs_only_the_lines(data_json: str) -> None:
    """The run itself is shown."""
    assert report.of_rows(RUN, (), (finished(data_json),)).log_tail == ()


def test_a_document_holds_every_figure_of_a_run_and_of_its_stages() -> None:
    """What scripts read is there under its name with the value that was measured."""
    run = RunRow(
        RUN.run_uid,
        "gpu-1",
        "llama",
        "h",
        "/m",
        "ops",
        "desk",
        "ready",
        "cached",
        "standby",
        5,
        ("cpu",),
        900,
        100,
        800,
    )
    stage = StageRow(5, "weights", "done", 50, 700, 600, 10**9, 4e9, 5e9, "mapped", "why", '{"read_ns": 3}')

    shown = report.document(report.of_rows(run, (stage,)))

    (weights,) = shown.pop("stages")  # type: ignore[misc]
    assert weights == {
        "name": "weights",
        "status": "done",
        "start_ns": 50,
        "duration_ns": 700,
        "attributed_ns": 600,
        "bytes": 10**9,
        "rate_bytes_s": 4e9,
        "ceiling_bytes_s": 5e9,
        "path": "mapped",
        "reason": "why",
        "extra": {"read_ns": 3},
    }
    assert shown == {
        "run_uid": RUN.run_uid,
        "node": "gpu-1",
        "recipe": "llama",
        "recipe_hash": "h",
        "model": "/m",
        "actor": {"user": "ops", "host": "desk"},
        "status": "ready",
        "tier_from": "cached",
        "tier_to": "standby",
        "started_ns": 5,
        "devices": ["cpu"],
        "wall_ns": 900,
        "unattributed_ns": 100,
        "first_output_ns": 800,
        "output": None,
        "failure": None,
    }
