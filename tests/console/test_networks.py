"""Links over networks that fail: hosts in namespaces of their own behind real OpenSSH servers, and a bastion."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from console.config import Config
from console.config_nodes import Node
from console.errors import HostKeyChanged
from console.fleet import Fleet
from console.link import NodeLink, Timing
from console.session import Session
from console.state import LinkStatus
from console.transports import Gate, open_stream
from remote_agent.protocol.messages import Actor, RunState, StageStatus
from tests.console.links import Kept, gate, linked, soon
from tests.console.networks import NAMED, Host, Network, sweep
from tests.console.sshd import Sshd, make_key, ssh_keygen, until
from tests.faults.truth import replay, rows, stored
from tests.remote_agent.agentd.agents import Agent

pytestmark = [pytest.mark.ssh, pytest.mark.faults]

REPOSITORY = Path(__file__).parents[2]
HEARTBEAT_S = 0.2
TIMING = Timing(silent_beats=2.0, backoff_first_s=0.1, backoff_limit_s=0.4)
CONNECT_TIMEOUT_S = 4.0


class Site:
    """A bastion, a host behind it, and one that this machine reaches itself; users are let in by certificate alone."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.bastion_host, self.outer_host = network.host(), network.host()
        self.inner_host = network.host(behind=self.bastion_host)
        self.authority = make_key(directory / "authority")
        self.bastion = self._sshd(directory / "bastion", self.bastion_host, "MaxStartups 2:100:2", "MaxSessions 1")
        self.inner = self._sshd(directory / "inner", self.inner_host, "MaxSessions 1")
        self.outer = self._sshd(directory / "outer", self.outer_host)
        self.servers = (self.bastion, self.inner, self.outer)
        for server in self.servers:
            server.start()

    def _sshd(self, directory: Path, host: Host, *options: str) -> Sshd:
        trusted = f"TrustedUserCAKeys {self.authority.with_suffix('.pub')}"
        server = Sshd(
            directory,
            address=host.address,
            inside=host.inside,
            options=(trusted, *options),
            environment={"PYTHONPATH": str(REPOSITORY)},
        )
        (directory / "authorized_keys").write_text("")
        certify = [ssh_keygen(), "-q", "-s", str(self.authority), "-I", "operator", "-n", "root"]
        subprocess.run([*certify, f"{server.user_key}.pub"], check=True, timeout=30)
        return server

    def inner_node(self, name: str = "inner", **settings: Any) -> Node:
        return self.inner.node(name, jump=("bastion",), hops=(self.bastion.node("bastion"),), **settings)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    network = Network()
    site: Site | None = None
    try:
        site = Site(network, tmp_path_factory.mktemp("site"))
        yield site
    finally:
        for server in site.servers if site is not None else ():
            server.stop()
        network.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """The real agent with stub children on the outer host: its files are this machine's, its network is not."""
    (tmp_path / "agent").mkdir()
    agent = Agent(tmp_path / "agent", heartbeat_s=HEARTBEAT_S, idle_s=600.0)
    try:
        yield agent.start()
    finally:
        agent.close()


@asynccontextmanager
async def following(site: Site, agent: Agent, directory: Path) -> AsyncIterator[Fleet]:
    """A fleet of the one node that is the agent, behind the outer server."""
    node = site.outer.node(
        python=(sys.executable,),
        agent=("-m", "remote_agent"),
        state_directory=str(agent.state.root),
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )
    opener = functools.partial(open_stream, gate=gate(directory))

    def link(node: Node, subscriber: str, cursor: Callable[[str], int], sink: Session) -> NodeLink:
        return NodeLink(node, subscriber, cursor, sink, open_stream=opener, timing=TIMING)

    config = Config((node,), {}, path=directory / "fleet.toml")
    async with Fleet(config, directory / "history.db", actor=Actor("ada", "desk"), links=link) as fleet:
        yield fleet


async def warm(fleet: Fleet, agent: Agent, stub: str = "") -> str:
    return await fleet.warm("gpu-1", "tiny", recipe=agent.params(stub).recipe)


def has_link(fleet: Fleet, status: LinkStatus) -> bool:
    return fleet.state("gpu-1").link.status is status


def is_at(fleet: Fleet, run_uid: str, name: str) -> bool:
    """Say whether that stage is seen to run."""
    stages = fleet.state("gpu-1").runs[run_uid].stages
    return any((stage.name, stage.status) == (name, StageStatus.RUNNING) for stage in stages)


async def assert_everything_arrives(fleet: Fleet, agent: Agent, directory: Path) -> None:
    """The history is the journal, each event once and without a gap."""
    journal_uuid, told = await asyncio.to_thread(replay, agent.state)
    await soon(lambda: fleet.state("gpu-1").seq >= told[-1][0].seq, "everything has come")
    assert await fleet.flush()
    kept, gaps = stored(directory / "history.db", journal_uuid)
    assert [row[0] for row in kept] == list(range(1, len(kept) + 1))
    assert (kept[: len(told)], gaps) == (rows(told), 0)


# --- ways in ---


