"""One node as one line of the list layout. Pure."""

from __future__ import annotations

from console.format import delta_text, duration_text
from console.state import NodeState, elapsed_ns
from console.widgets.hardware import hardware_line
from console.widgets.node_view import Status, advice, earlier_runs, node_status, retry_words, tiers_of
from console.widgets.paint import Line, Moment, Piece, choose, fit, plain
from console.widgets.panel import Highlight
from console.widgets.panel_body import DEFAULT_REASONS, expected_line
from console.widgets.stage_view import stage_progress_line, stage_rate_line

STATUS_CELLS, NARROW_STATUS_CELLS = 15, 12
NARROW = 60
HARDWARE_CELLS = 34


def row_line(state: NodeState, width: int, name_cells: int, moment: Moment, highlight: Highlight) -> Line:
    """Return one line of exactly ``width`` cells; ``name_cells`` is what the column of names takes."""
    glyphs = moment.glyphs
    status = node_status(state)
    status_cells = STATUS_CELLS if width >= NARROW else NARROW_STATUS_CELLS
    cursor: Piece = ("▸" if highlight.selected else " ", "frame-selected")
    mark: Piece = ("◆" if highlight.marked else " ", "mark")
    head: list[Piece] = [cursor, mark]
    head += [*fit([status.piece], status_cells - 1, glyphs), (" ", "text")]
    name_role = "frame-selected" if highlight.selected else "title"
    head += [*fit([(state.name, name_role)], name_cells, glyphs), ("  ", "text")]
    room = width - status_cells - name_cells - 4
    if room >= HARDWARE_CELLS + 40:
        head += [*hardware_line(state, HARDWARE_CELLS, moment), ("  ", "text")]
        room -= HARDWARE_CELLS + 2
    if room > 0:
        head += _summary(state, status, room, moment)
    return fit(head, width, glyphs)


def _summary(state: NodeState, status: Status, width: int, moment: Moment) -> Line:
    if status is Status.WARMING:
        return _warming(state, width, moment)
    if status is Status.FAILED:
        return _failed(state, width, moment)
    if status in (Status.READY, Status.COLD):
        return _resting(state, width, moment)
    reason = state.link.reason or DEFAULT_REASONS[status]
    options: list[list[Piece]] = [[(reason, "unknown")]]
    if status is Status.DISCONNECTED:
        options.insert(0, [(reason, "unknown"), (f"  {retry_words(state, moment)}", "muted")])
    return choose(options, width, moment.glyphs)


def _warming(state: NodeState, width: int, moment: Moment) -> Line:
    run = state.run
    assert run is not None
    if not run.is_accepted:
        what = f"a place among {run.waits_among}" if run.waits_among else "its node's answer"
        return fit([(run.recipe, "strong"), (f"  waits for {what}", "muted")], width, moment.glyphs)
    elapsed = elapsed_ns(run, state, moment.mono_ns)
    stage = stage_progress_line(run, elapsed, min(46, width), moment)
    parts: list[Line] = [stage]
    for line in (expected_line(state, run, elapsed, 26, moment), stage_rate_line(run, 34, moment)):
        if width - sum(len(plain(part)) + 2 for part in parts) >= len(plain(line)):
            parts.append(line)
    joined: list[Piece] = []
    for part in parts:
        joined += [*part, ("  ", "text")]
    return fit(joined, width, moment.glyphs)


def _failed(state: NodeState, width: int, moment: Moment) -> Line:
    run = state.run
    assert run is not None
    failure = run.failure
    detail = (
        f"{failure.stage}: {failure.detail}" if failure and failure.stage else failure.detail if failure else "failed"
    )
    return choose(
        [[(detail, "failed"), (f"  → {advice(run.failure, moment)}", "muted")], [(detail, "failed")]],
        width,
        moment.glyphs,
    )


def _resting(state: NodeState, width: int, moment: Moment) -> Line:
    pieces: list[Piece] = []
    for recipe, tier, role in tiers_of(state):
        pieces += [(recipe, "strong"), (f" {tier}  ", role)]
    if not pieces:
        pieces.append(("nothing is warm  ", "muted"))
    options = [pieces]
    run = state.run
    if run is not None and run.wall_ns is not None and run.state.value == "ready":
        words: list[Piece] = [("last ", "muted"), (duration_text(run.wall_ns), "text")]
        options.insert(0, [*pieces, *words])
        if (baseline := earlier_runs(run)) is not None:
            delta = delta_text(run.wall_ns, baseline.wall_ns)
            options.insert(0, [*pieces, *words, (f"  {delta} of median {duration_text(baseline.wall_ns)}", "muted")])
    return choose(options, width, moment.glyphs)
