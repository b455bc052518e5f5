"""Runs as plain text and as documents for machines: one form for what is live and what is history.

Everything here is cleaned once more, since the history keeps raw bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from console.clean import clean, clean_record
from console.format import cells_of, date_text, delta_text, duration_text, rate_text, short_uid, size_text
from console.recorder import run_row, stage_row
from console.state import RunView
from db.records import EventRow, RunRow, StageRow
from remote_agent.protocol.codec import decode
from remote_agent.protocol.messages import RunFinished, RunRecord

GLYPHS = {
    "ready": "✔",
    "failed": "✖",
    "stuck": "✖",
    "interrupted": "✖",
    "cancelled": "–",
    "running": "●",
    "queued": "○",
}
BAR_CELLS = 32


@dataclass(frozen=True)
class Report:
    """A run with its stages and, where it failed, the last lines its worker wrote."""

    run: RunRow
    stages: tuple[StageRow, ...]
    log_tail: tuple[str, ...] = ()


def of_view(node: str, run: RunView | RunRecord) -> Report:
    """Return the report of a run as it is known now."""
    stages = tuple(stage_row(stage) for stage in run.stages)
    return Report(run_row(node, run), stages, run.failure.log_tail if run.failure else ())


def of_rows(run: RunRow, stages: Sequence[StageRow], events: Sequence[EventRow] = ()) -> Report:
    """Return the report of a run in the history, cleaned; ``events`` hold the last lines of one that failed."""
    log_tail = _log_tail(events) if run.failure_code is not None else ()
    return Report(clean_record(run), tuple(clean_record(stage) for stage in stages), log_tail)


def _log_tail(events: Sequence[EventRow]) -> tuple[str, ...]:
    for event in reversed(events):
        if event.kind == "run.finished":
            try:
                failure = decode(RunFinished, json.loads(event.data_json)).run.failure
            except ValueError:  # bytes of a host, stored as they came
                return ()
            return clean_record(failure).log_tail if failure else ()
    return ()


def document(report: Report) -> dict[str, object]:
    """Return the run as one JSON-like document."""
    run = report.run
    failure = {
        "code": run.failure_code,
        "stage": run.failure_stage,
        "detail": run.failure_detail,
        "log_tail": list(report.log_tail),
    }
    return {
        "run_uid": run.run_uid,
        "node": run.node,
        "recipe": run.recipe,
        "recipe_hash": run.recipe_hash,
        "model": run.model,
        "actor": {"user": run.actor_user, "host": run.actor_host},
        "status": run.state,
        "tier_from": run.tier_from,
        "tier_to": run.tier_to,
        "started_ns": run.started_ns,
        "devices": list(run.devices),
        "wall_ns": run.wall_ns,
        "unattributed_ns": run.unattributed_ns,
        "first_output_ns": run.first_output_ns,
        "output": run.output,
        "failure": failure if run.failure_code is not None else None,
        "stages": [_stage_document(stage) for stage in report.stages],
    }


def one_line(report: Report) -> str:
    """``✔ ready   gpu-1  llama  cold → standby  1.08 s  first output 0.36 s  7f3a91c2``; what failed, where it did."""
    run = report.run
    tiers = run.tier_from + (f" → {run.tier_to}" if run.tier_to else "")
    parts = [
        f"{status_words(run.state):<13}",
        f"{run.node:<14}",
        f"{run.recipe:<16}",
        f"{tiers:<18}",
        f"{_duration(run.wall_ns):>9}",
        f"{short_uid(run.run_uid)}",
    ]
    if run.failure_detail:
        parts.append(f"{run.failure_stage + ': ' if run.failure_stage else ''}{run.failure_detail}")
    elif run.first_output_ns is not None:
        parts.append(f"first output at {duration_text(run.first_output_ns)}")
    return clean("  ".join(parts).rstrip(), 1000)


def history_line(report: Report) -> str:
    """Return `one_line` with the run's date before it."""
    return f"{date_text(report.run.started_ns)}  {one_line(report)}"


def status_words(state: str) -> str:
    """Glyph and word of a run's state."""
    return f"{GLYPHS.get(state, '?')} {state}"


