"""The stage that runs now: how far it is, how fast, against what. Pure."""

from __future__ import annotations

from console.format import bar, coarse_duration, duration_text, rate_pair, size_pair, size_text
from console.state import RunView
from console.widgets.paint import Line, Moment, Piece, choose
from remote_agent.protocol.messages import Progress, StageRecord


def current_progress(run: RunView, stage: StageRecord) -> Progress | None:
    """Return the newest progress if it is that stage's."""
    return run.progress if run.progress is not None and run.progress.stage == stage.name else None


def stage_progress_line(run: RunView, elapsed: int | None, width: int, moment: Moment) -> Line:
    """``weights ███████▌    9.1/13.5 GB``; without bytes the bar shows time against the median."""
    stage = run.current_stage
    if stage is None:
        return choose([[(_between(run), "muted")]], width, moment.glyphs)
    fraction, words = _how_far(run, stage, elapsed)
    name: Piece = (f"{stage.name} ", "running")
    room = width - len(stage.name) - len(words) - 2
    if fraction is None or room < 4:
        return choose([[name, (f" {words}", "text")]], width, moment.glyphs)
    filled, empty = bar(fraction, min(room, 40), ascii_only=moment.glyphs.ascii_only)
    return choose([[name, (filled, "bar-running"), (empty, "bar-back"), (f" {words}", "text")]], width, moment.glyphs)


def progress_words(progress: Progress) -> str:
    """``9.1/13.5 GB at 51.2 of 55.3 GB/s``."""
    if progress.unit != "bytes":
        return (
            f"{progress.done}/{progress.total} {progress.unit}"
            if progress.total
            else f"{progress.done} {progress.unit}"
        )
    moved = size_pair(progress.done, progress.total) if progress.total else size_text(progress.done)
    rate = progress.rate_bytes_s
    return f"{moved} at {rate_pair(rate, progress.ceiling_bytes_s)}" if rate else moved


def _between(run: RunView) -> str:
    done = [stage.name for stage in run.stages if stage.status.is_over]
    return f"after {done[-1]}" if done else "accepted, no stage has begun"


def _how_far(run: RunView, stage: StageRecord, elapsed: int | None) -> tuple[float | None, str]:
    progress = current_progress(run, stage)
    if progress is not None and progress.total:
        if progress.unit == "bytes":
            return progress.done / progress.total, size_pair(progress.done, progress.total)
        return progress.done / progress.total, f"{progress.done}/{progress.total} {progress.unit}"
    if elapsed is None or stage.start_ns is None:
        return None, ""
    spent_ns = max(0, elapsed - stage.start_ns)
    expected_ns = run.baseline.stages_ns.get(stage.name) if run.baseline else None
    if not expected_ns:
        return None, coarse_duration(spent_ns)
    return spent_ns / expected_ns, f"{coarse_duration(spent_ns)} of {coarse_duration(expected_ns)}"


def stage_rate_line(run: RunView, width: int, moment: Moment) -> Line:
    """``51.2 of 55.3 GB/s  0.4 s left  mapped``; where nothing moves, what the stage says or what ended last."""
    stage = run.current_stage
    progress = current_progress(run, stage) if stage else None
    if stage is not None and progress is not None and progress.rate_bytes_s:
        return _rate_options(stage, progress, progress.rate_bytes_s, width, moment)
    if stage is not None and (said := stage.reason or stage.path):
        return choose([[(said, "muted")]], width, moment.glyphs)
    over = [done for done in run.stages if done.status.is_over and done.duration_ns is not None]
    if not over:
        return ()
    last = max(over, key=lambda done: (done.start_ns or 0) + (done.duration_ns or 0))
    words = f"{last.name} took {duration_text(last.duration_ns or 0)}"
    return choose([[(words, "muted")]], width, moment.glyphs)


def _rate_options(stage: StageRecord, progress: Progress, rate_bytes_s: float, width: int, moment: Moment) -> Line:
    pieces: list[Piece] = [(rate_pair(rate_bytes_s, progress.ceiling_bytes_s), "text")]
    options = [list(pieces)]
    if progress.total:
        left_ns = max(0, progress.total - progress.done) / rate_bytes_s * 1e9
        pieces.append((f"  {coarse_duration(left_ns)} left", "muted"))
        options.insert(0, list(pieces))
    if stage.path:
        pieces.append((f"  {stage.path}", "muted"))
        options.insert(0, list(pieces))
    return choose(options, width, moment.glyphs)
