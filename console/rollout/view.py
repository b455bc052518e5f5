"""One rollout as a screen shows it: plain, made of what the history has, brought up to date read by read. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from console.rollout.advance import waiting_for
from console.rollout.commands import VERBS, event_of, judge, verb_to_go_on
from console.rollout.machine import step
from console.rollout.saved import Settings, read_settings, read_state
from console.rollout.states import RolloutState
from console.rollout.words import line
from db.rollout_records import RolloutRecord, RolloutRow, TimelineRow
from db.rollout_store import lease_of

LINES_KEPT, LINES_DROPPED = 1000, 250
"""The newest lines of a timeline; older ones go many at a time, so that those that stay keep their place."""

SAMPLES_KEPT = 100
HOOK_LINES = 5
NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class Told:
    """A line of the timeline. ``tone``: ``asked failed odd step said``, what kind of line it is."""

    t_wall_ns: int
    text: str
    tone: str


@dataclass(frozen=True)
class Look:
    """The samples of one gate in its newest analysis, oldest first; ``reason``: of the last that did not pass."""

    analysis: int
    verdicts: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class RolloutView:
    """A rollout as it was read. ``holder``: who has its lease, None for nobody; ``is_here``: this console has it.

    ``warm_ns``: by node, what its newest warm-up took. ``looks``: by gate. ``left_out``: lines older than ``told``.
    ``possible``: the verbs that would do something now; those on a node are asked of `node_verbs`. ``waits``: what it
    waits for. ``said``: by node, the last line of the hook that this console runs for it now.
    """

    row: RolloutRow
    settings: Settings
    state: RolloutState
    holder: str | None
    is_here: bool
    told: tuple[Told, ...] = ()
    left_out: int = 0
    last_entry: int = 0
    warm_ns: Mapping[str, int] = field(default_factory=dict)
    looks: Mapping[int, Look] = field(default_factory=dict)
    possible: frozenset[str] = frozenset()
    waits: tuple[str, ...] = ()
    said: Mapping[str, str] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        return 1 + max((node.batch for node in self.state.nodes), default=0)

    def now_s(self, wall_ns: int) -> float:
        """Return the machine's time; it stands still while nobody carries the rollout out."""
        if self.holder is None or self.state.phase.is_over:
            return self.state.now_s
        return self.state.now_s + max(0.0, (wall_ns - self.row.updated_ns) / NS_PER_S)

    def node_verbs(self, name: str) -> frozenset[str]:
        """Return which of ``retry`` and ``skip`` would do something to that node."""
        asked = [("retry", {"node": name}), ("skip", {"node": name, "reason": "?"})]
        return frozenset(verb for verb, arguments in asked if _would(self.state, verb, arguments))


def up_to_date(before: RolloutView | None, record: RolloutRecord, holder: str, now_ns: int) -> RolloutView:
    """Return ``before`` with what was read after its ``last_entry``; ``holder`` is this process's name.

    Raises: ValueError for a state or settings that this version can't read.
    """
    row = record.row
    same = before is not None and before.row.rollout_uid == row.rollout_uid
    if not same or before is None:
        settings, state = read_settings(row.settings_json), read_state(row.state_json)
        before = RolloutView(row, settings, state, None, False)
    else:
        state = before.state if before.row.state_json == row.state_json else read_state(row.state_json)
    lease = lease_of(row, now_ns)
    now_held = lease.holder if lease is not None else None
    has_changed = not same or state is not before.state or (now_held is None) != (before.holder is None)
    told = [*before.told, *(one for entry in record.timeline for one in _told(entry))]
    dropped = max(0, -(-(len(told) - LINES_KEPT) // LINES_DROPPED)) * LINES_DROPPED
    warm_ns, looks = dict(before.warm_ns), dict(before.looks)
    for entry in record.timeline:
        _note(entry, warm_ns, looks)
    return replace(
        before,
        row=row,
        state=state,
        holder=now_held,
        is_here=now_held == holder,
        told=tuple(told[dropped:]) if record.timeline else before.told,
        left_out=before.left_out + dropped if record.timeline else before.left_out,
        last_entry=record.timeline[-1].entry_id if record.timeline else before.last_entry,
        warm_ns=warm_ns,
        looks=looks,
        possible=_possible(state, now_held) if has_changed else before.possible,
        waits=waiting_for(state) if has_changed else before.waits,
    )


def _possible(state: RolloutState, holder: str | None) -> frozenset[str]:
    if state.phase.is_over:
        return frozenset()
    verbs = {verb for verb in VERBS if verb not in ("retry", "skip") and _would(state, verb, {})}
    if _would(state, "promote", {"everything": True}) and not state.promoted_all:
        verbs.add("promote_all")
    # Where there is no controller this console becomes it, whatever the state as it was left says.
    return frozenset(verbs if holder is not None else {*verbs, verb_to_go_on(state.phase)})


def _would(state: RolloutState, verb: str, arguments: Mapping[str, object]) -> bool:
    """Whether the machine would do it; pausing what is paused does nothing."""
    event = event_of(verb, arguments, "")
    if event is None or (verb == "pause" and state.phase.value != "running"):
        return False
    return judge(event, state, step(state, event)[0])[0]


def _told(entry: TimelineRow) -> Iterator[Told]:
    """Yield an entry's line, and under a hook that failed the end of what it printed."""
    data = _data(entry)
    text = line(entry)
    if text:
        yield Told(entry.t_wall_ns, text, _tone(entry, data))
    if entry.kind == "outcome" and data.get("code"):
        output = data.get("output")
        said = output if isinstance(output, Sequence) and not isinstance(output, str) else ()
        yield from (Told(entry.t_wall_ns, f"  {text}", "step") for text in map(str, said[-HOOK_LINES:]))


def _tone(entry: TimelineRow, data: Mapping[str, Any]) -> str:
    if entry.kind == "command":
        return "asked"
    if entry.kind == "controller":
        return "failed" if data.get("aborted") else "odd" if entry.what == "Paused" else "said"
    if data.get("state") == "failed" or data.get("succeeded") is False or data.get("verdict") == "fail":
        return "failed"
    if data.get("state") == "unknown" or data.get("verdict") == "inconclusive" or data.get("is_down"):
        return "odd"
    return "step" if entry.kind == "intent" else "said"


def _note(entry: TimelineRow, warm_ns: dict[str, int], looks: dict[int, Look]) -> None:
    """Keep what the newest warm-up of a node took, and the samples of each gate's newest analysis."""
    data = _data(entry)
    if entry.kind == "outcome" and entry.node and isinstance(wall_ns := data.get("wall_ns"), int):
        warm_ns[entry.node] = wall_ns
    gate, analysis = data.get("gate"), data.get("analysis")
    if entry.what == "GateSampled" and isinstance(gate, int) and isinstance(analysis, int):
        look = looks.get(gate)
        if look is None or look.analysis != analysis:
            look = Look(analysis)
        verdict = str(data.get("verdict"))
        reason = look.reason if verdict == "pass" else str(data.get("reason", ""))
        looks[gate] = replace(look, verdicts=(*look.verdicts, verdict)[-SAMPLES_KEPT:], reason=reason)


def _data(entry: TimelineRow) -> Mapping[str, Any]:
    try:
        data = json.loads(entry.data_json)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