def waterfall(report: Report, previous: Report | None = None) -> list[str]:
    """Return the run stage by stage: bar, time, the run before it, and what there is to say."""
    run = report.run
    title = f"run {short_uid(run.run_uid)}  {run.node}  {run.recipe}  {date_text(run.started_ns)}"
    lines = [title, one_line(report)]
    if previous is not None and previous.run.wall_ns and run.wall_ns:
        delta = delta_text(run.wall_ns, previous.run.wall_ns)
        lines.append(
            f"before: {duration_text(previous.run.wall_ns)} from {previous.run.tier_from}"
            f" ({short_uid(previous.run.run_uid)}, {date_text(previous.run.started_ns)})  {delta}"
        )
    lines.append("")
    earlier = {stage.name: stage for stage in previous.stages} if previous is not None else {}
    whole_ns = run.wall_ns or max((_end_ns(stage) for stage in report.stages), default=0)
    lines += [_stage_line(stage, earlier.get(stage.name), whole_ns) for stage in report.stages]
    if run.unattributed_ns is not None:
        lines.append(f"  {'unattributed':<14}{'':<{BAR_CELLS}}{duration_text(run.unattributed_ns):>10}")
    if run.output:
        lines.append(f"  output: {run.output}")
    lines += [f"  | {line}" for line in report.log_tail]
    return [clean(line, 1000).rstrip() for line in lines]


def stage_note(stage: StageRow) -> str:
    """Return what there is to say of a stage beside its time: bytes, rate, path, reason."""
    notes = []
    if stage.bytes:
        ceiling = f" of {rate_text(stage.ceiling_bytes_s)}" if stage.ceiling_bytes_s else ""
        rate = f" at {rate_text(stage.rate_bytes_s)}{ceiling}" if stage.rate_bytes_s else ""
        notes.append(f"{size_text(stage.bytes)}{rate}")
    notes += [text for text in (stage.path, stage.reason) if text]
    return ", ".join(notes)


def _stage_line(stage: StageRow, earlier: StageRow | None, whole_ns: int) -> str:
    took = stage.status if stage.status in ("skipped", "reused", "pending") else _duration(stage.duration_ns)
    before = delta = ""
    if earlier is not None and earlier.duration_ns is not None and earlier.status != "skipped":
        before = duration_text(earlier.duration_ns) if earlier.status == "done" else earlier.status
        if earlier.status == stage.status == "done" and stage.duration_ns is not None:
            delta = delta_text(stage.duration_ns, earlier.duration_ns)
    failed = "✖ " if stage.status == "failed" else "  "
    columns = f"{failed}{stage.name:<14}{_bar(stage, whole_ns)}{took:>10}{before:>11}{delta:>8}"
    return f"{columns}  {stage_note(stage)}"


def _bar(stage: StageRow, whole_ns: int) -> str:
    if stage.start_ns is None or not stage.duration_ns or whole_ns <= 0:
        return " " * BAR_CELLS
    start = min(BAR_CELLS - 1, stage.start_ns * BAR_CELLS // whole_ns)
    bar = cells_of(min(BAR_CELLS - start, stage.duration_ns * BAR_CELLS / whole_ns))
    return (" " * start + bar)[:BAR_CELLS].ljust(BAR_CELLS)


def _end_ns(stage: StageRow) -> int:
    return (stage.start_ns or 0) + (stage.duration_ns or 0)


def _duration(value_ns: int | None) -> str:
    return "–" if value_ns is None else duration_text(value_ns)


def _stage_document(stage: StageRow) -> dict[str, object]:
    return {
        "name": stage.name,
        "status": stage.status,
        "start_ns": stage.start_ns,
        "duration_ns": stage.duration_ns,
        "attributed_ns": stage.attributed_ns,
        "bytes": stage.bytes,
        "rate_bytes_s": stage.rate_bytes_s,
        "ceiling_bytes_s": stage.ceiling_bytes_s,
        "path": stage.path,
        "reason": stage.reason,
        "extra": _extra(stage.extra_json),
    }


def _extra(text: str) -> Mapping[str, object]:
    try:
        extra = json.loads(text)
    except ValueError:
        return {}
    return clean_record(extra) if isinstance(extra, dict) else {}
