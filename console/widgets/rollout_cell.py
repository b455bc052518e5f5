"""A node of a rollout as one line of its batch, a fold of several, and the head of a column. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.cells import cell_len

from console.format import NS_PER_S, coarse_duration, counted, duration_text, percent_text
from console.rollout.saved import run_uid
from console.rollout.states import CALLED_OFF, NOT_BEGUN, BackOut, NodeRow, NodeState, RolloutState
from console.rollout.view import RolloutView
from console.state import NodeState as FleetNode
from console.state import RunView, elapsed_ns
from console.widgets.node_view import node_status
from console.widgets.paint import Line, Moment, Piece, choose, cleaned, fit, spread, width_of
from console.widgets.rollout_layout import Column, Item
from console.widgets.stage_view import current_progress

UNDER_WAY = "under way"
SIGNS: Mapping[str, tuple[str, str]] = {
    NodeState.PENDING.value: ("○", "waiting"),
    NodeState.DRAINING.value: ("●", "running"),
    NodeState.WARMING.value: ("●", "running"),
    NodeState.VERIFYING.value: ("●", "running"),
    NodeState.SHIFTING.value: ("●", "running"),
    NodeState.READY.value: ("✔", "ready"),
    NodeState.FAILED.value: ("✖", "failed"),
    NodeState.SKIPPED.value: ("–", "muted"),
    NodeState.UNKNOWN.value: ("?", "unknown"),
    UNDER_WAY: ("●", "running"),
    CALLED_OFF: ("–", "warning"),
    NOT_BEGUN: ("○", "faint"),
}
"""By what `RolloutState.word` says of a node, and for those that are on their way together."""

COUNTED = ("ready", UNDER_WAY, "failed", "unknown", "skipped", CALLED_OFF, "pending", NOT_BEGUN)
GAP_CELLS, LEAST_SAID_CELLS = 2, 8
WILL_NOT_BE = (CALLED_OFF, NOT_BEGUN)


@dataclass(frozen=True)
class Scene:
    """What cells are drawn from: the rollout, and the fleet's word on a node, None where it has none."""

    view: RolloutView
    node: Callable[[str], FleetNode | None]


def count_states(nodes: tuple[NodeRow, ...], state: RolloutState) -> Counter[str]:
    """Return of how many nodes what is said, those on their way together."""
    return Counter(UNDER_WAY if node.state.is_under_way else state.word(node) for node in nodes)


def count_pieces(counts: Counter[str], *, with_words: bool) -> list[Piece]:
    """``✔ 12 ready  ● 3 under way``, without what there is none of."""
    pieces: list[Piece] = []
    for word in COUNTED:
        if count := counts[word]:
            sign, role = SIGNS[word]
            pieces.append((f"{sign} {count} {word}  " if with_words else f"{sign} {count}  ", role))
    return pieces


def head_lines(column: Column, view: RolloutView, width: int, moment: Moment) -> tuple[Line, Line]:
    """Return the two lines over a batch: which it is, and how its nodes stand."""
    is_now = column.batch == view.state.batch and not view.state.phase.is_over
    canary = "canary, " if column.batch == 0 and view.settings.rollout.canary is not None else ""
    name: Piece = (f" batch {column.batch + 1}", "title" if is_now else "muted")
    facts: Piece = (f"  {canary}{counted(len(column.nodes), 'node')}", "muted")
    ends: list[Piece] = []
    if column.batch + 1 in view.state.rules.pause_after and column.batch + 1 < view.batches:
        ends.append((" then waits ", "muted"))
    first = spread([name, facts], ends, width, moment.glyphs)
    counts = count_states(column.nodes, view.state)
    options = [[(" ", "text"), *count_pieces(counts, with_words=words)] for words in (True, False)]
    fitting = next((one for one in options if width_of(cleaned(one, moment.glyphs)) <= width), options[-1])
    return first, fit(fitting, width, moment.glyphs)


def item_line(item: Item, scene: Scene, width: int, moment: Moment, *, is_selected: bool) -> Line:
    """Return exactly ``width`` cells; a name is cropped last."""
    if item.is_fold:
        return fit([(" ", "text"), *_fold_pieces(item, scene)], width, moment.glyphs)
    row = item.nodes[0]
    word = scene.view.state.word(row)
    sign, role = SIGNS[word]
    if row.is_down and not row.state.is_over and word not in WILL_NOT_BE:
        sign, role = "?", "unknown"
    left: list[Piece] = [("▸" if is_selected else " ", "frame-selected"), (f"{sign} ", role)]
    left.append((row.name, "frame-selected" if is_selected else "strong" if row.state.is_under_way else "text"))
    used = width_of(cleaned(left, moment.glyphs))
    for right in node_words(row, scene, moment):
        right_cells = width_of(cleaned(right, moment.glyphs))
        if used + 2 + right_cells <= width:
            return spread([*left, *_said(row, scene, width - used - right_cells, moment)], right, width, moment.glyphs)
    said = node_words(row, scene, moment)[0] if row.state.is_over else ()
    return fit([*left, ("  ", "text"), *said], width, moment.glyphs)


def _said(row: NodeRow, scene: Scene, room: int, moment: Moment) -> list[Piece]:
    """Return what the node's hook printed last, cut to ``room`` less two gaps; nothing where little of it fits."""
    said, cells = scene.view.said.get(row.name, ""), room - 2 * GAP_CELLS
    if not said or cells < LEAST_SAID_CELLS:
        return []
    return [(" " * GAP_CELLS, "text"), *choose([[(said, "muted")]], min(cells, cell_len(said)), moment.glyphs)]


