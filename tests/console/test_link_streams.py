"""What a link makes of streams: hostile text, broken pieces, what no version knows."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from console.clean import clean
from console.state import LinkStatus
from remote_agent.protocol.messages import Empty, Finding, Probe, UnknownData
from tests.console.links import connected, linked, soon
from tests.console.sshd import stub_node
from tests.console.stub_agent import HOSTILE, JOURNAL


async def test_hostile_text_reaches_a_sink_cleaned_and_its_raw_form_as_ascii_json(tmp_path: Path) -> None:
    """Every text in hello, events and answers has passed `clean`; the raw JSON keeps it for the history."""
    async with linked(stub_node("hostile"), tmp_path) as (link, kept):
        await soon(connected(kept), "connected")
        await soon(lambda: len(kept.events) == len(HOSTILE), "every event")
        probe = await link.request("probe", Empty())

    for (_, event, raw_json), text in zip(kept.events, HOSTILE.values(), strict=True):
        assert isinstance(event.data, Finding)
        assert event.data.text == clean(text, 4096)
        assert event.data.text.isprintable()
        assert raw_json.isascii()
        assert raw_json.isprintable()
        assert json.loads(raw_json)["text"] == text
    assert kept.hellos[0].hostname.isprintable()
    assert isinstance(probe, Probe)
    assert probe.hostname == "ab"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("long line", "over the limit of 1048576"),
        ("half line", "ended 17"),
        ("invalid utf-8", "not JSON"),
        ("nul", "not JSON"),
        ("deep", "not JSON"),
        ("not a number", "broke the protocol"),
        ("unknown notification", "no such notification"),
        ("asks", "an agent asks nothing"),
        ("unasked answer", "was not made"),
    ],
)
async def test_a_broken_stream_ends_with_a_reason_and_a_new_try(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, script: str, reason: str
) -> None:
    """What an agent must not send costs it the connection, never the console."""
    caplog.set_level(logging.ERROR)
    async with linked(stub_node(script), tmp_path) as (_, kept):
        again = (LinkStatus.CONNECTING, LinkStatus.DISCONNECTED) * 2  # it may break before it counts as connected
        await soon(lambda: kept.saw(*again), "a second try")

    lost = next(state for state in kept.states if state.status is LinkStatus.DISCONNECTED)
    assert reason in str(lost.reason)
    assert not lost.final
    assert lost.retry_at_s is not None
    assert str(lost.reason).isprintable()
    assert not caplog.records


async def test_whole_events_before_half_a_line_are_kept(tmp_path: Path) -> None:
    """A stream that ends inside a message loses that message only."""
    async with linked(stub_node("half line"), tmp_path) as (_, kept):
        await soon(lambda: bool(kept.events), "the whole event")

    assert kept.events[0][1].seq == 1


async def test_events_that_nest_deeper_than_any_wire_type_are_cut(tmp_path: Path) -> None:
    """Cleaning has a depth limit; the raw form is kept whole."""
    async with linked(stub_node("nested"), tmp_path) as (_, kept):
        await soon(lambda: bool(kept.events), "the event")

    _, event, raw_json = kept.events[0]
    assert isinstance(event.data, UnknownData)
    assert "…" in repr(event.data)
    assert "\x1b" not in repr(event.data)
    assert raw_json.count("[") == 201


async def test_an_event_of_an_unknown_kind_is_passed_on_cleaned(tmp_path: Path) -> None:
    """A newer agent's events are kept, keys and values cleaned."""
    async with linked(stub_node("unknown kind"), tmp_path) as (_, kept):
        await soon(lambda: bool(kept.events), "the event")

    assert kept.events[0][1].data == UnknownData({"a": ("", 1.5, None, True)})


async def test_an_event_that_can_t_be_read_is_passed_on_and_the_link_stays(tmp_path: Path) -> None:
    """It is stored as it was sent and acknowledged like any other, or no later one would ever come."""
    async with linked(stub_node("unreadable"), tmp_path) as (_, kept):
        await soon(lambda: len(kept.events) == 2, "the event after it")

    _, event, raw_json = kept.events[0]
    assert isinstance(event.data, UnknownData)
    assert event.data.problem == "run.stage.stage: expected a table, got text"
    assert json.loads(raw_json) == {"stage": "\x1b[2J"}
    assert not kept.saw(LinkStatus.DISCONNECTED)


@pytest.mark.parametrize(("script", "theirs"), [("future mark", "7 to 9"), ("future hello", "9")])
async def test_a_future_protocol_is_final_and_says_what_to_upgrade(tmp_path: Path, script: str, theirs: str) -> None:
    """No retry mends a version; `retry_now` tries again all the same."""
    async with linked(stub_node(script), tmp_path) as (link, kept):
        await soon(lambda: kept.state.final, "final")
        assert f"speaks protocol {theirs}, this console 1: upgrade the console" in str(kept.state.reason)
        assert kept.state.retry_at_s is None
        count = len(kept.states)
        link.retry_now()
        await soon(lambda: len(kept.states) > count and kept.state.final, "a second final")


async def test_gaps_and_duplicates_are_passed_on_as_they_are(tmp_path: Path) -> None:
    """Contiguity is the recorder's business; the link hides nothing."""
    async with linked(stub_node("gap"), tmp_path) as (_, kept):
        await soon(lambda: bool(kept.events), "the event after the gap")
    assert [(journal, gap.from_seq, gap.to_seq) for journal, gap in kept.gaps] == [(JOURNAL, 1, 7)]

    async with linked(stub_node("duplicates"), tmp_path) as (_, kept):
        await soon(lambda: len(kept.events) == 5, "five events")
    assert [event.seq for _, event, _ in kept.events] == [1, 2, 2, 1, 3]
