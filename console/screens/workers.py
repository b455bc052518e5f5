"""How screens and the app begin what they do beside drawing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from textual.dom import DOMNode
from textual.worker import Worker


def begin(
    owner: DOMNode, work: Callable[[], Awaitable[None]], name: str, *, group: str = "default", exclusive: bool = False
) -> Worker[None]:
    """Run ``work`` until it or its owner ends; where that is before it has begun, nothing is left that nobody awaits.

    ``exclusive``: what runs in that group is cancelled first.
    """

    async def run() -> None:
        await work()

    worker: Worker[None] = owner.run_worker(run, name=name, group=group, exclusive=exclusive)
    return worker
