"""A sink that keeps what a link told it, and a way to wait for it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from console.config_nodes import Node
from console.link import NodeLink, Timing
from console.state import LinkState, LinkStatus
from console.transports import Gate, open_stream
from remote_agent.protocol.messages import Event, Gap, HelloResult, Sample

DEADLINE_S = 30.0
QUICK = Timing(mark_s=10.0, handshake_s=10.0, backoff_first_s=0.05, backoff_limit_s=0.2)


class Kept:
    """A `LinkSink` that stores everything and wakes whoever waits."""

    def __init__(self) -> None:
        self.states: list[LinkState] = []
        self.hellos: list[HelloResult] = []
        self.events: list[tuple[str, Event, str]] = []
        self.samples: list[Sample] = []
        self.gaps: list[tuple[str, Gap]] = []

    def link_changed(self, link: LinkState) -> None:
        self.states.append(link)

    def hello(self, hello: HelloResult) -> None:
        self.hellos.append(hello)

    def event(self, journal_uuid: str, event: Event, raw_json: str) -> None:
        self.events.append((journal_uuid, event, raw_json))

    def sample(self, sample: Sample) -> None:
        self.samples.append(sample)

    def gap(self, journal_uuid: str, gap: Gap) -> None:
        self.gaps.append((journal_uuid, gap))

    @property
    def state(self) -> LinkState:
        return self.states[-1] if self.states else LinkState()

    def saw(self, *statuses: LinkStatus) -> bool:
        """Whether these statuses came in this order, with anything between them."""
        rest = iter(state.status for state in self.states)
        return all(status in rest for status in statuses)


async def soon(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for ``condition`` while the loop runs on; fail after the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {deadline_s} s: {what}")
        await asyncio.sleep(0.01)


def gate(directory: Path) -> Gate:
    """A gate that knows nothing of the user who runs the tests."""
    return Gate(directory / "our_known_hosts", home=directory, account_home=directory)


@asynccontextmanager
async def linked(
    node: Node, directory: Path, sink: Any = None, cursor: Callable[[str], int] = lambda journal_uuid: 0, **options: Any
) -> AsyncIterator[tuple[NodeLink, Kept]]:
    """A started link to ``node`` and what it told; stopped at the end."""
    kept = sink or Kept()
    opener = options.pop("open_stream", None) or functools.partial(
        open_stream, gate=options.pop("gate", None) or gate(directory)
    )
    link = NodeLink(
        node, "subscriber-1", cursor, kept, open_stream=opener, timing=options.pop("timing", QUICK), **options
    )
    link.start()
    try:
        yield link, kept
    finally:
        await link.stop()


def connected(kept: Kept) -> Callable[[], bool]:
    return lambda: kept.state.status is LinkStatus.CONNECTED
