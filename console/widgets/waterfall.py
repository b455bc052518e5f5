"""A run's stages over time, each against the same stage of the previous run. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from console.format import cells_of, coarse_duration, delta_text, duration_text, percent_text, rate_pair, size_text
from console.widgets.paint import Line, Moment, Piece, choose, fit, width_of
from console.widgets.run_model import Before, RunDetail
from console.widgets.stage_view import progress_words
from console.widgets.strip import SHORT_NAMES
from remote_agent.protocol.messages import NATIVE_STAGES, STAGES, Progress, StageRecord, StageStatus

NAME_CELLS = 15
TOOK_CELLS = 10
SHARE_CELLS = 7
DELTA_CELLS = 10
SLOWER_FACTOR, SLOWER_NS = 1.25, 20_000_000
"""A stage is marked when it took a quarter and 20 ms longer than before."""


@dataclass(frozen=True)
class Layout:
    """How ``width`` cells are shared; what has no room has 0."""

    name: int
    bar: int
    share: int
    delta: int
    note: int

    @classmethod
    def of(cls, width: int, *, compares: bool) -> Layout:
        name = NAME_CELLS if width >= 60 else 9
        share = SHARE_CELLS if width >= 90 else 0
        delta = DELTA_CELLS if width >= 56 and compares else 0
        left = width - name - TOOK_CELLS - share - delta
        note = max(0, left - 36) if width >= 110 else max(0, left - 22) if width >= 72 else 0
        note = min(note, 64)
        return cls(name, max(4, left - note), share, delta, note)


def waterfall_lines(
    run: RunDetail, before: Before | None, elapsed_ns: int | None, width: int, moment: Moment, *, details: bool
) -> list[Line]:
    """Return a heading, a line a stage and, once it is over, what no stage accounts for."""
    layout = Layout.of(width, compares=before is not None)
    wall_ns = run.wall_ns if run.wall_ns is not None else elapsed_ns if elapsed_ns is not None else _last_end_ns(run)
    total_ns = max(wall_ns, before.wall_ns if before and not run.is_over else 0, 1)
    lines = [_heading(layout, total_ns, before, moment)]
    for name in _names(run, before):
        stage = run.stage(name)
        row = _Row(name, stage, before.spans_ns.get(name) if before else None, wall_ns, total_ns)
        lines.append(_stage_line(row, run, layout, moment))
        if details and stage is not None:
            lines += _detail_lines(stage, layout, width, moment)
    if run.unattributed_ns is not None:
        lines.append(_unattributed_line(run, wall_ns, total_ns, layout, moment))
    return lines


def _names(run: RunDetail, before: Before | None) -> list[str]:
    """Stages in canonical order; while it runs, also those that are still to come."""
    seen = [stage.name for stage in run.stages]
    if run.is_over:
        return seen
    expected = NATIVE_STAGES if before is None else [name for name in STAGES if name in before.spans_ns]
    coming = [name for name in expected if name not in seen]
    return seen + coming


def _last_end_ns(run: RunDetail) -> int:
    return max(((stage.start_ns or 0) + (stage.duration_ns or 0) for stage in run.stages), default=0)


@dataclass(frozen=True)
class _Row:
    name: str
    stage: StageRecord | None
    before: tuple[int, int] | None
    wall_ns: int
    total_ns: int

    @property
    def took_ns(self) -> int | None:
        if self.stage is None or self.stage.start_ns is None:
            return None
        if self.stage.status is StageStatus.RUNNING:
            return max(0, self.wall_ns - self.stage.start_ns)
        return self.stage.duration_ns

    @property
    def is_slower(self) -> bool:
        if self.before is None or self.took_ns is None:
            return False
        return self.took_ns > max(self.before[1] * SLOWER_FACTOR, self.before[1] + SLOWER_NS)


def _heading(layout: Layout, total_ns: int, before: Before | None, moment: Moment) -> Line:
    scale = fit([("0", "faint")], layout.bar, moment.glyphs)
    end = coarse_duration(total_ns)
    if layout.bar > len(end) + 2:
        scale = (("0", "faint"), (" " * (layout.bar - 1 - len(end)), "faint"), (end, "faint"))
    line: list[Piece] = [("stage".ljust(layout.name), "faint"), *scale, ("took".rjust(TOOK_CELLS), "faint")]
    if layout.share:
        line.append(("share".rjust(layout.share), "faint"))
    if layout.delta:
        line.append((("before" if before else "").rjust(layout.delta), "faint"))
    return tuple(line)


def _stage_line(row: _Row, run: RunDetail, layout: Layout, moment: Moment) -> Line:
    glyphs = moment.glyphs
    status = row.stage.status if row.stage else StageStatus.PENDING
    name = row.name if len(row.name) < layout.name else SHORT_NAMES.get(row.name, row.name)
    line: list[Piece] = [*fit([(name, _NAME_ROLES.get(status, "text"))], layout.name - 1, glyphs), (" ", "text")]
    line += _bar(row, status, layout.bar, moment)
    line.append(_took(row, status))
    if layout.share:
        attributed = row.stage.attributed_ns if row.stage else None
        share = percent_text(attributed, run.wall_ns) if attributed and run.wall_ns else ""
        line.append((share.rjust(layout.share), "muted"))
    if layout.delta:
        line.append(_delta(row, layout.delta))
    if layout.note and row.stage is not None:
        line += [("  ", "text"), *choose(_notes(row.stage, run.progress), layout.note - 2, glyphs)]
    return tuple(line)


_NAME_ROLES = {
    StageStatus.PENDING: "faint",
    StageStatus.RUNNING: "running",
    StageStatus.FAILED: "failed",
    StageStatus.REUSED: "muted",
    StageStatus.SKIPPED: "faint",
}
_BAR_ROLES = {StageStatus.RUNNING: "bar-running", StageStatus.FAILED: "bar-failed", StageStatus.REUSED: "bar-reused"}


def _bar(row: _Row, status: StageStatus, width: int, moment: Moment) -> Line:
    """Draw the stage from where it began, the previous run's length behind it, its excess in another role."""
    start_ns = row.stage.start_ns if row.stage and row.stage.start_ns is not None else None
    if start_ns is None:
        if row.before is None or row.stage is not None:
            return ((" " * width, "text"),)
        start_ns = row.before[0]
    scale = width / row.total_ns
    offset = min(width - 1, max(0, int(start_ns * scale)))
    took = cells_of((row.took_ns or 0) * scale)[: width - offset] if row.stage is not None else ""
    behind = min(width - offset, round((row.before[1] if row.before else 0) * scale))
    over = len(took) - behind if row.is_slower and behind < len(took) else 0
    role = _BAR_ROLES.get(status, "bar")
    pieces: list[Piece] = [(" " * offset, "text"), (took[: len(took) - over], role)]
    if over:
        pieces.append((took[len(took) - over :], "bar-running"))
    pieces.append(("▒" * (behind - len(took)), "bar-before"))
    return fit(pieces, width, moment.glyphs)


