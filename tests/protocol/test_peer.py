"""Both ends of a conversation without a wire, and one end with garbage on it."""

from __future__ import annotations

import itertools
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from remote_agent.protocol.framing import ProtocolError
from remote_agent.protocol.messages import (
    EVENT_KINDS,
    METHODS,
    AckParams,
    Empty,
    Event,
    Finding,
    Gap,
    HelloParams,
    SubscribeParams,
    SubscribeResult,
    UnknownData,
)
from remote_agent.protocol.peer import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    REFUSED,
    BadRequest,
    ErrorReply,
    Notification,
    Peer,
    Reply,
    Request,
)

json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=10), inner, max_size=3)),
    max_leaves=8,
)
messages = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0")},
    optional={
        "id": st.one_of(st.integers(-2, 5), json_values),
        "method": st.one_of(st.sampled_from([*METHODS, "event", "gap"]), json_values),
        "params": json_values,
        "result": json_values,
        "error": json_values,
    },
)


@given(st.text(max_size=20), st.integers(0, 2**40), st.lists(st.integers(0, 200), max_size=8))
def test_a_request_and_its_answer_cross_any_split(name: str, seq: int, at: list[int]) -> None:
    """What one end asks the other hears, typed; what that answers comes back under the same id."""
    client, server = Peer(), Peer()
    ident, data = client.request("subscribe", SubscribeParams(name, seq))
    places = sorted({0, len(data), *(place for place in at if place < len(data))})
    heard = [m for start, end in itertools.pairwise(places) for m in server.feed(data[start:end])]

    assert heard == [Request(ident, "subscribe", SubscribeParams(name, seq))]
    assert client.feed(server.reply(ident, SubscribeResult(seq + 1))) == [
        Reply(ident, "subscribe", SubscribeResult(seq + 1))
    ]


def test_an_error_keeps_its_code_and_its_word() -> None:
    """A program can act on the stable word, a person on the text."""
    client, server = Peer(), Peer()
    ident, data = client.request("ack", AckParams("laptop", 1))
    server.feed(data)

    assert client.feed(server.fail(ident, REFUSED, "no such subscriber", "unknown_subscriber")) == [
        ErrorReply(ident, "ack", REFUSED, "no such subscriber", "unknown_subscriber")
    ]


def test_events_arrive_with_their_kind_s_data() -> None:
    """A known kind has its type; an unknown one is kept as it is."""
    client, server = Peer(), Peer()
    known = Event(1, None, 2, 3, "finding", Finding("code", "info", "text"))
    future = Event(2, None, 2, 3, "run.teleported", {"where": "mars"})

    assert client.feed(server.notify("event", known) + server.notify("event", future)) == [
        Notification("event", known),
        Notification("event", Event(2, None, 2, 3, "run.teleported", UnknownData({"where": "mars"}))),
    ]
    assert client.feed(server.notify("gap", Gap(1, 2))) == [Notification("gap", Gap(1, 2))]


@pytest.mark.parametrize("kind", EVENT_KINDS)
def test_an_event_whose_data_do_not_fit_is_kept_and_says_why(kind: str) -> None:
    """It is durable: a conversation that ended for it would end at each replay, and never get past it."""
    odd = Event(7, None, 2, 3, kind, ["not", "a", "table"])
    after = Event(8, None, 2, 3, "finding", Finding("code", "info", "text"))

    read, following = Peer().feed(Peer().notify("event", odd) + Peer().notify("event", after))

    assert isinstance(read, Notification)
    assert isinstance(read.params, Event)
    assert read.params.seq == 7
    assert read.params.data == UnknownData(["not", "a", "table"], f"{kind}: expected a table, got a list")
    assert read.raw == ["not", "a", "table"]
    assert following == Notification("event", after)


@given(st.binary(max_size=200))
def test_garbage_raises_only_a_protocol_error(data: bytes) -> None:
    """No bytes make an end raise anything else, or make it believe in a message."""
    peer = Peer()
    try:
        found = peer.feed(data + b"\n")
    except ProtocolError:
        return
    assert found == []


@given(st.lists(messages, max_size=3))
def test_any_json_rpc_is_a_message_or_a_protocol_error(sent: list[dict[str, object]]) -> None:
    """Well-formed JSON of any content is understood, answered with an error, or refused."""
    peer = Peer()
    for message in sent:
        try:
            found = peer.feed(json.dumps(message).encode() + b"\n")
        except ProtocolError:
            return
        assert all(isinstance(m, (Request, BadRequest, Notification)) for m in found)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ({"id": 1, "method": "no.such", "params": {}}, METHOD_NOT_FOUND),
        ({"id": 1, "method": "ack", "params": {"seq": "x"}}, INVALID_PARAMS),
        ({"id": 1, "method": "ack", "params": [1]}, INVALID_PARAMS),
    ],
)
def test_a_request_that_can_be_answered_is_a_bad_request(body: dict[str, object], number: int) -> None:
    """Its id is known, so the mistake is its sender's to hear, not the connection's end."""
    (found,) = Peer().feed(json.dumps({"jsonrpc": "2.0", **body}).encode() + b"\n")

    assert isinstance(found, BadRequest)
    assert (found.id, found.error) == (1, number)


def test_an_answer_that_nobody_asked_for_is_a_breach() -> None:
    """Neither an unknown id nor a second answer is taken."""
    client, server = Peer(), Peer()
    ident, data = client.request("ack", AckParams("laptop", 1))
    server.feed(data)
    answer = server.reply(ident, Empty())
    client.feed(answer)

    with pytest.raises(ProtocolError, match="not made"):
        client.feed(answer)
    with pytest.raises(ProtocolError, match="not made"):
        client.feed(server.reply(77, Empty()))


def test_an_answer_of_the_wrong_shape_is_a_breach() -> None:
    """A result that does not fit its method is never handed on."""
    client = Peer()
    ident, _ = client.request("hello", HelloParams("me"))

    with pytest.raises(ProtocolError, match="does not fit"):
        client.feed(json.dumps({"jsonrpc": "2.0", "id": ident, "result": {"protocol": "one"}}).encode() + b"\n")
