"""The four lines of a panel that depend on how its node is. Pure."""

from __future__ import annotations

from collections.abc import Callable

from console.format import coarse_duration, delta_text, duration_text, elapsed_pair, short_uid, sparkline
from console.state import NodeState, RunView, elapsed_ns, eta_ns, is_warm
from console.widgets.node_view import UNKNOWN_RUN, Status, advice, earlier_runs, node_status, retry_words, run_word
from console.widgets.paint import Line, Moment, Piece, choose, fit
from console.widgets.stage_view import stage_progress_line, stage_rate_line
from console.widgets.strip import stage_strip
from console.widgets.wrap import wrap
from remote_agent.protocol.messages import RunState, Tier

BODY_LINES = 4
BLANK: Line = ()


def body_lines(state: NodeState, width: int, moment: Moment) -> list[Line]:
    """Return `BODY_LINES` lines: the run under way, the last one, why it failed, or why the node can't be asked."""
    return _BODIES[node_status(state)](state, width, moment)


def _strip_line(run: RunView | None, wall_ns: int | None, width: int) -> Line:
    if run is None or not run.stages:
        return BLANK
    elapsed = wall_ns if wall_ns is not None else _last_end_ns(run)
    expected = run.baseline.wall_ns if run.baseline and not run.state.is_terminal else 0
    total = max(expected, elapsed)
    return stage_strip(run.stages, elapsed, total, width)


def _last_end_ns(run: RunView) -> int:
    ends = [(stage.start_ns or 0) + (stage.duration_ns or 0) for stage in run.stages]
    return max(ends, default=0)


def _warming(state: NodeState, width: int, moment: Moment) -> list[Line]:
    run = state.run
    assert run is not None
    if not run.is_accepted:
        return _unaccepted(run, moment)
    elapsed = elapsed_ns(run, state, moment.mono_ns)
    return [
        stage_progress_line(run, elapsed, width, moment),
        stage_rate_line(run, width, moment),
        expected_line(state, run, elapsed, width, moment),
        _strip_line(run, elapsed, width),
    ]


def _unaccepted(run: RunView, moment: Moment) -> list[Line]:
    """A run that only this console knows of yet."""
    key = moment.key("fleet.cancel")
    return [
        (
            ("○ waiting", "waiting"),
            ("  for a free place among" if run.waits_among else "  for its node's answer", "text"),
        ),
        ((f"{run.waits_among}, or an answer", "text"),) if run.waits_among else BLANK,
        ((key, "key"), (" withdraws it", "muted")) if key else BLANK,
        BLANK,
    ]


def expected_line(state: NodeState, run: RunView, elapsed: int | None, width: int, moment: Moment) -> Line:
    if elapsed is None:
        return fit([("elapsed unknown: the host's clock was not read yet", "muted")], width, moment.glyphs)
    if run.baseline is None:
        return fit([(coarse_duration(elapsed), "text"), ("  no earlier run to compare", "muted")], width, moment.glyphs)
    late = elapsed > run.baseline.wall_ns
    pieces: list[Piece] = [(elapsed_pair(elapsed, run.baseline.wall_ns), "warning" if late else "text")]
    options = [pieces]
    left = eta_ns(run, state, moment.mono_ns)
    if left is not None and not late:
        options.insert(0, [*pieces, (f"  {coarse_duration(left)} left", "muted")])
    options.insert(0, [*options[0], (f"  median of {run.baseline.count}", "muted")])
    return choose(options, width, moment.glyphs)


def _ready(state: NodeState, width: int, moment: Moment) -> list[Line]:
    run = state.run
    if run is None or run.state is not RunState.READY:
        return _resting(state, width, moment)
    return [
        _last_line(run, width, moment),
        _trend_line(run, width, moment),
        _output_line(run),
        _strip_line(run, run.wall_ns, width),
    ]


def _last_line(run: RunView, width: int, moment: Moment) -> Line:
    if run.wall_ns is None:
        return BLANK
    pieces: list[Piece] = [("last ", "muted"), (duration_text(run.wall_ns), "strong")]
    if (baseline := earlier_runs(run)) is not None:
        slower = run.wall_ns > baseline.wall_ns * 1.25
        pieces.append((f"  {delta_text(run.wall_ns, baseline.wall_ns)}", "warning" if slower else "muted"))
    options = [pieces]
    if run.first_output_ns is not None:
        options.insert(0, [*pieces, ("  first output ", "muted"), (duration_text(run.first_output_ns), "text")])
    return choose(options, width, moment.glyphs)


