"""A link against a real process that speaks the protocol well, badly, or not at all."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.clean import clean_record
from console.config_nodes import Node
from console.errors import NodeUnreachable, RequestRefused
from console.link import Timing, backoff_s
from console.link_session import Session
from console.state import LinkStatus
from console.transports.base import Stream
from console.transports.command import open_command
from remote_agent.protocol.messages import Empty, Finding, RunUidParams
from tests.console.links import QUICK, Kept, connected, linked, soon
from tests.console.sshd import stub_node
from tests.console.stub_agent import JOURNAL


async def test_a_link_connects_says_hello_and_subscribes_after_its_cursor(tmp_path: Path) -> None:
    """The journal that hello names decides where the subscription starts."""
    log = tmp_path / "requests"
    async with linked(stub_node(log=log), tmp_path, cursor=lambda journal: 41 if journal == JOURNAL else 0) as (
        _,
        kept,
    ):
        await soon(connected(kept), "connected")

    requests = [json.loads(line) for line in log.read_text().splitlines()]
    assert [request["method"] for request in requests] == ["hello", "subscribe"]
    assert requests[1]["params"] == {"subscriber": "subscriber-1", "after_seq": 41, "samples": True}
    assert kept.hellos[0].journal_uuid == JOURNAL
    assert [state.status for state in kept.states] == [
        *[LinkStatus.CONNECTING] * 2,
        LinkStatus.CONNECTED,
        LinkStatus.IDLE,
    ]


async def test_login_noise_before_the_mark_is_passed_over(tmp_path: Path) -> None:
    """ANSI, something like JSON-RPC and a mark with another token do no harm."""
    async with linked(stub_node("noisy"), tmp_path) as (_, kept):
        await soon(connected(kept), "connected")


async def test_a_heartbeat_in_one_piece_with_the_answer_to_hello_is_no_fault(tmp_path: Path) -> None:
    """As it comes over a network that holds packets back."""
    async with linked(stub_node("beat with hello"), tmp_path) as (_, kept):
        await soon(connected(kept), "connected")

    assert [state.status for state in kept.states] == [
        *[LinkStatus.CONNECTING] * 2,
        LinkStatus.CONNECTED,
        LinkStatus.IDLE,
    ]


async def test_missing_heartbeats_make_a_link_silent_and_then_drop_it(tmp_path: Path) -> None:
    """Silence comes first, is not yet a lost link, and says how long."""
    async with linked(stub_node("silent", heartbeat_s=0.05), tmp_path) as (_, kept):
        await soon(
            lambda: kept.saw(LinkStatus.CONNECTED, LinkStatus.SILENT, LinkStatus.DISCONNECTED, LinkStatus.CONNECTED),
            "silent, dropped, connected again",
        )

    reasons = {state.status: state.reason for state in kept.states if state.reason}
    assert reasons[LinkStatus.SILENT] == "no heartbeat for 0.15 s"
    assert reasons[LinkStatus.DISCONNECTED] == "no heartbeat for 0.3 s"


async def test_a_silent_link_is_connected_again_when_anything_comes(tmp_path: Path) -> None:
    """An answer is a sign of life as good as a heartbeat."""
    timing = Timing(silent_beats=1.0)
    async with linked(stub_node("mute", heartbeat_s=1.0), tmp_path, timing=timing) as (link, kept):
        await soon(lambda: kept.state.status is LinkStatus.SILENT, "silent")
        await link.request("probe", Empty())
        await soon(connected(kept), "connected again")


async def test_no_agent_is_said_with_what_the_host_printed_and_how_it_ended(tmp_path: Path) -> None:
    """The reason holds the command's own words and its exit status."""
    async with linked(stub_node("no agent"), tmp_path) as (_, kept):
        await soon(lambda: kept.state.status is LinkStatus.DISCONNECTED, "disconnected")

    reason = next(state.reason for state in kept.states if state.status is LinkStatus.DISCONNECTED)
    told, _, remedy = str(reason).partition("; ")
    assert told == "no agent: env ended with 3: python3: can't open file 'agent.pyz'"
    assert remedy == "glowplug deploy puts it there over SSH, or set the node's agent to where it is"


async def test_a_python_without_the_agent_is_told_what_it_lacks(tmp_path: Path) -> None:
    """The first connection to a new host says what to copy and what to set."""
    new = Node("n1", transport=(sys.executable, "-c", "import sys; sys.exit('p: No module named remote_agent')"))
    async with linked(new, tmp_path) as (_, kept):
        await soon(lambda: kept.state.status is LinkStatus.DISCONNECTED, "disconnected")

    reason = next(state.reason for state in kept.states if state.status is LinkStatus.DISCONNECTED)
    assert str(reason).endswith("or copy glowplug-agent.pyz there and set the node's agent to its path")


