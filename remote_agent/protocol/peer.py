"""One end of a JSON-RPC 2.0 conversation: bytes in, typed messages out, no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Union

from remote_agent.protocol.codec import DecodeError, decode, encode
from remote_agent.protocol.framing import FrameReader, ProtocolError, frame
from remote_agent.protocol.messages import EVENT_KINDS, METHODS, NOTIFICATIONS, Event, UnknownData

INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
REFUSED = -32000
"""A request that was understood and is refused; ``data.code`` says why."""


@dataclass(frozen=True)
class Request:
    id: int
    method: str
    params: object


@dataclass(frozen=True)
class BadRequest:
    """A request that can be answered only with an error; `Peer.fail` sends it."""

    id: int
    error: int
    text: str


@dataclass(frozen=True)
class Reply:
    id: int
    method: str
    result: object


@dataclass(frozen=True)
class ErrorReply:
    id: int
    method: str
    error: int
    text: str
    code: str | None = None


@dataclass(frozen=True)
class Notification:
    """``raw`` is an event's data as it was sent, for whoever keeps what this version does not know."""

    method: str
    params: object
    raw: object = field(default=None, compare=False)


Incoming = Union[Request, BadRequest, Reply, ErrorReply, Notification]


class Peer:
    """Keeps the ids of one conversation and checks every message against its type.

    A request with bad parameters becomes a `BadRequest`, data of an event that do not fit
    its kind stay in it as `UnknownData`; anything else that does not fit raises
    ProtocolError, after which the stream must be closed.
    """

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._next_id = 1
        self._outstanding: dict[int, str] = {}

    def request(self, method: str, params: object) -> tuple[int, bytes]:
        """Return the id and the bytes of a new request."""
        ident, self._next_id = self._next_id, self._next_id + 1
        data = _dump({"id": ident, "method": method, "params": encode(params)})
        self._outstanding[ident] = method
        return ident, data

    def notify(self, method: str, params: object) -> bytes:
        return _dump({"method": method, "params": encode(params)})

    def reply(self, ident: int, result: object) -> bytes:
        return _dump({"id": ident, "result": encode(result)})

    def fail(self, ident: int, error: int, text: str, code: str | None = None) -> bytes:
        """Return an error reply; ``code`` is the stable word a program can act on."""
        body: dict[str, object] = {"code": error, "message": text[:4000]}
        if code is not None:
            body["data"] = {"code": code}
        return _dump({"id": ident, "error": body})

    def feed(self, data: bytes) -> list[Incoming]:
        """Return the messages that ``data`` completes.

        Raises: ProtocolError for bytes that are no message of this protocol.
        """
        return [self._parse(line) for line in self._reader.feed(data)]

    def end(self) -> None:
        """Say that the stream ended. Raises: ProtocolError if it ended inside a message."""
        self._reader.end()

    def _parse(self, line: bytes) -> Incoming:
        try:
            message = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not JSON: {line[:60]!r}") from error
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            raise ProtocolError(f"not JSON-RPC 2.0: {line[:60]!r}")
        if "method" not in message:
            return self._parse_answer(message)
        if "id" in message:
            return _parse_request(message)
        return _parse_notification(message)

    def _parse_answer(self, message: Mapping[str, object]) -> Incoming:
        ident = message.get("id")
        if isinstance(ident, bool) or not isinstance(ident, int) or ident not in self._outstanding:
            raise ProtocolError(f"an answer to a request that was not made: id {str(ident)[:40]}")
        method = self._outstanding.pop(ident)
        if "error" in message:
            return _parse_error(ident, method, message["error"])
        try:
            return Reply(ident, method, decode(METHODS[method].result, message.get("result"), path=method))
        except DecodeError as error:
            raise ProtocolError(f"the answer to {method} does not fit: {error}"[:500]) from error


def _dump(message: Mapping[str, object]) -> bytes:
    return frame(json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":"), allow_nan=False).encode("utf-8"))


def _parse_request(message: Mapping[str, object]) -> Incoming:
    ident, name = message["id"], message["method"]
    if isinstance(ident, bool) or not isinstance(ident, int) or not isinstance(name, str):
        raise ProtocolError("a request's id must be an integer and its method text")
    if name not in METHODS:
        return BadRequest(ident, METHOD_NOT_FOUND, f"no such method: {name[:80]}")
    try:
        return Request(ident, name, decode(METHODS[name].params, message.get("params", {})))
    except DecodeError as error:
        return BadRequest(ident, INVALID_PARAMS, str(error))


def _parse_notification(message: Mapping[str, object]) -> Incoming:
    name = message["method"]
    if not isinstance(name, str) or name not in NOTIFICATIONS:
        raise ProtocolError(f"no such notification: {str(name)[:80]}")
    try:
        params: object = decode(NOTIFICATIONS[name], message.get("params", {}))
        if isinstance(params, Event):
            return Notification(name, _read_event(params), params.data)
        return Notification(name, params)
    except DecodeError as error:
        raise ProtocolError(f"a notification does not fit: {name}: {error}"[:500]) from error


def _parse_error(ident: int, method: str, body: object) -> ErrorReply:
    if not isinstance(body, dict):
        raise ProtocolError("an error reply must be an object")
    number, data = body.get("code"), body.get("data")
    code = data.get("code") if isinstance(data, dict) else None
    return ErrorReply(
        ident,
        method,
        number if isinstance(number, int) else INTERNAL_ERROR,
        str(body.get("message", "")),
        str(code) if code is not None else None,
    )


def decode_event(event: Event) -> Event:
    """Return ``event`` with its data as the dataclass of its kind.

    Raises: DecodeError if the data do not fit the kind.
    """
    cls = EVENT_KINDS.get(event.kind)
    return replace(event, data=UnknownData(event.data) if cls is None else decode(cls, event.data, path=event.kind))


def _read_event(event: Event) -> Event:
    """Return ``event`` decoded, unreadable data included: as a breach it would end each replay for ever."""
    try:
        return decode_event(event)
    except DecodeError as error:
        return replace(event, data=UnknownData(event.data, str(error)[:500]))