def _trend_line(run: RunView, width: int, moment: Moment) -> Line:
    baseline = earlier_runs(run)
    if baseline is None:
        return (("no earlier run to compare with", "muted"),)
    words = f"  median {duration_text(baseline.wall_ns)} of {baseline.count}"
    trend = sparkline(baseline.recent_wall_ns, max(0, min(20, width - len(words))))
    return ((trend, "bar-before"), (words if trend else words.strip(), "muted"))


def _output_line(run: RunView) -> Line:
    if not run.output:
        return BLANK
    return (("answered ", "muted"), (" ".join(run.output.split()) or "blanks only", "text"))


def _cold(state: NodeState, width: int, moment: Moment) -> list[Line]:
    return _resting(state, width, moment)


def _resting(state: NodeState, width: int, moment: Moment) -> list[Line]:
    """A node with nothing under way: what its last run came to, and the key that starts one."""
    run = state.run
    last: Line = (("no run yet", "muted"),)
    strip: Line = BLANK
    if run is not None:
        last = _last_words(run, state)
        strip = _strip_line(run, run.wall_ns, width)
    key = moment.key("fleet.warm")
    hint: Line = ((key, "key"), (" warms a model here", "muted")) if key else BLANK
    return [last, hint, BLANK, strip]


def _last_words(run: RunView, state: NodeState) -> Line:
    wall = duration_text(run.wall_ns) if run.wall_ns is not None else "?"
    if run.state is RunState.READY:
        return ("last ", "muted"), (wall, "text"), (_left(run, state), "muted")
    word = run_word(run.state.value, is_known=True)[0].split()[-1]
    return ("last ", "muted"), (run.recipe, "text"), (f" {word} after {wall}", "muted")


def _left(run: RunView, state: NodeState) -> str:
    """Say what a ready run left on a node where nothing is warm; nothing until the node has told what it holds."""
    if state.residents is None or is_warm(state):
        return ""
    if any(one.run_uid == run.run_uid for one in state.residents):
        return ", armed: waits for weights"
    return ", left in the page cache" if run.tier_to is Tier.CACHED else ", since released"


def _failed(state: NodeState, width: int, moment: Moment) -> list[Line]:
    run = state.run
    assert run is not None
    detail, stage = f"run {short_uid(run.run_uid)} {run.state.value}", None
    if run.failure is not None:
        detail, stage = run.failure.detail, run.failure.stage
    words = wrap(moment.glyphs.text(f"{stage}: {detail}" if stage else detail), width, 2)
    lines: list[Line] = [((text, "failed"),) for text in words]
    lines.append((("→ ", "muted"), (advice(run.failure, moment), "text")))
    lines += [BLANK] * (3 - len(lines))
    return [*lines, _strip_line(run, run.wall_ns, width)]


def _unlinked(state: NodeState, width: int, moment: Moment) -> list[Line]:
    reason = state.link.reason or DEFAULT_REASONS[node_status(state)]
    words = wrap(moment.glyphs.text(reason), width, 2)
    lines: list[Line] = [((text, "unknown"),) for text in words]
    if state.link.final or state.link.retry_at_s is not None or node_status(state) is Status.DISCONNECTED:
        lines.append(((retry_words(state, moment), "muted"),))
    run = state.run
    if run is not None and not run.state.is_terminal:
        stage = run.current_stage
        where = f" was in {stage.name}" if stage else ""
        lines.append((UNKNOWN_RUN, (f"  run {short_uid(run.run_uid)}{where}", "text")))
    lines += [BLANK] * (BODY_LINES - len(lines))
    return lines[:BODY_LINES]


DEFAULT_REASONS = {
    Status.SILENT: "no heartbeat from the agent",
    Status.DISCONNECTED: "the link is down; no reason was given",
    Status.CONNECTING: "waiting for the first answer",
}

_BODIES: dict[Status, Callable[[NodeState, int, Moment], list[Line]]] = {
    Status.READY: _ready,
    Status.WARMING: _warming,
    Status.COLD: _cold,
    Status.FAILED: _failed,
    Status.SILENT: _unlinked,
    Status.DISCONNECTED: _unlinked,
    Status.CONNECTING: _unlinked,
}
