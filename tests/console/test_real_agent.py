"""Links to the real agent: bridge and daemon started by the command that links send."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from console.config_nodes import Node
from console.errors import RequestRefused
from console.link import NodeLink
from console.state import LinkStatus
from remote_agent.protocol.messages import Empty, Probe, RunUidParams, ShutdownParams
from tests.console.links import Kept, linked, soon
from tests.console.sshd import Sshd

REPOSITORY = Path(__file__).parents[2]


@asynccontextmanager
async def agent(node: Node, directory: Path) -> AsyncIterator[tuple[NodeLink, Kept]]:
    """A link to the real agent, which is ended with the test."""
    async with linked(node, directory) as (link, kept):
        await soon(lambda: kept.state.status is LinkStatus.CONNECTED, "connected")
        try:
            yield link, kept
        finally:
            await soon(lambda: kept.state.status is LinkStatus.CONNECTED, "connected, to end the agent")
            pid = kept.hellos[-1].pid
            await link.request("shutdown", ShutdownParams(keeper=True, force=True))
            await link.stop()
            await soon(lambda: not Path(f"/proc/{pid}").exists(), "the daemon's end")


def settings(directory: Path) -> dict[str, Any]:
    python = ("env", f"PYTHONPATH={REPOSITORY}", sys.executable)
    return {"python": python, "state_directory": str(directory / "agent state"), "agent": ("-m", "remote_agent")}


async def check(link: NodeLink, kept: Kept) -> None:
    """What any console does first works, and an event that was stored can be acknowledged."""
    await soon(lambda: bool(kept.events), "the daemon's first event")
    journal_uuid, event, raw_json = kept.events[0]
    link.ack(journal_uuid, event.seq)
    probe = await link.request("probe", Empty())
    with pytest.raises(RequestRefused):
        await link.request("run.get", RunUidParams("no-such-run"))

    assert journal_uuid == kept.hellos[0].journal_uuid
    assert event.kind == "daemon.started"
    assert str(kept.hellos[0].pid) in raw_json
    assert isinstance(probe, Probe)
    assert probe.cpu_count == os.cpu_count()


async def test_a_local_process_brings_up_the_real_agent(tmp_path: Path) -> None:
    """The argv transport, the bridge, a daemon that wasn't running, its first event."""
    async with agent(Node("gpu-1", transport=("env",), **settings(tmp_path)), tmp_path) as (link, kept):
        await check(link, kept)


@pytest.mark.ssh
async def test_ssh_brings_up_the_real_agent_which_outlives_its_connection(tmp_path: Path) -> None:
    """The daemon and journal of the second connection are those of the first."""
    server = Sshd(tmp_path / "sshd").start()
    try:
        node = server.node(**settings(tmp_path))
        async with agent(node, tmp_path) as (link, kept):
            await check(link, kept)
            await link.stop()
            link.start()
            await soon(lambda: kept.state.status is LinkStatus.CONNECTED and len(kept.hellos) == 2, "connected again")
            assert kept.hellos[0].pid == kept.hellos[1].pid
            assert kept.hellos[0].journal_uuid == kept.hellos[1].journal_uuid
    finally:
        server.stop()
