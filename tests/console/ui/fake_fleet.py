"""A fleet that is only its states: implements `FleetPort`, records what it is asked to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from console.errors import GlowplugError
from console.state import NodeState
from db.records import Baseline, EventRow, RunFilter, RunRow, StageRow
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import Recipe, RunState, StageChanged
from tests.console.ui import scenes
from tests.console.ui.scenes import ACTOR, HASH, MS, NOW_WALL_NS, TIMES_MS, UUID, S


@dataclass
class FakeConfig:
    recipes: Mapping[str, Recipe]


class FakeHistory:
    """Keeps rows in memory, answers as `db.queries.History` does."""

    def __init__(self, rows: Iterable[tuple[RunRow, tuple[StageRow, ...]]] = ()) -> None:
        self.rows = sorted(rows, key=lambda row: -row[0].started_ns)

    def runs(self, wanted: RunFilter | None = None) -> tuple[RunRow, ...]:
        wanted = wanted or RunFilter()
        fits = [
            run
            for run, _ in self.rows
            if wanted.node in (None, run.node)
            and wanted.recipe in (None, run.recipe)
            and wanted.state in (None, run.state)
            and (wanted.since_ns is None or run.started_ns >= wanted.since_ns)
            and (wanted.before_ns is None or run.started_ns < wanted.before_ns)
        ]
        return tuple(fits[: wanted.limit])

    def run(self, run_uid: str) -> tuple[RunRow, tuple[StageRow, ...]] | None:
        return next((row for row in self.rows if row[0].run_uid == run_uid), None)

    def previous_run(self, run_uid: str) -> tuple[RunRow, tuple[StageRow, ...]] | None:
        this = self.run(run_uid)
        if this is None:
            return None
        return next(
            (
                row
                for row in self.rows
                if row[0].node == this[0].node
                and row[0].started_ns < this[0].started_ns
                and row[0].state == "ready"
                and (row[0].tier_to == "armed") is (this[0].tier_to == "armed")
            ),
            None,
        )

    def events(self, run_uid: str) -> tuple[EventRow, ...]:
        found = self.run(run_uid)
        if found is None:
            return ()
        records = scenes.stages() if found[0].wall_ns else scenes.stages("context")
        return tuple(
            EventRow(
                "journal-1",
                index + 1,
                found[0].node,
                run_uid,
                0,
                found[0].started_ns + (record.start_ns or 0),
                "run.stage",
                json.dumps(encode(StageChanged(record))),
            )
            for index, record in enumerate(records)
        )

    def count(self) -> int:
        return len(self.rows)

    def baseline(
        self,
        node: str,
        recipe_hash: str,
        tier_from: str,
        count: int = 20,
        before: str | None = None,
        armed: bool = False,
    ) -> Baseline | None:
        limit = self.run(before)[0].started_ns if before else 2**63 - 1  # type: ignore[index]
        walls = sorted(
            run.wall_ns
            for run, _ in self.rows
            if run.node == node
            and run.state == "ready"
            and run.wall_ns
            and run.started_ns < limit
            and (run.tier_to == "armed") is armed
        )
        return Baseline(len(walls), walls[len(walls) // 2], {}) if walls else None


UNFINISHED: dict[str, object] = {"wall_ns": None, "tier_to": None, "output": None, "first_output_ns": None}


def run_row(uid: str, node: str, age_s: int, wall_ms: int = 1_130, **changes: object) -> RunRow:
    row = RunRow(
        run_uid=uid,
        node=node,
        recipe="llama-7b",
        recipe_hash=HASH,
        model="/models/llama-2-7b",
        actor_user=ACTOR.user,
        actor_host=ACTOR.host,
        state="ready",
        tier_from="cached",
        tier_to="standby",
        started_ns=NOW_WALL_NS - age_s * S,
        devices=(UUID.format(0),),
        wall_ns=wall_ms * MS,
        unattributed_ns=20 * MS,
        first_output_ns=360 * MS,
        output="The",
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def stage_rows(slower: str | None = None) -> tuple[StageRow, ...]:
    """Return the stages of a finished run, one of them three times as long on request."""
    rows = []
    for ordinal, (name, (start, length)) in enumerate(TIMES_MS.items()):
        length_ns = length * MS * (3 if name == slower else 1)
        moved = {"bytes": scenes.WEIGHTS_BYTES, "rate_bytes_s": 46.4e9, "ceiling_bytes_s": 55.3e9, "path": "staged"}
        rows.append(
            StageRow(
                ordinal,
                name,
                "done",
                start * MS,
                length_ns,
                length_ns,
                **(moved if name == "weights" else {}),  # type: ignore[arg-type]
            )
        )
    return tuple(rows)


def history_rows() -> list[tuple[RunRow, tuple[StageRow, ...]]]:
    """A morning's runs: most as usual, one slower, one failed, one cancelled."""
    rows = [
        (run_row("7f3a12cd0001", "gpu-eu-01", 1), stage_rows()),
        (
            run_row(
                "7f3a12cd0002",
                "gpu-eu-02",
                1,
                state="running",
                wall_ns=None,
                tier_to=None,
                output=None,
                first_output_ns=None,
            ),
            (),
        ),
    ]
    for index in range(24):
        uid = f"aa{index:02d}00000000"
        row = run_row(uid, f"gpu-eu-{index % 5 + 1:02d}", 600 + index * 333, 1_100 + index * 7 % 60)
        rows.append((row, stage_rows("weights" if index == 7 else None)))
    slow = run_row("bb0000000001", "gpu-eu-05", 300, 4_390)
    broken = run_row(
        "bb0000000002",
        "gpu-eu-03",
        400,
        716,
        state="failed",
        tier_to=None,
        output=None,
        first_output_ns=None,
        failure_code="kernel_image",
        failure_stage="compile",
        failure_detail="no kernel image for sm_90: torch 2.1 is built for sm_80",
    )
    return [*rows, (slow, stage_rows("weights")), (broken, stage_rows())]


