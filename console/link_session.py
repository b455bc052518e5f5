"""One conversation with one agent over one stream, from the sync mark to the end.

Nothing that arrives can raise into the application: a stream that breaks the
protocol ends the conversation with a reason, and the link starts a new one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from console import __version__
from console.clean import clean, clean_lines, clean_record
from console.errors import AgentMissing, LinkError, LinkLost, NodeUnreachable, ProtocolMismatch, RequestRefused
from console.state import LinkState
from console.transports.base import STARTING_UP, Stream
from remote_agent.protocol.framing import ProtocolError, SyncScanner
from remote_agent.protocol.messages import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    AckParams,
    Event,
    Gap,
    HelloParams,
    HelloResult,
    Sample,
    SubscribeParams,
)
from remote_agent.protocol.peer import (
    METHOD_NOT_FOUND,
    REFUSED,
    BadRequest,
    ErrorReply,
    Incoming,
    Notification,
    Peer,
    Reply,
    Request,
)

T = TypeVar("T")

ERROR_WORDS = {-32600: "invalid_request", -32601: "method_not_found", -32602: "invalid_params", -32603: "internal"}


class LinkSink(Protocol):
    """Takes what a link has to tell; all text in it is cleaned, ``raw_json`` excepted. Must not block.

    A sink may also have ``async def ready() -> None``: reading waits for it, and so
    does the host, when the sink can't keep up.
    """

    def link_changed(self, link: LinkState) -> None: ...

    def hello(self, hello: HelloResult) -> None: ...

    def event(self, journal_uuid: str, event: Event, raw_json: str) -> None:
        """``raw_json``: the event's data as the host sent it, as ASCII JSON text."""

    def sample(self, sample: Sample) -> None: ...

    def gap(self, journal_uuid: str, gap: Gap) -> None: ...


NOTHING = "nothing within"


@dataclass(frozen=True)
class Timing:
    """How long a link waits for what. Heartbeats are counted in the host's own ``heartbeat_s``."""

    mark_s: float = 30.0
    handshake_s: float = 15.0
    silent_beats: float = 3.0
    backoff_first_s: float = 1.0
    backoff_limit_s: float = 60.0
    steady_s: float = 30.0