async def test_a_python_that_is_too_old_for_the_agent_is_told_where_to_look(tmp_path: Path) -> None:
    """What the agent's file says on an old Python comes with the verb that finds another one."""
    said = "glowplug-agent: Python 3.10 or newer is needed, this is 3.8.18"
    old = Node("n1", transport=(sys.executable, "-c", f"import sys; sys.exit({said!r})"))
    async with linked(old, tmp_path) as (_, kept):
        await soon(lambda: kept.state.status is LinkStatus.DISCONNECTED, "disconnected")

    reason = next(state.reason for state in kept.states if state.status is LinkStatus.DISCONNECTED)
    assert f"{said}; glowplug deploy --check names one there that fits" in str(reason)


async def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    """What `sh` says about the host's Python is the reason."""
    async with linked(stub_node(python=("no-such-python3",)), tmp_path) as (_, kept):
        await soon(lambda: kept.state.status is LinkStatus.DISCONNECTED, "disconnected")

    reason = str(next(state.reason for state in kept.states if state.status is LinkStatus.DISCONNECTED))
    assert "no-such-python3" in reason
    assert "not found" in reason
    assert "127" in reason


async def test_whoever_gives_up_on_a_silent_host_is_told_how_far_it_came(tmp_path: Path) -> None:
    """The link has more patience than a verb; until it gives up its state says that the host is there."""
    async with linked(stub_node("never a mark"), tmp_path) as (_, kept):
        await soon(lambda: kept.state.reason is not None, "a word on it")

    reached = next(state for state in kept.states if state.reason is not None)
    assert reached.status is LinkStatus.CONNECTING
    assert reached.reason == "the host is reached, and nothing has come of its agent yet"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("never a mark", "no agent: nothing within 0.5 s; a start-up file there may wait"),
        ("endless noise", "no agent answered"),
    ],
)
async def test_a_host_without_a_mark_is_given_up(tmp_path: Path, script: str, reason: str) -> None:
    """Neither silence nor endless noise holds a link up."""
    timing = Timing(mark_s=0.5 if script == "never a mark" else 30.0, backoff_first_s=0.05)
    async with linked(stub_node(script), tmp_path, timing=timing) as (_, kept):
        await soon(lambda: kept.state.status is LinkStatus.DISCONNECTED, "disconnected")

    assert reason in str(next(state.reason for state in kept.states if state.status is LinkStatus.DISCONNECTED))


async def test_a_refusal_is_raised_with_its_code_and_cleaned_text(tmp_path: Path) -> None:
    """A program can act on the code, a person can read the text."""
    async with linked(stub_node(), tmp_path) as (link, kept):
        await soon(connected(kept), "connected")
        with pytest.raises(RequestRefused) as refused:
            await link.request("run.cancel", RunUidParams("12345678"))
        with pytest.raises(RequestRefused) as unknown:
            await link.request("resident.list", Empty())

    assert (refused.value.code, str(refused.value)) == ("no_such_run", "ab")
    assert unknown.value.code == "method_not_found"


async def test_a_request_without_an_answer_or_a_link_is_unreachable(tmp_path: Path) -> None:
    """Time-out, a link that is down, and a link that ends meanwhile are all `NodeUnreachable`, exit code 3."""
    async with linked(stub_node(), tmp_path) as (link, kept):
        await soon(connected(kept), "connected")
        with pytest.raises(NodeUnreachable, match=r"no answer to status within 0\.1 s"):
            await link.request("status", Empty(), timeout_s=0.1)
        asking = asyncio.ensure_future(link.request("status", Empty()))
        await asyncio.sleep(0)
        await link.stop()
        with pytest.raises(NodeUnreachable, match="the link was stopped"):
            await asking
        with pytest.raises(NodeUnreachable, match="gpu-1: not connected") as down:
            await link.request("status", Empty())

    assert down.value.exit_code == 3


async def test_acks_of_the_current_journal_are_sent_newest_only(tmp_path: Path) -> None:
    """A burst of acks becomes few; an ack of another journal, or an older one, is not sent."""
    log = tmp_path / "requests"
    async with linked(stub_node(log=log), tmp_path) as (link, kept):
        await soon(connected(kept), "connected")
        link.ack("another-journal", 999)
        for seq in range(1, 501):
            link.ack(JOURNAL, seq)
        link.ack(JOURNAL, 3)

        def acks() -> list[int]:
            requests = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
            return [request["params"]["seq"] for request in requests if request["method"] == "ack"]

        await soon(lambda: 500 in acks(), "the newest ack")

    assert acks() == sorted(acks())
    assert len(acks()) < 10
    assert 999 not in acks()


