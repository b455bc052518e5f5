"""What must hold after every round, by the journals of the hosts, the log of the hooks, and the operator's history."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from console.config import load
from console.fleet import Fleet
from console.links import real_links
from console.locations import locations
from console.rollout.saved import run_uid
from console.transports.gate import Gate
from db import rollouts
from db.queries import History
from remote_agent.protocol.messages import Actor, Event, RunFinished, RunState
from tests.console.fake_host import eventually
from tests.faults.truth import replay, rows, stored
from tests.faults.world import NODES, World


@dataclass
class Checked:
    """What a round was made of. ``ended``: runs by how they ended; the last three: hooks that came to their end."""

    events: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    drained: int = 0
    shifted: int = 0
    backed_out: int = 0


def check_round(world: World, rollout: str | None) -> Checked:
    """Let a console hear the rest, then compare. Raises: AssertionError with what does not hold."""
    asyncio.run(_listen(world))
    checked, finished = Checked(), list[Event]()
    for node in NODES:
        told = _check_journal(world, node)
        checked.events += len(told)
        finished += [event for event in told if isinstance(event.data, RunFinished)]
    checked.ended = dict(
        Counter(event.data.run.state.value for event in finished if isinstance(event.data, RunFinished))
    )
    _check_runs(world)
    if rollout is not None:
        _check_rollout(world, rollout, finished, checked)
    return checked


async def _listen(world: World) -> None:
    """Follow all nodes until the history has what their journals have, and nothing runs."""
    links = real_links(Gate.create(locations(os.environ), os.environ))
    async with Fleet(load(world.config), world.history, actor=Actor("ada", "desk"), links=links) as fleet:
        for node in NODES:
            await fleet.status(node)
            await eventually(lambda node=node: not _unfinished(fleet, node))  # type: ignore[misc]
        for node in NODES:
            journal_uuid, told = await asyncio.to_thread(replay, world.state(node), world.seen_seq[node])
            last = told[-1][0].seq if told else 0
            await eventually(lambda uuid=journal_uuid, last=last: fleet.history.cursor(uuid) >= last)  # type: ignore[misc]


def _unfinished(fleet: Fleet, node: str) -> list[str]:
    return [uid for uid, run in fleet.state(node).runs.items() if run.is_accepted and not run.state.is_terminal]


def _check_journal(world: World, node: str) -> list[Event]:
    """No event is lost or doubled: the history is the journal, event for event. Return those since the last round."""
    journal_uuid, told = replay(world.state(node), world.seen_seq[node])
    kept, gaps = stored(world.history, journal_uuid)
    assert gaps == 0, f"{node}: {gaps} gaps in the history"
    assert [row[0] for row in kept] == list(range(1, len(kept) + 1)), f"{node}: its events are not contiguous"
    since = kept[world.seen_seq[node] :]
    wanted = rows(told)
    assert since[: len(wanted)] == wanted, f"{node}: {len(wanted)} events in the journal, {len(since)} in the history"
    world.seen_seq[node] += len(wanted)
    return [event for event, _ in told]


def _check_runs(world: World) -> None:
    """Each run was accepted once and has ended once, and its stages sum to its wall time."""
    with closing(sqlite3.connect(f"file:{world.history}?mode=ro", uri=True)) as connection:
        journals = connection.execute("SELECT DISTINCT node_id, journal_uuid FROM events").fetchall()
        assert len(journals) == len(NODES), f"a journal was begun anew: {journals}"
        found = connection.execute(
            "SELECT run_uid, state, wall_ns, unattributed_ns, (SELECT sum(attributed_ns) FROM stages"
            " WHERE stages.run_id = runs.run_id), (SELECT count(*) FROM events WHERE events.run_id = runs.run_id AND"
            " kind = 'run.accepted'), (SELECT count(*) FROM events WHERE events.run_id = runs.run_id AND"
            " kind = 'run.finished') FROM runs"
        ).fetchall()
    for uid, state, wall_ns, unattributed_ns, attributed_ns, accepted, finished in found:
        assert (accepted, finished) == (1, 1), f"run {uid} ({state}): accepted {accepted}, finished {finished} times"
        parts_ns = (attributed_ns or 0) + (unattributed_ns or 0)
        assert parts_ns == wall_ns, f"run {uid} ({state}): its parts are {parts_ns} ns of {wall_ns}"


def _check_rollout(world: World, name: str, finished: list[Event], checked: Checked) -> None:
    with History(world.history) as history:
        record = rollouts.read(history, name)
    hooked = world.hooked()
    if record is None:
        return
    ready_ns = {
        event.data.run.run_uid: event.t_wall_ns
        for event in finished
        if isinstance(event.data, RunFinished) and event.data.run.state is RunState.READY
    }
    for one in hooked:
        if one.phase == "shift":
            uid = run_uid(record.row.rollout_uid, one.node, one.attempt)
            is_ready = uid in ready_ns and ready_ns[uid] <= one.t_wall_ns
            assert is_ready, f"{one.node}, attempt {one.attempt}, was shifted and was not ready"
    out = drained(world)
    assert not out, f"drained, and the rollout is {record.row.phase}: {out}"
    for row in record.nodes:
        ends = [one for one in hooked if (one.node, one.moment) == (row.node, "done") and one.phase != "before_shift"]
        is_shifted = bool(ends) and ends[-1].phase == "shift"
        assert (row.state == "ready") == is_shifted, f"{row.node} is {row.state}, its last hooks: {ends}"
        assert not row.is_out, f"{row.node} is out of traffic, and the rollout is {record.row.phase}"
    count = Counter(one.phase for one in hooked if one.moment == "done")
    checked.drained, checked.shifted, checked.backed_out = (
        count["before_shift"], count["shift"], count["on_abort"],
    )  # fmt: skip


def drained(world: World) -> set[str]:
    """Return the nodes that a hook took out of their traffic, or began to, and none has brought back since."""
    out: set[str] = set()
    for one in world.hooked():
        if one.phase == "before_shift":
            out.add(one.node)
        elif one.moment == "done":
            out.discard(one.node)
    return out


def named_as_out(status: Path) -> set[str]:
    """Return the nodes that the document of ``glowplug rollout status`` says are out of traffic."""
    return {row["node"] for row in json.loads(status.read_text())["nodes"] if row["out_of_traffic"]}
