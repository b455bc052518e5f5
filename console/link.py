"""Keeps one node's conversation alive: connects, listens for its heartbeat, comes back when it is lost.

A lost link says nothing about any run. Its reason and since when are always shown;
``since_s`` of a link that is down is when the outage began, however often it was
tried since. What a retry can't mend (a changed host key, a refused login) is
``final`` and waits for `NodeLink.retry_now`.
"""

from __future__ import annotations

import asyncio
import logging
import random as random_module
import secrets
import time
from collections.abc import Callable

from console.clean import clean
from console.config_nodes import Node
from console.errors import GlowplugError, LinkError, LinkLost, NodeUnreachable
from console.heap import forget_frames
from console.link_session import LinkSink, Session, Timing
from console.state import LinkState, LinkStatus
from console.transports.base import OpenStream, unbroken

__all__ = ["LinkSink", "NodeLink", "Timing", "backoff_s"]

REQUEST_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)

NO_WORD_YET = "the host is reached, and nothing has come of its agent yet"


class NodeLink:
    """One node's link. ``cursor(journal_uuid)``: the highest contiguous seq stored here of that journal.

    ``error`` is the last LinkError. ``reconsider`` is called when a person wants to connect again.
    """

    def __init__(
        self,
        node: Node,
        subscriber: str,
        cursor: Callable[[str], int],
        sink: LinkSink,
        *,
        open_stream: OpenStream,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random_module.random,
        timing: Timing | None = None,
        reconsider: Callable[[], None] = lambda: None,
    ) -> None:
        self.node = node
        self.state = LinkState(since_s=clock())
        self.error: LinkError | None = None
        self._subscriber, self._cursor, self._sink = subscriber, cursor, sink
        self._open_stream, self._clock, self._random = open_stream, clock, random
        self._timing = timing or Timing()
        self._reconsider = reconsider
        self._session: Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._down_since_s: float | None = None
        self._failures = 0

    def start(self) -> None:
        """Begin to connect, and go on until `stop`. Needs a running event loop; starting twice is starting once."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._live())

    async def stop(self) -> None:
        """End the conversation; nothing is told to the sink after the final ``idle``."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._down_since_s, self._failures = None, 0
        self._change(LinkStatus.IDLE)

    def retry_now(self) -> None:
        """Try again at once, also where the link is ``final``: a person wants it."""
        self._reconsider()
        self._wake.set()

    async def request(self, method: str, params: object, timeout_s: float = REQUEST_TIMEOUT_S) -> object:
        """Return the cleaned result of one request to the agent.

        Raises: RequestRefused if the agent says no; NodeUnreachable if it can't be asked or does not answer.
        """
        session = self._session
        if session is None:
            raise NodeUnreachable(f"{self.node.name}: {self.state.reason or 'not connected'}")
        return await session.request(method, params, timeout_s)

    def ack(self, journal_uuid: str, seq: int) -> None:
        """Say that every event up to ``seq`` of that journal is stored; only the current journal's is passed on."""
        session = self._session
        if session is not None and session.hello is not None and session.hello.journal_uuid == journal_uuid:
            session.ack(seq)

    async def _live(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            connected_s = await self._attempt()
            failures = 1 if connected_s >= self._timing.steady_s else failures + 1
            final = self.error is not None and self.error.final
            delay_s = backoff_s(failures, self._timing, self._random)
            self._change(
                LinkStatus.DISCONNECTED,
                reason=clean(str(self.error)),
                retry_at_s=None if final else self._clock() + delay_s,
                final=final,
            )
            await self._pause(None if final else delay_s)
            if self._wake.is_set():
                failures = 0

    async def _attempt(self) -> float:
        """Connect and converse once; return for how many seconds there was a conversation."""
        self._change(LinkStatus.CONNECTING, reason=self.state.reason)
        began_s: float | None = None
        session: Session | None = None
        try:
            token = secrets.token_hex(16)
            stream = await self._open_stream(self.node, token)
            if self.state.reason is None:  # whoever gives up waiting is told how far it came
                self._change(LinkStatus.CONNECTING, reason=NO_WORD_YET)
            session = Session(stream, token, self._subscriber, self._cursor, self._sink, self._timing)
            await session.shake_hands()
            self._session, self.error, self._down_since_s, self._failures = session, None, None, 0
            began_s = self._clock()
            self._change(LinkStatus.CONNECTED)
            await session.converse(self._silent, lambda: self._change(LinkStatus.CONNECTED))
        except LinkError as error:
            self.error = error
        except GlowplugError as error:
            self.error = NodeUnreachable(str(error))
        except Exception as error:
            log.exception("link failed", extra={"node": self.node.name})
            self.error = NodeUnreachable(f"internal error: {type(error).__name__}: {error}")
        finally:
            self._session = None
            if session is not None:
                await unbroken(session.close(clean(str(self.error or "the link was stopped"))))
            forget_frames(self.error)
        ended_s = self._clock()
        if not isinstance(self.error, LinkLost):
            self._failures += 1
        if self._down_since_s is None:
            self._down_since_s = ended_s
        return ended_s - began_s if began_s is not None else 0.0

    def _silent(self, quiet_s: float) -> None:
        self._change(LinkStatus.SILENT, reason=f"no heartbeat for {quiet_s:g} s")

    async def _pause(self, delay_s: float | None) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _change(
        self, status: LinkStatus, reason: str | None = None, retry_at_s: float | None = None, final: bool = False
    ) -> None:
        is_down = status in (LinkStatus.CONNECTING, LinkStatus.DISCONNECTED)
        if is_down and self._down_since_s is not None:
            since_s = self._down_since_s
        else:
            since_s = self.state.since_s if status is self.state.status else self._clock()
        self.state = LinkState(status, since_s, reason, retry_at_s, final, self._failures)
        self._sink.link_changed(self.state)


def backoff_s(failures: int, timing: Timing, random: Callable[[], float]) -> float:
    """Return how long to wait after that many failures in a row: doubling, within limits, half of it by chance.

    A fleet that lost its network at one moment does not come back at one moment.
    """
    whole_s = min(timing.backoff_first_s * 2.0 ** min(failures - 1, 30), timing.backoff_limit_s)
    return float(whole_s * (0.5 + 0.5 * random()))