class Session:
    """Speaks with one agent until the stream ends; `converse` never returns, it raises why it ended."""

    def __init__(
        self,
        stream: Stream,
        token: str,
        subscriber: str,
        cursor: Callable[[str], int],
        sink: LinkSink,
        timing: Timing,
    ) -> None:
        self._stream, self._sink, self._timing = stream, sink, timing
        self._subscriber, self._cursor = subscriber, cursor
        self._scanner = SyncScanner(token)
        self._peer = Peer()
        self._waiting: dict[int, asyncio.Future[Reply | ErrorReply]] = {}
        self._writing = asyncio.Lock()
        self._reading: asyncio.Future[bytes] | None = None
        self._ready: Callable[[], Awaitable[None]] | None = getattr(sink, "ready", None)
        self._ack_wanted = 0
        self._acking: asyncio.Future[None] | None = None
        self.hello: HelloResult | None = None
        self.subscribed = False

    async def shake_hands(self) -> None:
        """Find the mark, agree on the version, subscribe where the cursor stands.

        Raises: LinkError.
        """
        rest = await self._within(self._find_mark(), self._timing.mark_s, self._no_mark)
        self._take(rest)
        hello = await self._ask_first("hello", HelloParams(f"glowplug {__version__}"))
        self.hello = clean_record(cast(HelloResult, hello))
        if not PROTOCOL_MIN <= self.hello.protocol <= PROTOCOL_MAX:
            raise self._mismatch(self.hello.protocol, self.hello.protocol)
        self._sink.hello(self.hello)
        after_seq = self._cursor(self.hello.journal_uuid)
        self._ack_wanted = after_seq
        await self._ask_first("subscribe", SubscribeParams(self._subscriber, after_seq))
        self.subscribed = True

    async def converse(self, silent: Callable[[float], None], heard: Callable[[], None]) -> None:
        """Take what comes until the stream ends; call ``silent`` when heartbeats are missing, ``heard`` when back.

        Raises: LinkError, always.
        """
        assert self.hello is not None
        patience_s = self._timing.silent_beats * min(max(self.hello.heartbeat_s, 0.01), 60.0)
        quiet = False
        while True:
            data = await self._read(patience_s)
            if data is None:
                if quiet:
                    raise LinkLost(f"no heartbeat for {2 * patience_s:g} s")
                quiet = True
                silent(patience_s)
                continue
            if quiet:
                quiet = False
                heard()
            self._take(data)
            if self._ready is not None:
                await self._ready()

    async def request(self, method: str, params: object, timeout_s: float) -> object:
        """Return the cleaned answer to one request.

        Raises: RequestRefused, NodeUnreachable.
        """
        try:
            ident, data = self._peer.request(method, params)
        except (ProtocolError, ValueError) as error:
            raise RequestRefused("too_large", f"{method}: {error}") from error
        future = self._waiting[ident] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(data)
                answer = await future
        except TimeoutError as error:
            raise NodeUnreachable(f"no answer to {method} within {timeout_s:g} s") from error
        except LinkLost as error:
            raise NodeUnreachable(f"{method} was not answered: {error}") from error
        finally:
            self._waiting.pop(ident, None)
        if isinstance(answer, ErrorReply):
            word = answer.code if answer.error == REFUSED and answer.code else ERROR_WORDS.get(answer.error, "refused")
            raise RequestRefused(clean(word, 64), clean(answer.text))
        return clean_record(answer.result)

    def ack(self, seq: int) -> None:
        """Tell the host, soon, that everything up to ``seq`` is stored; the newest of many is told once."""
        if seq > self._ack_wanted and self.subscribed:
            self._ack_wanted = seq
            if self._acking is None or self._acking.done():
                self._acking = asyncio.ensure_future(self._send_acks())

    async def close(self, reason: str) -> None:
        """End the stream; whoever waits for an answer gets ``reason``."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LinkLost(reason))
                future.exception()  # whoever asked may have been cancelled and never look
        for task in (self._acking, self._reading):
            if task is not None:
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)
        await self._stream.close()

    # --- the start ---------------------------------------------------------

    async def _find_mark(self) -> bytes:
        while True:
            data = await self._stream.read()
            if not data:
                raise self._no_mark("the stream ended before an agent answered")
            try:
                found = self._scanner.feed(data)
            except ProtocolError as error:
                raise self._no_mark(str(error)) from error
            if found is not None:
                low, high, rest = found
                if high < PROTOCOL_MIN or low > PROTOCOL_MAX:
                    raise self._mismatch(low, high)
                return rest

    def _no_mark(self, what: str) -> LinkError:
        """Say what was there in place of an agent: the end of the noise is where the error is."""
        said = " / ".join(clean_lines(self._scanner.noise, 3, 200))
        told = ": ".join(part for part in (self._stream.exit_reason() or what, said) if part)
        if told == what and what.startswith(NOTHING):
            told = f"{what}; {STARTING_UP}"
        return AgentMissing(clean(f"no agent: {told}{_remedy(told)}"))

    def _mismatch(self, low: int, high: int) -> LinkError:
        theirs = str(low) if low == high else f"{low} to {high}"
        ours = str(PROTOCOL_MIN) if PROTOCOL_MIN == PROTOCOL_MAX else f"{PROTOCOL_MIN} to {PROTOCOL_MAX}"
        older = "agent" if high < PROTOCOL_MIN else "console"
        return ProtocolMismatch(f"the agent speaks protocol {theirs}, this console {ours}: upgrade the {older}")

    async def _within(self, step: Awaitable[T], timeout_s: float, explain: Callable[[str], LinkError]) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await step
        except TimeoutError as error:
            raise explain(f"{NOTHING} {timeout_s:g} s") from error

    async def _ask_first(self, method: str, params: object) -> object:
        """Ask while nobody else reads yet."""
        return await self._within(
            self._ask_and_read(method, params),
            self._timing.handshake_s,
            lambda what: LinkLost(f"the agent does not answer {method}: {what}"),
        )

    async def _ask_and_read(self, method: str, params: object) -> object:
        asking = asyncio.ensure_future(self.request(method, params, self._timing.handshake_s))
        try:
            while not asking.done():
                self._reading = self._reading or asyncio.ensure_future(self._stream.read())
                pending: set[asyncio.Future[Any]] = {asking, self._reading}
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if self._reading.done():
                    reading, self._reading = self._reading, None
                    self._take(self._not_the_end(reading.result()))
                    await asyncio.sleep(0)
            return await asking
        except RequestRefused as error:
            raise LinkLost(f"the agent refuses {method}: {error}") from error
        finally:
            asking.cancel()
            await asyncio.wait({asking})
            if not asking.cancelled():
                asking.exception()

    # --- what comes ----------------------------------------------------------

    async def _read(self, patience_s: float) -> bytes | None:
        """Return the next bytes, None if none came in time; a read is never cancelled, so none are lost."""
        self._reading = self._reading or asyncio.ensure_future(self._stream.read())
        await asyncio.wait({self._reading}, timeout=patience_s)
        if not self._reading.done():
            return None
        reading, self._reading = self._reading, None
        return self._not_the_end(reading.result())

    def _not_the_end(self, data: bytes) -> bytes:
        if data:
            return data
        try:
            self._peer.end()
        except ProtocolError as error:
            raise LinkLost(clean(_both(str(error), self._stream.exit_reason()))) from error
        raise LinkLost(clean(_both("the host ended the connection", self._stream.exit_reason())))

    def _take(self, data: bytes) -> None:
        try:
            for message in self._peer.feed(data):
                self._dispatch(message)
        except (ProtocolError, ValueError, RecursionError) as error:
            self._stream.abort()
            raise LinkLost(clean(f"the agent broke the protocol: {error}")) from error

    def _dispatch(self, message: Incoming) -> None:
        if isinstance(message, Notification):
            self._notice(message)
        elif isinstance(message, (Reply, ErrorReply)):
            future = self._waiting.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, (Request, BadRequest)):
            raise ProtocolError(f"an agent asks nothing, this one sent request {message.id} ({METHOD_NOT_FOUND})")

    def _notice(self, notification: Notification) -> None:
        params = notification.params
        if not isinstance(params, (Event, Sample, Gap)):
            return  # a heartbeat says that the agent lives, be it in one piece with its answer to hello
        if self.hello is None:
            raise ProtocolError(f"{notification.method} before hello")
        if isinstance(params, Event):
            raw_json = json.dumps(notification.raw, separators=(",", ":"), allow_nan=False)
            self._sink.event(self.hello.journal_uuid, clean_record(params), raw_json)
        elif isinstance(params, Sample):
            self._sink.sample(clean_record(params))
        else:
            self._sink.gap(self.hello.journal_uuid, params)

    # --- what goes -----------------------------------------------------------

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            try:
                await self._stream.write(data)
            except LinkError:
                self._stream.abort()
                raise

    async def _send_acks(self) -> None:
        sent = -1
        while sent != self._ack_wanted:
            sent = self._ack_wanted
            try:
                await self.request("ack", AckParams(self._subscriber, sent), self._timing.handshake_s)
            except (LinkError, RequestRefused):
                return  # what was not acknowledged is sent again, and stored once


def _remedy(told: str) -> str:
    """Return what mends a host where no agent could be started, as far as its own words tell."""
    if "No module named remote_agent" in told:
        by_hand = "copy glowplug-agent.pyz there and set the node's agent to its path"
        return f"; glowplug deploy brings it to a host with SSH, or {by_hand}"
    if "Python 3.10 or newer is needed" in told:
        return "; glowplug deploy --check names one there that fits, for the node's python"
    if "can't open file" in told and ".pyz" in told:
        return "; glowplug deploy puts it there over SSH, or set the node's agent to where it is"
    return ""


def _both(what: str, why: str | None) -> str:
    return f"{what}: {why}" if why else what
