"""A host over one connection, and what it holds of others while it is used."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from console.config_nodes import Node
from console.transports.ssh_host import SshHost
from tests.console.fake_host import eventually


class SlowToClose:
    """A connection whose other side does not answer its end until ``is_over`` is set."""

    def __init__(self) -> None:
        self.is_closing = False
        self.is_over = asyncio.Event()

    def close(self) -> None:
        self.is_closing = True

    async def wait_closed(self) -> None:
        await self.is_over.wait()


async def test_one_that_is_cancelled_while_it_closes_still_lets_go_of_its_way() -> None:
    """Else its bastion would count a user that is gone, and stay open for ever."""
    connection, released = SlowToClose(), []

    async def release() -> None:
        released.append("bastion")

    async def use() -> None:
        async with SshHost(Node("n1"), cast(Any, connection), release):
            pass

    using = asyncio.ensure_future(use())
    await eventually(lambda: connection.is_closing)
    using.cancel()
    connection.is_over.set()
    await asyncio.wait({using})

    assert using.cancelled()
    assert released == ["bastion"]