def is_live(row: NodeRow) -> bool:
    """Whether its line changes by the clock alone."""
    return row.state.is_under_way or row.state is NodeState.UNKNOWN or bool(row.attempt and not row.state.is_over)


def _fold_pieces(item: Item, scene: Scene) -> list[Piece]:
    state, count, word = item.nodes[0].state, len(item.nodes), scene.view.state.word(item.nodes[0])
    sign, role = SIGNS[word]
    pieces: list[Piece] = [(f"{sign} {count} {word}", role)]
    times = [scene.view.warm_ns[node.name] for node in item.nodes if node.name in scene.view.warm_ns]
    if state is NodeState.READY and times:
        pieces.append((f"  median {duration_text(statistics.median(times))}", "muted"))
    return pieces


def node_words(row: NodeRow, scene: Scene, moment: Moment) -> list[list[Piece]]:
    """Return what there is to say of a node beside its name, the longest first."""
    if row.back_out is BackOut.ASKED:
        return [[("is backed out", "running")]]
    if row.back_out is BackOut.FAILED:
        return [[("✖ still out of traffic", "failed")], [("✖ out", "failed")]]
    if not row.state.is_under_way and any(one.reason for one in row.endings):
        return [[("? its run may go on there", "unknown")], [("? its run", "unknown")]]
    words = _WORDS.get(row.state, _under_way)
    return words(row, scene, moment)


def _pending(row: NodeRow, scene: Scene, moment: Moment) -> list[list[Piece]]:
    word = scene.view.state.word(row)
    if word in WILL_NOT_BE:
        return [[(word, SIGNS[word][1])], []]
    wait_s = row.due_s - scene.view.now_s(moment.wall_ns)
    if row.attempt and wait_s > 0:
        return [[(f"again in {wait_s:.0f} s", "waiting")]]
    if row.is_down:
        return [[("out of reach", "unknown")]]
    return [[("pending", "faint")], []]


def _ready(row: NodeRow, scene: Scene, moment: Moment) -> list[list[Piece]]:
    wall_ns = scene.view.warm_ns.get(row.name)
    if wall_ns is None:
        return [[("ready", "ready")], []]
    time: Piece = (duration_text(wall_ns), "text")
    return [[("ready ", "ready"), time], [time]]


def _failed(row: NodeRow, scene: Scene, moment: Moment) -> list[list[Piece]]:
    return [[(row.reason or "failed", "failed")]]


def _skipped(row: NodeRow, scene: Scene, moment: Moment) -> list[list[Piece]]:
    return [[(f"skipped: {row.skip_reason}", "muted")]]


def _under_way(row: NodeRow, scene: Scene, moment: Moment) -> list[list[Piece]]:
    """The stage of its run, where the node is linked; else its state; and since when, where that is known."""
    state, run = linked_run(row, scene)
    spent_ns: int | None = round(max(0.0, scene.view.now_s(moment.wall_ns) - row.since_s) * NS_PER_S)
    if scene.view.holder is None:  # the clock of what nobody carries out stands still
        spent_ns = None
    word, role = row.state.value, "running"
    if row.state is NodeState.UNKNOWN:
        role = "unknown"
    elif row.state is NodeState.VERIFYING:
        word = _gate_words(row, scene.view)
    elif row.hook is not None:
        word = row.hook
    elif state is not None and not state.is_known:
        word, role = f"? {node_status(state).word}", "unknown"
    elif state is not None and run is not None and not run.state.is_terminal:
        word = _stage_words(run)
        spent_ns = elapsed_ns(run, state, moment.mono_ns) or spent_ns
    if spent_ns is None:
        return [[(word, role)], []]
    time: Piece = (coarse_duration(spent_ns), "text")
    return [[(f"{word} ", role), time], [(word, role)], [time]]


def linked_run(row: NodeRow, scene: Scene) -> tuple[FleetNode | None, RunView | None]:
    """Return what the fleet has of a node, and of its attempt's run."""
    state = scene.node(row.name)
    uid = run_uid(scene.view.row.rollout_uid, row.name, row.attempt)
    return state, state.runs.get(uid) if state is not None else None


def _stage_words(run: RunView) -> str:
    if not run.is_accepted:
        return "waits for a place"
    stage = run.current_stage
    if stage is None:
        return run.state.value
    progress = current_progress(run, stage)
    share = f" {percent_text(progress.done, progress.total)}" if progress is not None and progress.total else ""
    return f"{stage.name}{share}"


def _gate_words(row: NodeRow, view: RolloutView) -> str:
    analysis = view.state.analysis
    if analysis is None or row.name not in analysis.nodes:
        return "warm"
    open_gates = [gate for gate in analysis.gates if gate.verdict is None]
    if not open_gates:
        return "verifying"
    gate = open_gates[0]
    return f"gate {gate.gate + 1}, {gate.taken} of {view.state.rules.gates[gate.gate].count}"


_WORDS: Mapping[NodeState, Callable[[NodeRow, Scene, Moment], list[list[Piece]]]] = {
    NodeState.PENDING: _pending,
    NodeState.READY: _ready,
    NodeState.FAILED: _failed,
    NodeState.SKIPPED: _skipped,
}