async def test_reading_pauses_while_the_sink_is_not_ready(tmp_path: Path) -> None:
    """A sink that can't keep up holds the host back; nothing is lost and the link does not count as silent."""

    class Slow(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.open, self.asked = asyncio.Event(), asyncio.Event()

        async def ready(self) -> None:
            if self.events:
                self.asked.set()
                await self.open.wait()

    slow = Slow()
    async with linked(stub_node("flood", heartbeat_s=0.2), tmp_path, sink=slow):
        await soon(slow.asked.is_set, "the first events")
        held = len(slow.events)
        await asyncio.sleep(1.0)  # five heartbeats: silence would show by now, and so would reading on
        assert len(slow.events) == held < 20_000
        assert slow.state.status is LinkStatus.CONNECTED
        slow.open.set()
        await soon(lambda: len(slow.events) == 20_000, "every event")

    assert [event.seq for _, event, _ in slow.events] == list(range(1, 20_001))


async def test_an_outage_keeps_the_time_it_began_and_its_reason_through_every_try(tmp_path: Path) -> None:
    """The age of an outage is not the age of its latest try."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    async with linked(stub_node("no agent"), tmp_path, clock=clock) as (_, kept):
        await soon(lambda: len([s for s in kept.states if s.status is LinkStatus.DISCONNECTED]) >= 3, "three tries")

    down = [state for state in kept.states if state.status is LinkStatus.DISCONNECTED]
    again = [state for state in kept.states[2:] if state.status is LinkStatus.CONNECTING]
    assert [state.failures for state in down[:3]] == [1, 2, 3]
    assert len({state.since_s for state in down + again}) == 1
    assert all(state.reason == down[0].reason for state in again)
    assert all(state.retry_at_s is not None and state.retry_at_s > state.since_s for state in down)


async def test_a_link_that_is_down_holds_nothing_of_the_connection_it_lost(tmp_path: Path) -> None:
    """Its reason stays, without the stream that its traceback would keep."""
    streams: list[weakref.ref[Any]] = []

    async def opened(node: Node, token: str) -> Stream:
        stream = await open_command(node, token)
        streams.append(weakref.ref(stream))
        return stream

    slow = dataclasses.replace(QUICK, backoff_first_s=60.0, backoff_limit_s=60.0)
    async with linked(stub_node("half line"), tmp_path, open_stream=opened, timing=slow) as (link, kept):
        await soon(lambda: kept.state.status is LinkStatus.DISCONNECTED, "lost")
        gc.collect()
        assert [stream() for stream in streams] == [None]
        assert link.error is not None


async def test_an_error_of_our_own_is_logged_and_shown_but_never_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sink that fails takes its link down with a reason, not the console."""

    class Broken(Kept):
        def hello(self, hello: object) -> None:
            raise RuntimeError("a bug")

    async with linked(stub_node(), tmp_path, sink=Broken()) as (_, kept):
        await soon(lambda: kept.state.status is LinkStatus.DISCONNECTED, "disconnected")

    assert any("internal error: RuntimeError: a bug" in str(state.reason) for state in kept.states)
    assert "link failed" in caplog.text


async def test_a_request_given_up_while_the_link_ends_leaves_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    """Its answer's failure is nobody's to look at, and no line in the log."""

    class Stuck:
        def __init__(self) -> None:
            self.cancelled, self.ended = asyncio.Event(), asyncio.Event()

        async def read(self) -> bytes:
            await self.ended.wait()
            return b""

        async def write(self, data: bytes) -> None:
            try:
                await self.ended.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                await self.ended.wait()
                raise

        async def close(self) -> None:
            self.ended.set()

        def abort(self) -> None:
            self.ended.set()

        def exit_reason(self) -> str | None:
            return None

    stream = Stuck()
    session = Session(stream, "token", "me", lambda _: 0, Kept(), Timing())
    asking = asyncio.ensure_future(session.request("probe", Empty(), 5.0))
    await asyncio.sleep(0)
    asking.cancel()
    await stream.cancelled.wait()
    await session.close("stopped")
    await asyncio.wait({asking})
    del asking  # its error's frames hold the answer
    gc.collect()

    assert not caplog.records


async def test_a_stopped_link_can_start_again(tmp_path: Path) -> None:
    """Stop is idle, not the end."""
    async with linked(stub_node(), tmp_path) as (link, kept):
        await soon(connected(kept), "connected")
        await link.stop()
        assert kept.state.status is LinkStatus.IDLE
        link.start()
        await soon(connected(kept), "connected again")


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_backoff_grows_to_a_limit_and_is_never_the_same_for_all(failures: int, chance: float) -> None:
    """Between half and all of the doubled delay, within one minute."""
    delay_s = backoff_s(failures, Timing(), lambda: chance)

    assert 0.5 <= delay_s <= 60.0
    assert backoff_s(failures, Timing(), lambda: 0.0) < backoff_s(failures, Timing(), lambda: 1.0)


def test_records_stay_the_same_object_where_nothing_is_to_clean() -> None:
    """Cleaning costs nothing where there is nothing to clean."""
    finding = Finding("code", "info", "all is well")

    assert clean_record(finding) is finding
    assert QUICK.backoff_first_s < 1.0