def _took(row: _Row, status: StageStatus) -> Piece:
    role = {StageStatus.RUNNING: "running", StageStatus.FAILED: "failed"}.get(status, "text")
    if status in (StageStatus.REUSED, StageStatus.SKIPPED):
        return status.value.rjust(TOOK_CELLS), "muted"
    if row.took_ns is None:
        return "".rjust(TOOK_CELLS), role
    text = coarse_duration(row.took_ns) if status is StageStatus.RUNNING else duration_text(row.took_ns)
    return text.rjust(TOOK_CELLS), role


def _delta(row: _Row, width: int) -> Piece:
    if row.before is None or row.took_ns is None or row.stage is None or not row.stage.status.is_over:
        return " " * width, "text"
    text = delta_text(row.took_ns, row.before[1])
    return (f"▲ {text}" if row.is_slower else text).rjust(width), "warning" if row.is_slower else "muted"


def _notes(stage: StageRecord, progress: Progress | None = None) -> list[list[Piece]]:
    """Return what else the stage says, longest first; how far it is while it runs."""
    parts: list[str] = []
    if progress is not None and progress.stage == stage.name and stage.status is StageStatus.RUNNING:
        parts.append(progress_words(progress))
    elif stage.bytes:
        moved = size_text(stage.bytes)
        parts.append(
            f"{moved} at {rate_pair(stage.rate_bytes_s, stage.ceiling_bytes_s)}" if stage.rate_bytes_s else moved
        )
    if stage.path:
        parts.append(stage.path)
    if stage.reason:
        parts.append(stage.reason)
    role = "failed" if stage.status is StageStatus.FAILED else "muted"
    return [[("  ".join(parts[:count]), role)] for count in range(len(parts), 0, -1)] or [[]]


def _detail_lines(stage: StageRecord, layout: Layout, width: int, moment: Moment) -> Iterable[Line]:
    indent = " " * min(layout.name, 4)
    parts = [f"{key} {_figure(key, value)}" for key, value in stage.extra.items() if value is not None]
    if not layout.note:
        parts = [*(text for option in _notes(stage)[:1] for text, _ in option), *parts]
    line = indent
    for part in parts:
        if line != indent and width_of([(f"{line}  {part}", "")]) > width:
            yield ((line, "muted"),)
            line = indent
        line += part if line == indent else f"  {part}"
    if line != indent:
        yield fit([(line, "muted")], width, moment.glyphs)


def _figure(key: str, value: float | str | bool | None) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if key.endswith("_ns"):
        return duration_text(value)
    if key.endswith("bytes_s"):
        return f"{size_text(value)}/s"
    return size_text(value) if key.endswith("bytes") else f"{value:g}" if isinstance(value, float) else str(value)


def _unattributed_line(run: RunDetail, wall_ns: int, total_ns: int, layout: Layout, moment: Moment) -> Line:
    """The rest, so that the parts are seen to sum; its gaps are drawn where no stage ran."""
    gaps = [True] * layout.bar
    for stage in run.stages:
        if stage.start_ns is not None and stage.duration_ns:
            first = int(stage.start_ns / total_ns * layout.bar)
            last = max(first + 1, round((stage.start_ns + stage.duration_ns) / total_ns * layout.bar))
            gaps[max(0, first) : last] = [False] * len(gaps[max(0, first) : last])
    end = round(wall_ns / total_ns * layout.bar)
    drawn = "".join("░" if gap and index < end else " " for index, gap in enumerate(gaps))
    name = "unattributed" if layout.name > 12 else "rest"
    line: list[Piece] = [(name.ljust(layout.name), "muted"), (drawn, "faint")]
    line.append((duration_text(run.unattributed_ns or 0).rjust(TOOK_CELLS), "muted"))
    if layout.share:
        share = percent_text(run.unattributed_ns or 0, run.wall_ns) if run.wall_ns else ""
        line.append((share.rjust(layout.share), "muted"))
    return tuple(line)
