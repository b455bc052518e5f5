"""Rollouts as the history has them, at the frozen moment of `scenes`; what reads them is the real thing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from console.rollout.saved import Settings, run_uid, settings_json, state_json
from console.rollout.settings import Gate, Hook, Hooks, Rollout
from console.rollout.states import (
    Analysis,
    BackOut,
    GateCount,
    NodeRow,
    NodeState,
    Phase,
    RolloutState,
)
from console.rollout.view import RolloutView, up_to_date
from console.state import NodeState as FleetNode
from db.rollout_records import Lease, RolloutRecord, RolloutRow, TimelineRow
from tests.console.ui import scenes
from tests.console.ui.scenes import LLAMA, MS, NOW_WALL_NS, S

UID = "5eed0000000040008000000000000001"
HERE, ELSEWHERE = "laptop:77:ab12", "build-7:4711:cd34"
GATES = (
    Gate(measure="first_output", limit_s=0.5, count=5, interval_s=2.0, failure_limit=1),
    Gate(tier="standby"),
)
HOOK = Hook(("hook",))
ROLLOUT = Rollout(
    "eu-llama", "tag:eu", "llama-7b", canary=1, serial=("25%", "100%"), max_unavailable=3, max_failures=3,
    pause_after=(1,), gates=GATES, hooks=Hooks(before_shift=HOOK, shift=HOOK, on_abort=HOOK),
)  # fmt: skip
N = NodeState
NODES = (
    NodeRow("gpu-eu-01", 0, N.READY, attempt=1, is_verified=True),
    NodeRow("gpu-eu-02", 1, N.WARMING, attempt=1, tries=1, since_s=40.0, is_out=True),
    NodeRow("gpu-eu-03", 1, N.FAILED, "compile: no kernel image for sm_90: torch 2.1 is built for sm_80", attempt=2,
            has_failed=True, is_out=True, back_out=BackOut.ASKED),
    NodeRow("gpu-eu-04", 1, N.VERIFYING, attempt=1, tries=1, since_s=44.0, is_out=True),
    NodeRow("gpu-eu-05", 2),
    NodeRow("gpu-eu-06", 2, N.SKIPPED, skip_reason="its disk is being replaced"),
    NodeRow("gpu-eu-07", 2, is_down=True),
    NodeRow("gpu-eu-08", 2, attempt=1, tries=1, due_s=58.0, reason="out of memory"),
)  # fmt: skip
ANALYSIS = Analysis(2, ("gpu-eu-04",), (GateCount(0, 2, 1, streak=1, due_s=51.4), GateCount(1, is_asked=True)))


def row(state: RolloutState, holder: str | None = HERE, **changes: object) -> RolloutRow:
    """Return a rollout's row, begun a minute ago and written a second ago."""
    ends_ns = NOW_WALL_NS - S if state.phase.is_over else None
    made = RolloutRow(
        rollout_uid=UID,
        name=ROLLOUT.name,
        recipe=ROLLOUT.recipe,
        actor_user="anna",
        actor_host="laptop",
        settings_json=settings_json(Settings(ROLLOUT, LLAMA)),
        state_json=state_json(state),
        phase=state.phase.value,
        reason=state.reason,
        created_ns=NOW_WALL_NS - 61 * S,
        updated_ns=NOW_WALL_NS - S,
        finished_ns=ends_ns,
        lease=None if holder is None else Lease(holder, NOW_WALL_NS + 9 * S),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def state(nodes: Sequence[NodeRow] = NODES, phase: Phase = Phase.RUNNING, **changes: object) -> RolloutState:
    rules = ROLLOUT.rules(len(nodes))
    made = RolloutState(rules, tuple(nodes), phase, batch=1, analysis=ANALYSIS, analyses=2, now_s=50.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def told(kind: str, what: str, node: str | None = None, age_s: float = 0.0, **data: object) -> TimelineRow:
    t_ns = NOW_WALL_NS - round(age_s * S)
    return TimelineRow(0, t_ns, kind, what, node, 1 if node else None, None, json.dumps(data))


SLOW = "gpu-eu-04 took 0.61 s, over 0.5 s"
TIMELINE = (
    told("event", "Begin", age_s=61),
    told("intent", "StartNode", "gpu-eu-01", 61, steps=["before_shift", "warm"]),
    told("outcome", "StartNode", "gpu-eu-01", 40, run_uid="x", wall_ns=20_430 * MS),
    told("event", "GateSampled", age_s=38, analysis=1, gate=0, verdict="pass"),
    told("controller", "Paused", age_s=30, reason="after batch 1"),
    told("command", "resume", age_s=21, by="anna@laptop", answer="it goes on"),
    told("event", "NodeReached", "gpu-eu-02", 10, state="warming"),
    told("outcome", "StartNode", "gpu-eu-04", 8, run_uid="x", wall_ns=14_210 * MS),
    told("event", "NodeReached", "gpu-eu-03", 7, state="failed", reason="compile: no kernel image for sm_90"),
    told("outcome", "RunHook", "gpu-eu-03", 7, code=1, output=["backend eu/gpu-eu-03: no such server"]),
    told("event", "GateSampled", age_s=6, analysis=2, gate=0, verdict="pass"),
    told("event", "GateSampled", age_s=4, analysis=2, gate=0, verdict="fail", reason=SLOW),
    told("event", "GateSampled", age_s=2, analysis=2, gate=0, verdict="pass"),
)  # fmt: skip


def view(
    of: RolloutState | None = None,
    holder: str | None = HERE,
    timeline: Sequence[TimelineRow] = TIMELINE,
    before: RolloutView | None = None,
    **changes: object,
) -> RolloutView:
    """Return a rollout as this console, `HERE`, reads it now."""
    numbered = tuple(replace(entry, entry_id=number) for number, entry in enumerate(timeline, 1))
    record = RolloutRecord(row(of or state(), holder, **changes), (), numbered)
    return up_to_date(before, record, HERE, NOW_WALL_NS)


def paused() -> RolloutView:
    """One that waits for its operator after the canary; another console carries it out."""
    nodes = (NODES[0], *(NodeRow(node.name, node.batch) for node in NODES[1:]))
    return view(state(nodes, Phase.PAUSED, reason="after batch 1", batch=0, analysis=None), ELSEWHERE, TIMELINE[:5])


def long(count: int = 300) -> RolloutState:
    """A large one in the middle of its second batch: 60 ready, 12 under way, a failure, the rest ahead."""
    nodes = [NodeRow("gpu-eu-001", 0, N.READY, attempt=1)]
    for number in range(2, count + 1):
        name, batch = f"gpu-eu-{number:03}", 1 if number <= count // 2 else 2
        if number <= 60:
            nodes.append(NodeRow(name, batch, N.READY, attempt=1))
        elif number <= 72:
            nodes.append(NodeRow(name, batch, N.WARMING, attempt=1, since_s=30.0 + number / 7, is_out=True))
        elif number == 73:
            nodes.append(NodeRow(name, batch, N.FAILED, "out of memory", attempt=3, has_failed=True))
        else:
            nodes.append(NodeRow(name, batch))
    return state(nodes, analysis=None)


def long_timeline(count: int = 300) -> tuple[TimelineRow, ...]:
    """What a rollout of so many nodes has told by its end: some ten entries a node."""
    entries = []
    for number in range(1, count + 1):
        name = f"gpu-eu-{number:03}"
        entries += [told("intent", "StartNode", name, steps=["before_shift", "warm"])]
        entries += [
            told("event", "NodeReached", name, state="warming"),
            told("event", "NodeReached", name, state="verifying"),
        ]
        entries += [told("outcome", "StartNode", name, wall_ns=20_000 * MS + number * MS)]
        entries += [
            told("intent", "RunHook", name, hook="shift"),
            told("event", "HookEnded", name, hook="shift", succeeded=True),
        ]
        entries += [told("outcome", "RunHook", name, code=0)] * 4
    return tuple(entries)


def hostile(payload: str) -> RolloutView:
    """Return one in which all that hosts, hooks and operators wrote is ``payload``; names of nodes are checked."""
    nodes = [replace(node, reason=payload, skip_reason=node.skip_reason and payload) for node in NODES]
    entries = (
        told("event", "NodeReached", nodes[2].name, state="failed", reason=payload),
        told("outcome", "RunHook", nodes[2].name, code=1, output=[payload, payload]),
        told("event", "GateSampled", analysis=2, gate=0, verdict="fail", reason=payload),
        told("command", payload, by=payload, answer=payload),
    )
    made = state(nodes, reason=payload)
    read = view(made, payload, entries, name=payload, reason=payload)
    return replace(read, said={node.name: payload for node in nodes})


def fleet() -> tuple[FleetNode, ...]:
    """The nodes of `NODES`, of which the warming one has the run of its attempt."""
    loading = scenes.loading("gpu-eu-02", run_uid(UID, "gpu-eu-02", 1))
    others = (scenes.cold(node.name) for node in NODES if node.name != loading.name)
    return tuple(sorted((loading, *others), key=lambda one: one.name))
