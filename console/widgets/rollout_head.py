"""What stands around the board: how the rollout stands and what it waits for, its gates, a node, the timeline. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from console.format import clock_text, counted, duration_text
from console.rollout.endings import may_go_on
from console.rollout.others import Other, carrier_words
from console.rollout.states import NOT_BEGUN, BackOut, GateCount, NodeState, Phase, Verdict
from console.rollout.view import Look, RolloutView
from console.widgets.paint import Line, Moment, Piece, choose, cleaned, spread, width_of
from console.widgets.rollout_cell import (
    SIGNS,
    UNDER_WAY,
    Scene,
    count_pieces,
    count_states,
    linked_run,
    node_words,
)
from console.widgets.wrap import wrap

PHASES = {
    Phase.RUNNING: ("● running", "running"),
    Phase.PAUSED: ("○ paused", "warning"),
    Phase.ABORTING: ("✖ aborting", "failed"),
    Phase.ABORTED: ("✖ aborted", "failed"),
    Phase.DONE: ("✔ done", "ready"),
}
VERDICTS = {"pass": ("✔", "ready"), "fail": ("✖", "failed"), "inconclusive": ("?", "unknown")}
TONES = {"asked": "accent", "failed": "failed", "odd": "warning", "step": "muted", "said": "text"}
TONE_SIGNS = {"asked": "▸", "failed": "✖", "odd": "?"}
SAMPLES_SHOWN = 20
REASON_LINES = 3


def holder_piece(view: RolloutView) -> Piece:
    """Say who carries it out."""
    if view.state.phase.is_over:
        return " it is over ", "muted"
    if view.is_here:
        return " ● carried out here ", "ready"
    if view.holder is None:
        return f" ✖ {carrier_words(None)} ", "failed"
    return f" ● {carrier_words(view.holder)} ", "accent"


def others_line(others: Sequence[Other], hint: str, width: int, moment: Moment) -> Line:
    """Say how the first of ``others`` stands, and how many more there are; ``hint``: the key to it, and what it does.

    Where there is little room, how many are out of traffic and the key stay longest.
    """
    one = others[0]
    role = "failed" if one.holder is None else "accent"
    name: Piece = (f" {'✖' if one.holder is None else '●'} rollout {one.name}: {one.phase}", role)
    who: Piece = (f", {carrier_words(one.holder)}", role)
    out: Piece = (f", {counted(one.nodes_out, 'node')} out of traffic" if one.nodes_out else "", "warning")
    more: Piece = (f"; and {counted(len(others) - 1, 'more rollout')}" if len(others) > 1 else "", role)
    key: Piece = (f"  {hint}" if hint else "", "accent")
    short_who: Piece = (f", by {one.holder.partition(':')[0]}" if one.holder is not None else ", nobody at it", role)
    options = ([name, who, out, more, key], [name, who, out, key], [name, short_who, out, key], [name, out, key])
    return choose((*options, [name, out]), width, moment.glyphs)


def standing_line(view: RolloutView, width: int, moment: Moment) -> Line:
    """``● running  eu-llama  batch 2 of 4  ✔ 12 ready …   12 min 05 s``; counts survive the longest."""
    state, row = view.state, view.row
    end_ns = row.finished_ns if row.finished_ns is not None else moment.wall_ns
    phase: Piece = (f" {PHASES[state.phase][0]} ", PHASES[state.phase][1])
    name: Piece = (f" {row.name}  ", "title")
    batch: Piece = (f"batch {state.batch + 1} of {view.batches}  ", "text")
    counts = count_states(state.nodes, state)
    left = sum(counts[word] for word in (UNDER_WAY, "pending", "unknown"))
    limit: Piece = (
        f"failures {state.failures}/{state.rules.max_failures}  ",
        "failed" if state.failures else "faint",
    )
    rest: Piece = (f"{left} left  ", "text" if left else "faint")
    time = [(f"{duration_text(max(0, end_ns - row.created_ns))} ", "muted")]
    begun = Counter({word: count for word, count in counts.items() if word not in ("pending", NOT_BEGUN)})
    words, figures = count_pieces(counts, with_words=True), count_pieces(counts, with_words=False)
    for start, end in (
        ([phase, name, batch, *words, rest, limit], time),
        ([phase, name, batch, *count_pieces(begun, with_words=True), rest, limit], time),
        ([phase, name, batch, *count_pieces(begun, with_words=True), rest, limit], []),
        ([phase, name, batch, *words, rest], time),
        ([phase, name, batch, *words], []),
        ([phase, name, batch, *figures, rest], []),
        ([phase, name, *figures], []),
        ([phase, *figures], []),
    ):
        if width_of(cleaned([*start, *end], moment.glyphs)) < width:
            return spread(start, end, width, moment.glyphs)
    return choose([[phase, *figures]], width, moment.glyphs)


def waiting_lines(view: RolloutView, width: int, moment: Moment) -> list[Line]:
    """Return why it waits and which key goes on, two lines at most."""
    text, role, keys = _waits(view, moment)
    hints: list[Piece] = [(f" {hint}", "accent") for hint in (" · ".join(keys),) if hint]
    if width_of(cleaned([(f" {text} ", role), *hints], moment.glyphs)) <= width:
        return [((f" {text} ", role), *hints)]
    lines: list[Line] = [((f" {part}", role),) for part in wrap(text, width - 2, 2)]
    return [*lines[: 1 if hints else 2], *([tuple(hints)] if hints else [])]


def _waits(view: RolloutView, moment: Moment) -> tuple[str, str, list[str]]:
    state = view.state

    def keys(*wanted: tuple[str, str]) -> list[str]:
        return _hints(wanted, moment)

    if state.phase.is_over:
        return state.reason or state.phase.value, "text", keys(("start", "starts one"), ("list", "shows others"))
    if view.holder is None and state.phase is Phase.ABORTING:
        return f"stands still; aborting: {state.reason}", "failed", keys(("abort", "goes on with that in this console"))
    if view.holder is None:
        why = f"; {state.phase.value}: {state.reason}" if state.reason else ""
        return f"stands still{why}", "failed", keys(("resume", "goes on in this console"), ("abort", "aborts"))
    if state.phase is Phase.PAUSED:
        return _paused(view, moment)
    if state.phase is Phase.ABORTING:
        return f"{state.reason}; {_summary(view)}", "failed", []
    return f"waits for {_summary(view)}", "text", keys(("pause", "pauses"), ("abort", "aborts"))


def _hints(wanted: Iterable[tuple[str, str]], moment: Moment) -> list[str]:
    """Return each key with what it does, without those that are not to be had."""
    return [f"{key} {word}" for id, word in wanted if (key := moment.key(f"rollout.{id}"))]


def _paused(view: RolloutView, moment: Moment) -> tuple[str, str, list[str]]:
    state = view.state

    def keys(*wanted: tuple[str, str]) -> list[str]:
        return _hints(wanted, moment)

    unread = [node.name for node in state.nodes if node.state is NodeState.UNKNOWN]
    if unread:
        first = f"{unread[0]} and {len(unread) - 1} more" if len(unread) > 1 else unread[0]
        return f"{state.reason}; what became of {first} is being read", "warning", []
    if any(node.failed_at_gate for node in state.nodes):
        return state.reason, "warning", keys(
            ("retry", "tries a node again"), ("skip", "skips it"), ("promote", "goes on without")
        )  # fmt: skip
    if state.analysis is not None and state.analysis.verdict is Verdict.INCONCLUSIVE:
        return state.reason, "warning", keys(("resume", "looks anew"), ("promote", "takes it as passed"))
    return f"waits for you: {state.reason}", "warning", keys(("resume", "goes on"), ("promote_all", "past all pauses"))


def _summary(view: RolloutView) -> str:
    """Say what it waits for; nodes by number where they are many."""
    lines = view.waits
    if len(lines) <= 2:
        return "; ".join(lines)
    counts = Counter(node.state.value for node in view.state.nodes if node.state.is_under_way)
    words = [f"{counted(count, 'node')} {word}" for word, count in counts.items()]
    stuck = sum(node.back_out is not BackOut.NONE for node in view.state.nodes)
    if stuck:
        words.append(f"{counted(stuck, 'node')} to be back in traffic")
    words += [line for line in lines if line.startswith("gate ")]
    return ", ".join(words) or lines[0]


def gate_lines(view: RolloutView, width: int, moment: Moment) -> list[Line]:
    """Return each gate of the batch at work: its samples in order, counts, what comes next, and why not passed."""
    state = view.state
    live = {count.gate: count for count in state.analysis.gates} if state.analysis is not None else {}
    lines: list[Line] = []
    for number, gate in enumerate(view.settings.rollout.gates):
        if not gate.rule.applies_to(state.batch):
            continue
        look, count = view.looks.get(number), live.get(number)
        if count is not None and (look is None or state.analysis is None or look.analysis != state.analysis.number):
            look = Look(state.analysis.number) if state.analysis is not None else None
        lines.append(_gate_line(number, str(gate), gate.count, look, count, view, width, moment))
        if look is not None and look.reason:
            lines.append(choose([[(f"     last not passed: {look.reason}", "warning")]], width, moment.glyphs))
    return lines


def _gate_line(
    number: int, what: str, of: int, look: Look | None, count: GateCount | None, view: RolloutView, width: int,
    moment: Moment,
) -> Line:  # fmt: skip
    name: list[Piece] = [(f" {number + 1} ", "strong"), (f"{what}  ", "text")]
    if look is None:
        return choose([[*name, ("○ not looked at yet", "muted")]], width, moment.glyphs)
    counts = Counter(look.verdicts)
    figures: list[Piece] = [
        (f"{VERDICTS[word][0]} {counts[word]} {said}  ", VERDICTS[word][1] if counts[word] else "faint")
        for word, said in (("pass", "passed"), ("fail", "failed"), ("inconclusive", "inconclusive"))
    ]
    short: list[Piece] = [
        (f"{VERDICTS[word][0]}{counts[word]} ", VERDICTS[word][1] if counts[word] else "faint") for word in VERDICTS
    ]
    dots: list[Piece] = [VERDICTS.get(one, ("?", "unknown")) for one in look.verdicts[-SAMPLES_SHOWN:]]
    ahead = min(SAMPLES_SHOWN - len(dots), of - len(look.verdicts)) if count is not None and not count.verdict else 0
    dots.append(("·" * max(0, ahead) + "  ", "faint"))
    next_one: Piece = (_what_next(look, of, count, view, moment), "muted")
    what_short: list[Piece] = [(f" {number + 1} ", "strong"), (f"{what.partition(',')[0]}  ", "text")]
    return choose(
        [
            [*name, *dots, *figures, next_one],
            [*what_short, *dots, *figures, next_one],
            [*what_short, *dots, *short, next_one],
            [*what_short, *short, next_one],
            [*name[:1], *short, next_one],
        ],
        width,
        moment.glyphs,
    )


def _what_next(look: Look, of: int, count: GateCount | None, view: RolloutView, moment: Moment) -> str:
    if count is None:
        return f"analysis {look.analysis}, over"
    if count.verdict is not None:
        return {Verdict.PASS: "passed", Verdict.FAIL: "failed"}.get(count.verdict, "too little was measured")
    sample = f"sample {count.taken + 1} of {of}"
    if count.is_asked:
        return f"{sample} is being taken"
    wait_s = count.due_s - view.now_s(moment.wall_ns)
    return f"{sample} in {wait_s:.0f} s" if wait_s > 0.5 else f"{sample} is due"


def node_lines(name: str | None, verbs: frozenset[str], scene: Scene, width: int, moment: Moment) -> list[Line]:
    """Return what there is to say of the selected node, to which ``verbs`` can be done: where it stands, and why."""
    row = scene.view.state.node(name) if name is not None else None
    if row is None:
        return []
    word = scene.view.state.word(row)
    sign, role = SIGNS[word]
    words = node_words(row, scene, moment)[0] if not row.state.is_over else [(word, role)]
    facts = [f"batch {row.batch + 1}"]
    if row.attempt:
        facts.append(f"attempt {row.attempt}")
    if row.is_out:
        facts.append("out of traffic")
    _, run = linked_run(row, scene)
    if run is not None and run.first_output_ns is not None:
        facts.append(f"first output {duration_text(run.first_output_ns)}")
    wanted = (("retry", "tries again"), ("skip", "skips it"))
    hints = _hints([one for one in wanted if one[0] in verbs], moment)
    left: list[Piece] = [(f" {sign} ", role), (f"{row.name}  ", "title"), *words, (f"  {', '.join(facts)}", "muted")]
    end: list[Piece] = [(f"{' · '.join(hints)} ", "accent")] if hints else []
    fits = width_of(cleaned([*left, *end], moment.glyphs)) < width
    first = spread(left, end if fits else [], width, moment.glyphs)
    reason = row.skip_reason or row.reason or scene.view.said.get(row.name, "")
    role = "failed" if row.state is NodeState.FAILED else "muted"
    said = [(reason, role), *((text, "unknown") for text in may_go_on(scene.view.state, row))]
    room = max(10, width - 4)
    return [first, *(((f"   {part}", role),) for text, role in said for part in wrap(text, room, REASON_LINES))]


def timeline_lines(view: RolloutView, moment: Moment) -> Iterator[Line]:
    """Yield the timeline, oldest first."""
    if view.left_out:
        yield ((f"{view.left_out} earlier lines: glowplug rollout status {view.row.name} --json", "muted"),)
    for one in view.told:
        sign = TONE_SIGNS.get(one.tone, " ")
        yield (
            (f"{clock_text(one.t_wall_ns, moment.zone)}  ", "muted"),
            (f"{sign} {one.text}", TONES[one.tone]),
        )


def summary_text(view: RolloutView) -> str:
    """Return one line for copying."""
    return f"rollout {view.row.name} {view.row.rollout_uid}: {view.row.phase}: {view.row.reason}"
