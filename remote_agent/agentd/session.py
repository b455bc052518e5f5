"""One client's connection: its requests, its place in the journal, and how much may wait for it.

Nothing here waits for a client. Events stay on disk until it takes them;
samples and heartbeats it has no room for are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, cast

from remote_agent import __version__
from remote_agent.agentd import hostfacts
from remote_agent.agentd.supervisor import Supervisor
from remote_agent.errors import JournalError, RefusedError
from remote_agent.protocol.framing import ProtocolError
from remote_agent.protocol.messages import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    AckParams,
    Empty,
    Gap,
    Heartbeat,
    HelloParams,
    HelloResult,
    Sample,
    SubscribeParams,
    SubscribeResult,
)
from remote_agent.protocol.peer import INTERNAL_ERROR, INVALID_REQUEST, REFUSED, BadRequest, Peer, Request

log = logging.getLogger(__name__)

BATCH_EVENTS = 100

Handler = Callable[[object], Awaitable[object]]


class Sessions(Protocol):
    """Who must know of a session's end; `server.Server` is one."""

    def ended(self, session: Session) -> None: ...


class Session(asyncio.Protocol):
    """A client from its first byte to its last. A breach of the protocol closes it and nothing else."""

    def __init__(
        self, supervisor: Supervisor, handlers: Mapping[str, Handler], sessions: Sessions, refusal: str | None = None
    ) -> None:
        """Serve a client; with a ``refusal``, answer its first request with that and close."""
        self._supervisor, self._sessions, self._refusal = supervisor, sessions, refusal
        self._limits = supervisor.options.clients
        self._handlers = {**handlers, "hello": self._hello, "subscribe": self._subscribe, "ack": self._ack}
        self._peer = Peer()
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False
        self._waiting_bytes, self._moved_s = 0, time.monotonic()
        self.greeted, self._unwanted = False, False
        self._next_seq: int | None = None
        self._subscriber = ""
        self._wants_samples = False

    # --- bytes ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.pause_bytes)
        asyncio.get_running_loop().call_later(self._limits.hello_s, self.drop_silent)
        if self._unwanted:
            self.drop_silent()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for task in self._tasks:
            task.cancel()
        self._sessions.ended(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.wake()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._peer.feed(data):
                self._take_in(message)
        except ProtocolError as error:
            self.drop(f"it broke the protocol: {error}")

    def drop(self, reason: str) -> None:
        """Close the connection at once; a subscriber comes back with its cursor."""
        if self._transport is not None:
            log.info("a client is dropped: %s", reason)
            self._transport.abort()
            self._transport = None

    def drop_silent(self) -> None:
        """Close the connection of a client that has not said hello. Not logged: anybody can be one, often."""
        self._unwanted = True  # it may not even be connected yet
        if self._transport is not None and not self.greeted:
            self._transport.abort()
            self._transport = None

    def close(self) -> None:
        """Close the connection once what waits for it is written."""
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > self._limits.drop_bytes:
            self.drop("more waits for it than is kept")

    def _has_room(self) -> bool:
        return self._transport is not None and not self._paused

    # --- requests ---

    def _take_in(self, message: object) -> None:
        if self._transport is None:
            return
        if isinstance(message, BadRequest):
            self._write(self._peer.fail(message.id, message.error, message.text))
        elif not isinstance(message, Request):
            raise ProtocolError("clients send requests only")
        elif self._refusal is not None:
            self._write(self._peer.fail(message.id, REFUSED, self._refusal, "too_many_clients"))
            self.close()
        elif not self.greeted and message.method != "hello":
            self._write(self._peer.fail(message.id, INVALID_REQUEST, "say hello first", "hello_first"))
        elif len(self._tasks) >= self._limits.requests:
            self._write(self._peer.fail(message.id, REFUSED, "too many requests at once", "too_many_requests"))
        else:
            task = asyncio.ensure_future(self._serve(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: Request) -> None:
        try:
            answer = self._peer.reply(request.id, await self._handlers[request.method](request.params))
        except RefusedError as error:
            answer = self._peer.fail(request.id, REFUSED, str(error), error.code)
        except Exception as error:
            log.exception("%s failed inside the agent", request.method)
            answer = self._peer.fail(request.id, INTERNAL_ERROR, f"a mistake inside the agent: {type(error).__name__}")
        self._write(answer)
        self.wake()

    async def _hello(self, params: object) -> HelloResult:
        hello = cast(HelloParams, params)
        protocol = min(hello.protocol_max, PROTOCOL_MAX)
        if protocol < max(hello.protocol_min, PROTOCOL_MIN):
            theirs, ours = f"{hello.protocol_min}..{hello.protocol_max}", f"{PROTOCOL_MIN}..{PROTOCOL_MAX}"
            text = f"no common protocol: the client speaks {theirs}, agent {__version__} speaks {ours}"
            raise RefusedError("protocol_version", text)
        self.greeted = True
        journal = self._supervisor.journal
        return HelloResult(
            protocol,
            __version__,
            journal.journal_uuid,
            self._supervisor.boot_id,
            journal.oldest_seq,
            journal.newest_seq,
            hostfacts.hostname(),
            hostfacts.user_name(),
            os.getpid(),
            sys.version.split()[0],
            self._supervisor.options.heartbeat_s,
            time.monotonic_ns(),
            time.time_ns(),
        )

    async def _subscribe(self, params: object) -> SubscribeResult:
        wanted = cast(SubscribeParams, params)
        newest_seq = self._supervisor.journal.newest_seq
        if not 0 <= wanted.after_seq <= newest_seq:
            raise RefusedError("bad_cursor", f"event {wanted.after_seq} does not exist; the newest is {newest_seq}")
        if wanted.subscriber:
            self._supervisor.events.cursors.subscribe(wanted.subscriber, wanted.after_seq, time.time_ns())
            self._supervisor.events.cursors_changed()
        self._subscriber, self._wants_samples = wanted.subscriber, wanted.samples
        self._next_seq = wanted.after_seq + 1
        return SubscribeResult(max(self._next_seq, self._supervisor.journal.oldest_seq))

    async def _ack(self, params: object) -> Empty:
        ack = cast(AckParams, params)
        self._supervisor.events.ack(ack.subscriber, ack.seq)
        return Empty()

    # --- what it is told ---

    def wake(self) -> None:
        """Send what the journal has and the client has room for."""
        if self._next_seq is None or not self._has_room():
            return
        journal = self._supervisor.journal
        if journal.oldest_seq > self._next_seq:
            self._write(self._peer.notify("gap", Gap(self._next_seq, journal.oldest_seq - 1)))
            self._next_seq = journal.oldest_seq
        try:
            events = journal.read(self._next_seq - 1, BATCH_EVENTS)
        except JournalError as error:
            log.error("%s", error)
            self.drop("the journal can't be read")
            return
        for event in events:
            if not self._has_room():
                return
            self._write(self._peer.notify("event", event))
            self._next_seq = event.seq + 1
        if self._next_seq <= journal.newest_seq:
            asyncio.get_running_loop().call_soon(self.wake)

    def heartbeat(self) -> None:
        """Say that the agent lives, and see whether the client does."""
        if not self.greeted or self._transport is None:
            return
        waiting = self._transport.get_write_buffer_size()
        if not self._paused or waiting < self._waiting_bytes:
            self._moved_s = time.monotonic()
        self._waiting_bytes = waiting
        if time.monotonic() - self._moved_s > self._limits.stall_s:
            self.drop(f"it took nothing for {self._limits.stall_s:g} s")
        elif not self._paused:
            beat = Heartbeat(time.monotonic_ns(), self._supervisor.journal.newest_seq)
            self._write(self._peer.notify("heartbeat", beat))

    def sample(self, sample: Sample) -> None:
        """Send a sample, unless the client lags."""
        if self._wants_samples and self._has_room():
            self._write(self._peer.notify("sample", sample))

    def touch(self) -> None:
        """Note that its subscriber is still there."""
        if self._subscriber:
            self._supervisor.events.cursors.touch(self._subscriber, time.time_ns())
