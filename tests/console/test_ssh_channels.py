"""What else a channel has to bear: a host that writes errors without end, and a bastion that many go through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from console.state import LinkStatus
from console.transports import open_stream
from console.transports.gate import CONNECT_LIMIT
from console.transports.ssh import Bastion
from tests.console.links import gate, linked, soon
from tests.console.sshd import Sshd

pytestmark = pytest.mark.ssh

FLOOD_BYTES = 6_000_000
"""More than a channel's window, which nobody but a reader opens again."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Start servers, each in a directory of its own; all end with the test."""
    servers: list[Sshd] = []

    def start(**options: str) -> Sshd:
        servers.append(Sshd(tmp_path / f"sshd{len(servers)}", shell=options.get("shell")))
        return servers[-1].start()

    yield start
    for server in servers:
        server.stop()


async def test_errors_without_end_hold_up_no_answer(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """A start-up file that writes megabytes to stderr is read all the time; the agent behind it answers."""
    shell = tmp_path / "shell"
    shell.write_text(f'#!/bin/sh\nhead -c {FLOOD_BYTES} /dev/zero | tr "\\0" x >&2\nexec /bin/sh "$@"\n')
    shell.chmod(0o755)
    async with linked(serve(shell=str(shell)).node(), tmp_path) as (_, kept):
        await soon(lambda: kept.state.status is LinkStatus.CONNECTED, "connected")


async def test_no_more_than_eight_connect_through_a_bastion_at_once(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """The ninth waits at the bastion without a login, though the fleet has places."""
    outer, target, shared = serve(), serve(), gate(tmp_path)
    node = target.node(jump=("outer",), hops=(outer.node("outer"),))
    first = await open_stream(node, "token", gate=shared)
    (bastion,) = shared.bastions.values()
    assert isinstance(bastion, Bastion)
    for _ in range(CONNECT_LIMIT):
        await bastion.slots.acquire()
    opening = asyncio.ensure_future(open_stream(node, "token", gate=shared))
    await soon(lambda: bool(bastion.slots._waiters), "it waits for a place")
    assert (outer.logins(), target.logins(), shared.connects.locked()) == (1, 1, False)

    bastion.slots.release()
    await (await opening).close()
    await first.close()

    assert (outer.logins(), target.logins()) == (1, 2)
