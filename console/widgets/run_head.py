"""The head of a run's screen: which run, how it stands, what came out or why nothing did. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from console.format import clock_text, coarse_duration, date_text, delta_text, duration_text, short_uid
from console.state import LogLine
from console.widgets.node_view import advice, run_word
from console.widgets.paint import Line, Moment, Piece, choose
from console.widgets.run_model import Before, RunDetail
from console.widgets.wrap import wrap

LAST_LINES = 6


def head_lines(
    run: RunDetail, before: Before | None, elapsed_ns: int | None, width: int, moment: Moment, *, is_known: bool
) -> list[Line]:
    """Return two lines and more where there is an output or a failure to show."""
    lines = [_title(run, before, elapsed_ns, width, moment, is_known), _origin(run, width, moment)]
    if run.failure is not None:
        lines += _failure_lines(run, width, moment)
    elif (answer := _answer(run)) is not None:
        lines.append(choose([answer], width, moment.glyphs))
    return lines


def _title(
    run: RunDetail, before: Before | None, elapsed_ns: int | None, width: int, moment: Moment, is_known: bool
) -> Line:
    state = run_word(run.state, is_known=is_known)
    name: list[Piece] = [(f"{run.node}  ", "title"), (f"{run.recipe}  ", "strong")]
    time: list[Piece] = []
    if run.wall_ns is not None:
        time.append((f"  {duration_text(run.wall_ns)}", "strong"))
    elif elapsed_ns is not None and is_known:
        time.append((f"  {coarse_duration(elapsed_ns)}", "strong"))
    reached = run.tier_to or ("" if run.is_over else "…")
    tiers: Piece = (f"  {run.tier_from} → {reached}" if reached else f"  {run.tier_from}", "text")
    uid: Piece = (f"  run {short_uid(run.run_uid)}", "muted")
    against = _against(run, before)
    return choose(
        [
            [*name, state, *time, *against, tiers, uid],
            [*name, state, *time, *against, tiers],
            [*name, state, *time, *against],
            [*name, state, *time],
            [(f"{run.node} ", "title"), state, *time],
        ],
        width,
        moment.glyphs,
    )


def _against(run: RunDetail, before: Before | None) -> list[Piece]:
    if before is None:
        return [("  no earlier run to compare", "faint")]
    words = f"{duration_text(before.wall_ns)} before"
    if run.wall_ns is None or run.state != "ready":
        return [(f"  {words}", "muted")]
    return [(f"  {delta_text(run.wall_ns, before.wall_ns)}", "text"), (f" of {words}", "muted")]


def _origin(run: RunDetail, width: int, moment: Moment) -> Line:
    parts = [date_text(run.started_ns, moment.zone), run.actor, run.model, " ".join(run.devices)]
    options = [[("  ".join(part for part in parts[:count] if part), "muted")] for count in range(len(parts), 0, -1)]
    return choose(options, width, moment.glyphs)


def _answer(run: RunDetail) -> list[Piece] | None:
    pieces: list[Piece] = []
    if run.first_output_ns is not None:
        pieces += [("first output after ", "muted"), (duration_text(run.first_output_ns), "text")]
    if run.output:
        pieces += [("  answered ", "muted"), (" ".join(run.output.split()) or "blanks only", "text")]
    return pieces or None


def _failure_lines(run: RunDetail, width: int, moment: Moment) -> list[Line]:
    failure = run.failure
    assert failure is not None
    where = f"{failure.stage}: " if failure.stage else ""
    words = wrap(moment.glyphs.text(f"{where}{failure.detail}"), width, 3)
    lines: list[Line] = [((text, "failed"),) for text in words]
    lines.append((("→ ", "muted"), (advice(failure, moment, is_open=True), "text"), (f"  ({failure.code})", "faint")))
    lines += [((f"  {text}", "muted"),) for text in failure.log_tail[-LAST_LINES:]]
    return lines


def log_lines(log: Sequence[LogLine], moment: Moment) -> list[Line]:
    """Return an event log, one line each: when, how grave, what."""
    roles = {"error": "failed", "warning": "warning"}
    signs = {"error": "✖ ", "warning": "▲ "}
    return [
        (
            (f"{clock_text(line.t_wall_ns, moment.zone)}  ", "muted"),
            (f"{signs.get(line.severity, '')}{line.text}", roles.get(line.severity, "text")),
        )
        for line in log
    ]