@dataclass
class Asked:
    """One thing the fleet was asked to do."""

    what: str
    node: str
    run_uid: str | None = None
    recipe: str | None = None


class FakeFleet:
    """States are what `put` last said. `refuse` maps node names to the error that their answer is."""

    def __init__(self, states: Iterable[NodeState] = (), history: FakeHistory | None = None) -> None:
        self._states = {state.name: state for state in states}
        self._order = tuple(self._states)
        self._dirty = set(self._order)
        self.history = history or FakeHistory(history_rows())
        self.config = FakeConfig(scenes.RECIPES)
        self.notices: tuple[str, ...] = ()
        self.parallel = 8
        self.asked: list[Asked] = []
        self.refuse: dict[str, GlowplugError] = {}
        self.is_open = False

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._order

    def state(self, name: str) -> NodeState:
        return self._states[name]

    def put(self, state: NodeState) -> None:
        self._states[state.name] = state
        self._order = (*self._order, state.name) if state.name not in self._order else self._order
        self._dirty.add(state.name)

    def reorder(self, names: Iterable[str]) -> None:
        self._order = tuple(names)
        self._dirty |= set(self._order)

    def take_dirty(self) -> set[str]:
        dirty, self._dirty = self._dirty, set()
        return dirty

    def retry_now(self, node: str) -> None:
        self.asked.append(Asked("retry", node))

    async def start(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def warm(self, node: str, recipe_name: str, *, run_uid: str | None = None) -> str:
        await self._answer(Asked("warm", node, run_uid, recipe_name))
        assert run_uid is not None
        self.put(scenes.node(node, scenes.run(run_uid, RunState.QUEUED, elapsed_ms=0, recipe=recipe_name)))
        return run_uid

    async def cancel(self, node: str, run_uid: str) -> None:
        await self._answer(Asked("cancel", node, run_uid))

    async def release(self, node: str, run_uid: str | None = None) -> None:
        await self._answer(Asked("release", node, run_uid))

    async def park(self, node: str, run_uid: str) -> None:
        await self._answer(Asked("park", node, run_uid))

    async def unpark(self, node: str, run_uid: str) -> None:
        await self._answer(Asked("unpark", node, run_uid))

    async def probe(self, node: str) -> None:
        await self._answer(Asked("probe", node))

    async def _answer(self, asked: Asked) -> None:
        await asyncio.sleep(0)
        self.asked.append(asked)
        if asked.node in self.refuse:
            raise self.refuse[asked.node]
