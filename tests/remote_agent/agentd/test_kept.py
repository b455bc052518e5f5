"""The table of warm models against what the keeper says, where the two do not keep step."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remote_agent.agentd.commands import Commands
from remote_agent.agentd.events import EventLog
from remote_agent.agentd.holders import Held, Holders
from remote_agent.agentd.journal import Journal
from remote_agent.agentd.keeping import KeeperLink
from remote_agent.agentd.kept import Kept
from remote_agent.agentd.paths import StateDir
from remote_agent.agentd.reaper import Reaper
from remote_agent.agentd.residents import Residents
from remote_agent.agentd.servers import Servers
from remote_agent.agentd.workers import Workers
from remote_agent.agentd.zygotes import Zygotes, ZygoteTimes
from remote_agent.keeper.client import KeeperAddress, Listed, ask
from remote_agent.protocol.internal import Manifest
from remote_agent.protocol.messages import Resident, Tier
from tests.remote_agent.keeper.keepers import put

HOUR_NS = 3_600 * 10**9


def resident(run_uid: str, since_wall_ns: int = 3, ttl_s: float | None = None) -> Resident:
    return Resident(run_uid, "tiny", "/m", "cpu", Tier.RESIDENT, 1, None, "ann", since_wall_ns, ttl_s, "tiny@cpu")


class SlowLink(KeeperLink):
    """Does ``meanwhile`` before it is known what the keeper holds; counts the manifests that are read."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)
    manifests_read = 0

    async def residents(self) -> tuple[Listed, ...]:
        found = await super().residents()
        self.meanwhile()
        return found

    async def manifest(self, name: str) -> Manifest:
        self.manifests_read += 1
        return await super().manifest(name)


@pytest.fixture
def link(state: StateDir, devices: Path) -> Iterator[SlowLink]:
    directory = state.open_run()
    yield SlowLink(state, directory, Reaper(), Commands(), 2, devices)
    os.close(directory)


@pytest.fixture
async def events(state: StateDir) -> EventLog:
    return EventLog(Journal(state.journal, "machine-one"))


async def test_what_is_put_anew_while_the_keeper_answers_is_not_missing(link: SlowLink, events: EventLog) -> None:
    """The answer may be older than a resident of the same name that a run has just left."""
    holders = Holders(events)
    kept = Kept(holders, link, lambda held: None, lambda held, reason: None)
    kept.remember(resident("run-1"))
    anew = Held(resident("run-2"))

    def drop_and_put() -> None:
        kept.lost("tiny@cpu", "lost: reload")
        holders.add(anew)

    link.meanwhile = drop_and_put
    await kept.compare()

    assert list(holders) == [anew]
    events.close()


async def test_what_cannot_be_read_is_read_once(
    link: SlowLink, events: EventLog, address: KeeperAddress, caplog: pytest.LogCaptureFixture
) -> None:
    """Its manifest may be large, and the keeper is asked every second; dropped and put anew it is looked at again."""
    kept = Kept(Holders(events), link, lambda held: None, lambda held, reason: None)
    for _ in range(2):
        put(address, "garbage", b"no manifest", b"weights")
        for _ in range(3):
            await kept.compare()
        ask(address, "drop garbage")
        await kept.compare()

    assert link.manifests_read == 2
    assert caplog.text.count("the keeper's resident garbage can't be told") == 2
    events.close()


async def test_a_clock_that_was_put_back_prolongs_no_life(link: SlowLink, events: EventLog, state: StateDir) -> None:
    """A resident of the future has its time to live and no more."""
    reaper, commands = Reaper(), Commands()
    workers = Workers(reaper, commands, Zygotes(reaper, commands, state.run, ZygoteTimes()))
    residents = Residents(events, link, Servers(events, workers))
    told = asyncio.Event()
    events.on_durable = told.set
    residents.kept.remember(resident("run-1", time.time_ns() + HOUR_NS, ttl_s=0.05))

    await asyncio.wait_for(told.wait(), 10)
    assert residents.all() == ()
    events.close()