async def test_twelve_links_come_through_a_bastion_by_certificate(site: Site, tmp_path: Path) -> None:
    """The bastion drops whoever comes over two at once and admits one session; forwards are none, and all get in."""
    kept = [Kept() for _ in range(12)]
    doors = [gate(tmp_path) for _ in range(4)]  # four consoles: each shares one connection to the bastion
    before = site.bastion.logins()

    async def stay(door: Gate, sink: Kept) -> None:
        async with linked(site.inner_node(), tmp_path, sink, gate=door):
            await soon(lambda: all(one.saw(LinkStatus.CONNECTED) for one in kept), "all are in")

    await asyncio.gather(*(stay(doors[number % 4], sink) for number, sink in enumerate(kept)))
    assert site.bastion.logins() - before == 4
    assert site.inner.log.read_text().count("Accepted publickey for root") >= 12
    assert "ED25519-CERT" in site.inner.log.read_text()


async def test_a_crowd_over_max_startups_is_let_in_one_after_the_other(site: Site, tmp_path: Path) -> None:
    """Ten consoles at once: dropped connections are tried again, each after a time of its own."""
    waits: list[float] = []

    def door() -> Gate:
        one = gate(tmp_path)
        draw = one.random

        def noted() -> float:
            waits.append(draw())
            return waits[-1]

        one.random = noted
        return one

    kept = [Kept() for _ in range(10)]

    async def stay(sink: Kept) -> None:
        async with linked(site.bastion.node(), tmp_path, sink, gate=door()):
            await soon(lambda: all(one.saw(LinkStatus.CONNECTED) for one in kept), "all are in")

    await asyncio.gather(*map(stay, kept))
    assert "MaxStartups" in site.bastion.log.read_text()
    assert len(waits) > 1
    assert len(set(waits)) == len(waits)


async def test_another_host_key_is_a_hard_stop_behind_a_bastion_too(site: Site, tmp_path: Path) -> None:
    """The server comes back with a second key: nothing is tried again by itself, and its former key is welcome."""
    keys = {path: path.read_bytes() for path in (site.inner.host_key, site.inner.host_key.with_suffix(".pub"))}
    site.inner.stop()
    for path in keys:
        path.unlink()
    make_key(site.inner.host_key)
    site.inner.start()
    async with linked(site.inner_node(), tmp_path) as (link, kept):
        await soon(lambda: kept.state.final, "the key is refused")
        assert isinstance(link.error, HostKeyChanged)
        assert kept.state.retry_at_s is None

        site.inner.stop()
        for path, content in keys.items():
            path.write_bytes(content)
        site.inner.start()
        link.retry_now()
        await soon(lambda: kept.state.status is LinkStatus.CONNECTED, "the known key is let in")


# --- cables ---


async def test_a_black_hole_is_silence_and_a_lost_link_and_no_failed_run(
    site: Site, agent: Agent, tmp_path: Path
) -> None:
    """In the middle of a run, which ends meanwhile: unknown here, never failed, and all of it arrives after."""
    agent.order("gate", "")
    async with following(site, agent, tmp_path) as fleet:
        run_uid = await warm(fleet, agent, "gate:weights")
        await soon(lambda: is_at(fleet, run_uid, "weights"), "weights begin")
        with site.outer_host.black_hole():
            for status in (LinkStatus.SILENT, LinkStatus.DISCONNECTED):
                await soon(functools.partial(has_link, fleet, status), f"the link is {status.value}")
                assert fleet.state("gpu-1").runs[run_uid].state is RunState.RUNNING
                assert not fleet.state("gpu-1").is_known
            agent.order("gate", None)
            with agent.client() as client:
                until(lambda: not client.status().runs, "the run ends there")
        run = await fleet.wait("gpu-1", run_uid, 60.0)

        assert run.state is RunState.READY
        await assert_everything_arrives(fleet, agent, tmp_path)


@pytest.mark.parametrize("cable", ["slow", "lossy"])
async def test_a_bad_cable_loses_no_event_and_doubles_none(
    site: Site, agent: Agent, tmp_path: Path, cable: str
) -> None:
    """1 Mbit/s, or every tenth packet lost, while runs begin and end and a connection is cut in between."""
    bad = site.outer_host.slow() if cable == "slow" else site.outer_host.lossy(0.1)
    async with following(site, agent, tmp_path) as fleet:
        with bad:
            for number in range(4):
                if number == 2:
                    for pid in site.outer.connection_processes():
                        os.kill(pid, signal.SIGKILL)
                run = await fleet.wait("gpu-1", await warm(fleet, agent), 60.0)
                assert run.state is RunState.READY
        await assert_everything_arrives(fleet, agent, tmp_path)


# --- what is left ---


def test_what_a_killed_session_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    """SIGKILL: its namespaces and the server in one of them go, and nobody else's."""
    own = Network()
    try:
        mine = own.host()
        argv, pipe = [sys.executable, "-c", _LEAVES, str(tmp_path)], subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=REPOSITORY) as killed:
            assert killed.stdout is not None
            name, server = killed.stdout.readline().split()
            killed.kill()
        assert (NAMED / name).exists()

        assert sweep() == [name]
        until(lambda: not Path(f"/proc/{server}").exists(), "its server ends")
        assert not (NAMED / name).exists()
        assert (NAMED / mine.name).exists()
    finally:
        own.close()
    assert not (NAMED / mine.name).exists()


_LEAVES = """
import sys
from pathlib import Path
from tests.console.networks import Network
from tests.console.sshd import Sshd
host = Network().host()
server = Sshd(Path(sys.argv[1]) / "left", address=host.address, inside=host.inside).start()
print(host.name, server.process.pid, flush=True)
sys.stdin.read()
"""
