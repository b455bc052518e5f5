"""Consoles that die, come back, and share a daemon: every event once, whatever they had seen."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from console.config import load
from console.demo import RECIPE, EmbeddedFleet
from console.fleet import Fleet
from console.links import real_links
from console.transports.gate import Gate
from db.queries import History
from remote_agent.protocol.messages import Actor, RunState, Tier
from tests.console.fake_host import eventually
from tests.end_to_end.consoles import SLOW, Console, document

pytestmark = pytest.mark.timeout(240)
NODE = "demo-1"


@asynccontextmanager
async def following(demo: EmbeddedFleet, config: Path, history: Path) -> AsyncIterator[Fleet]:
    links = real_links(Gate.create(demo.locations, {"HOME": str(demo.directory)}))
    async with Fleet(load(config), history, actor=Actor("grace", "console"), links=links) as fleet:
        yield fleet


async def test_a_console_killed_in_the_middle_of_a_run_misses_nothing(
    node: EmbeddedFleet, config: Path, tmp_path: Path
) -> None:
    """SIGKILL, then a new console: the run went on, is followed to its end, and each event is stored once."""
    path = tmp_path / "history.db"
    killed = Console("--config", str(config), "--history", str(path), "warm", SLOW[0], NODE)
    killed.until_said("assign done")
    killed.signal(signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    with History(path) as history:
        running = [run for run in history.runs() if run.state == "running"]
        assert running, "the console was killed after the run, not in the middle of it"
        (run,) = running
        seen = len(history.events(run.run_uid))

    async with following(node, config, path) as fleet:
        await eventually(lambda: run.run_uid in fleet.state(NODE).runs)
        ended = await fleet.wait(NODE, run.run_uid, timeout_s=120)
        assert await fleet.flush()
        events = fleet.history.events(run.run_uid)
        stored = fleet.history.run(run.run_uid)
        whole = await everything(node, config, tmp_path / "fresh.db", run.run_uid)

    assert ended.state is RunState.READY
    assert sum(one.attributed_ns or 0 for one in ended.stages) + (ended.unattributed_ns or 0) == ended.wall_ns
    assert [(one.seq, one.kind, json.loads(one.data_json)) for one in events] == whole
    assert 0 < seen < len(events)
    assert [one.kind for one in events].count("run.accepted") == [one.kind for one in events].count("run.finished") == 1
    assert stored is not None
    assert (stored[0].state, stored[0].wall_ns) == ("ready", ended.wall_ns)


async def everything(
    node: EmbeddedFleet, config: Path, path: Path, run_uid: str
) -> list[tuple[int, str, dict[str, object]]]:
    """What a console hears that has never heard anything: the journal from its start."""
    async with following(node, config, path) as fleet:
        await eventually(lambda: (hello := fleet.state(NODE).hello) and fleet.state(NODE).seq >= hello.newest_seq)
        assert await fleet.flush()
        return [(one.seq, one.kind, json.loads(one.data_json)) for one in fleet.history.events(run_uid)]


async def test_two_consoles_follow_one_daemon_each_from_its_own_cursor(
    node: EmbeddedFleet, config: Path, tmp_path: Path
) -> None:
    """One comes back to where it was, one is new; both see the run of the other live, and store the same."""
    async with following(node, config, tmp_path / "one.db") as one:
        first = await one.warm(NODE, RECIPE)
        assert (await one.wait(NODE, first, timeout_s=120)).state is RunState.READY
        assert await one.flush()
        journal = one.state(NODE).journal_uuid or ""
        left_at = one.history.cursor(journal)

    async with following(node, config, tmp_path / "other.db") as other:
        await eventually(lambda: first in other.state(NODE).runs)
        again = await other.warm(NODE, RECIPE)
        run = await other.wait(NODE, again, timeout_s=120)
        assert (run.state, run.tier_from) == (RunState.READY, Tier.STANDBY), "the standby serves it again"
        assert "reused" in {stage.status.value for stage in run.stages}

        async with following(node, config, tmp_path / "one.db") as one:
            assert one.history.cursor(journal) == left_at > 0
            live = await other.warm(NODE, RECIPE)
            await other.wait(NODE, live, timeout_s=120)
            assert (await one.wait(NODE, live, timeout_s=120)).state is RunState.READY
            last = max(one.state(NODE).seq, other.state(NODE).seq)
            await eventually(lambda: one.state(NODE).seq >= last and other.state(NODE).seq >= last)
            assert await one.flush()
            assert await other.flush()
            for uid in (first, again, live):
                mine, theirs = one.history.events(uid), other.history.events(uid)
                assert [event.seq for event in mine] == [event.seq for event in theirs]
                assert [event.data_json for event in mine] == [event.data_json for event in theirs]
            assert one.history.cursor(journal) == other.history.cursor(journal) >= last


def test_ctrl_c_leaves_the_run_to_its_host_and_says_how_to_end_it(
    node: EmbeddedFleet, config: Path, tmp_path: Path
) -> None:
    """Exit code 130; the command that it names cancels the run, within the agent's two seconds."""
    places = ("--config", str(config), "--history", str(tmp_path / "history.db"))
    console = Console(*places, "warm", SLOW[1], NODE)
    console.until_said("assign done")

    console.signal(signal.SIGINT)

    assert console.end() == (130, "")
    command = console.until_said("glowplug cancel").split("glowplug cancel ")[1].split()
    code, status = document(*places, "status", NODE, "--json")
    (shown,) = status["nodes"]  # type: ignore[misc]
    assert [run["status"] for run in shown["runs"]] == ["running"]

    code, content = document(*places, "cancel", *command, "--json")
    (run,) = content["runs"]  # type: ignore[misc]
    assert (code, run["status"], run["run_uid"][:8]) == (0, "cancelled", command[-1])


def test_what_is_warm_is_shown_and_released(node: EmbeddedFleet, config: Path, tmp_path: Path) -> None:
    """status lists the standby with its size, release lets it go, status shows that it is gone."""
    places = ("--config", str(config), "--history", str(tmp_path / "history.db"))
    code, content = document(*places, "warm", RECIPE, NODE, "--json")
    (run,) = content["runs"]  # type: ignore[misc]
    assert (code, run["status"]) == (0, "ready")

    code, status = document(*places, "status", "--json")
    (shown,) = status["nodes"]  # type: ignore[misc]
    held = [one for one in shown["residents"] if one["recipe"] == RECIPE]
    assert [(one["tier"], one["bytes"] >= 39_096_832) for one in held] == [("standby", True)]

    code, content = document(*places, "release", NODE, "--all", "--yes", "--json")
    assert code == 0
    assert held[0] in content["released"]  # type: ignore[operator]
    code, status = document(*places, "status", "--json")
    assert status["nodes"][0]["residents"] == []  # type: ignore[index]
