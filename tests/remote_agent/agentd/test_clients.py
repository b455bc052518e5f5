"""Clients of a real agent: cursors, replay, slow ones, hostile ones, and who is let in."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.agentd.launch import connect
from remote_agent.client import open_client
from remote_agent.errors import ConnectionLostError, RefusedError
from remote_agent.protocol.messages import (
    AckParams,
    Empty,
    Gap,
    Heartbeat,
    HelloParams,
    HelloResult,
    Probe,
    RunFinished,
    RunState,
    Sample,
    ShutdownParams,
    StatusResult,
    SubscribeParams,
    SubscribeResult,
)
from tests.remote_agent.agentd.agents import DEADLINE_S, Agent, Watcher, eventually


def raw(agent: Agent) -> socket.socket:
    link = connect(agent.state)
    assert link is not None
    link.settimeout(DEADLINE_S)
    return link


def received(link: socket.socket) -> bytes:
    """Return everything up to the end of the stream."""
    data = b""
    try:
        while part := link.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def ask(link: socket.socket, message: object) -> dict[str, object]:
    link.sendall(json.dumps(message).encode() + b"\n")
    data = b""
    while not data.endswith(b"\n"):
        data += link.recv(65536)
    answer = json.loads(data)
    assert isinstance(answer, dict)
    return answer


def test_two_subscribers_come_on_with_their_own_cursors(agent: Agent) -> None:
    """Each gets what is after its own place, whatever the other has, live and replayed alike."""
    with agent.client("one") as one:
        first = one.warm(agent.params("preflight:refuse"))
        newest = newest_seq(agent)
    with agent.client("one", after_seq=newest) as one, agent.client("two", after_seq=3) as two:
        second = one.warm(agent.params("preflight:refuse"))
        events = two.everything(newest_seq(agent))

    assert first.state is second.state is RunState.FAILED
    assert [event.seq for event in events] == list(range(4, events[-1].seq + 1))


def newest_seq(agent: Agent) -> int:
    with agent.client() as client:
        return client.greeting.newest_seq


def test_a_replay_after_a_break_has_every_event_once(agent: Agent) -> None:
    """A subscriber that goes away in the middle of a run and comes back with its cursor misses nothing."""
    params = agent.params("wait:weights")
    with agent.client("laptop") as client:
        client.begin(params)
        client.stage(params.run_uid, "weights")
        known = newest_seq(agent)
        client.call("ack", AckParams("laptop", known), Empty)
    agent.order("go-on", "")
    with agent.client("laptop", after_seq=known) as client:
        after = [client.next_event(lambda _: True)]
        while not isinstance(after[-1].data, RunFinished):
            after.append(client.next_event(lambda _: True))

    assert [event.seq for event in after] == list(range(known + 1, after[-1].seq + 1))


def test_cursors_outlive_the_agent(agent: Agent) -> None:
    """After SIGKILL and a restart the journal is the same one, and the events go on from where they were."""
    with agent.client("laptop") as client:
        client.warm(agent.params("preflight:refuse"))
        uuid, newest = client.greeting.journal_uuid, newest_seq(agent)
        client.call("ack", AckParams("laptop", newest), Empty)
    agent.kill()
    agent.start()
    with agent.client("laptop", after_seq=newest) as client:
        event = client.next_event(lambda _: True)

        assert client.greeting.journal_uuid == uuid
    assert (event.seq, event.kind) == (newest + 1, "daemon.started")


def test_what_everyone_has_is_trimmed_and_who_comes_later_is_told_the_gap(make_agent: Callable[..., Agent]) -> None:
    """Acknowledged segments go; a new subscriber hears which events it can't have, and gets the rest."""
    agent = make_agent(journal={"segment_bytes": 2000})
    with agent.client("laptop") as client:
        for _ in range(4):
            client.warm(agent.params("preflight:refuse"))
            client.call("ack", AckParams("laptop", newest_seq(agent)), Empty)
        oldest = client.hello("again").oldest_seq
    with agent.client() as late:
        late.call("subscribe", SubscribeParams("late"), SubscribeResult)
        gap = next(told.params for told in late.notifications() if isinstance(told.params, Gap))
        late.begin(agent.params("preflight:refuse"))
        event = late.next_event(lambda _: True)

    assert oldest > 1
    assert gap == Gap(1, oldest - 1)
    assert event.seq == oldest


def test_nothing_is_trimmed_before_everyone_has_it(make_agent: Callable[..., Agent]) -> None:
    """A subscriber that lags keeps its events, even while another acknowledges everything."""
    agent = make_agent(journal={"segment_bytes": 2000})
    with agent.client("slow") as slow, agent.client("quick") as quick:
        for _ in range(3):
            quick.warm(agent.params("preflight:refuse"))
            quick.call("ack", AckParams("quick", newest_seq(agent)), Empty)
        oldest = quick.hello("again").oldest_seq
        first = slow.next_event(lambda _: True)

    assert (oldest, first.seq) == (1, 1)


def test_a_client_that_reads_nothing_is_dropped_and_others_are_served(make_agent: Callable[..., Agent]) -> None:
    """A stalled client costs the agent its bounded buffer and is cut off; a run beside it ends as ever."""
    agent = make_agent(clients={"pause_bytes": 4096, "stall_s": 0.3})
    stalled = raw(agent)
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    ask(stalled, {"jsonrpc": "2.0", "id": 1, "method": "hello", "params": {"client": "stalled"}})
    stalled.sendall(b'{"jsonrpc":"2.0","id":2,"method":"subscribe","params":{"subscriber":"stalled"}}\n')
    with agent.client("") as client:
        while "a client is dropped: it took nothing" not in agent.log():
            assert client.warm(agent.params("preflight:refuse")).state is RunState.FAILED
        last = client.warm(agent.params())
    data = received(stalled)
    stalled.close()

    assert last.state is RunState.READY
    assert data.count(b"\n") > 1


def test_a_dropped_client_replays_what_it_missed(make_agent: Callable[..., Agent]) -> None:
    """After a drop, subscribing again from the last whole event gives the rest without loss."""
    agent = make_agent()
    with agent.client("laptop") as client:
        client.warm(agent.params("preflight:refuse"))
        newest = newest_seq(agent)
    with agent.client("laptop", after_seq=2) as client:
        events = client.everything(newest)

    assert [event.seq for event in events] == list(range(3, newest + 1))


@pytest.mark.parametrize(
    "attack",
    [
        b"\x00\xff\xfe garbage\n",
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b'{"jsonrpc":"2.0","method":"event","params":{}}\n',
        b'{"jsonrpc":"2.0","id":"text","method":"hello","params":{}}\n',
        b'{"jsonrpc":"2.0","id":9,"result":{}}\n',
        b"x" * (2 << 20),
    ],
    ids=["bytes", "deep", "no-jsonrpc", "notification", "text-id", "unasked-reply", "endless-line"],
)
def test_a_hostile_client_is_closed_and_nobody_else_notices(agent: Agent, attack: bytes) -> None:
    """Bytes that are no request close that client alone."""
    with agent.client("") as honest, raw(agent) as hostile:
        try:
            hostile.sendall(attack)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert received(hostile) == b""
        assert honest.warm(agent.params("preflight:refuse")).state is RunState.FAILED


@pytest.mark.parametrize(
    ("method", "params", "number"),
    [("no.such", {}, -32601), ("run.start", {"run_uid": "x"}, -32602), ("run.list", {"limit": 0}, -32602)],
)
def test_a_malformed_request_gets_an_error_and_the_client_stays(
    agent: Agent, method: str, params: object, number: int
) -> None:
    """Unknown methods and bad parameters are answered with JSON-RPC errors on a connection that lives on."""
    with raw(agent) as link:
        hello = ask(link, {"jsonrpc": "2.0", "id": 1, "method": "hello", "params": {"client": "c"}})
        answer = ask(link, {"jsonrpc": "2.0", "id": 2, "method": method, "params": params})

    assert "result" in hello
    error = answer["error"]
    assert isinstance(error, dict)
    assert error["code"] == number


def test_hello_must_come_first(agent: Agent) -> None:
    """Any other request before it is answered with a stable code, and hello still works afterwards."""
    link = raw(agent)
    with Watcher(link, agent.state) as client:
        with pytest.raises(RefusedError) as refused:
            client.call("probe", Empty(), Probe)
        client.hello("late")

    assert refused.value.code == "hello_first"


def test_a_client_that_never_says_hello_is_dropped(make_agent: Callable[..., Agent]) -> None:
    """Silence and half a request are both ended, without a word in the log; one that said hello stays."""
    agent = make_agent(clients={"hello_s": 0.2})
    with agent.client() as polite, raw(agent) as silent, raw(agent) as slow:
        slow.sendall(b'{"jsonrpc":')
        ends = received(silent), received(slow)

        assert ends == (b"", b"")
        assert polite.status().runs == ()
    assert "dropped" not in agent.log()


def test_silent_clients_lock_nobody_out(make_agent: Callable[..., Agent]) -> None:
    """At the limit the oldest that said nothing makes room; those that said hello stay."""
    agent = make_agent(clients={"clients": 3, "hello_s": 600})
    with agent.client() as polite, raw(agent) as oldest, raw(agent) as newest, agent.client() as late:
        assert received(oldest) == b""
        assert late.status().runs == polite.status().runs == ()
        assert "result" in ask(newest, {"jsonrpc": "2.0", "id": 1, "method": "hello", "params": {"client": "c"}})


def test_a_client_too_many_is_told_so(make_agent: Callable[..., Agent]) -> None:
    """It gets a stable code and the limit, without a line in the log for each; a place that is free is given again."""
    agent = make_agent(clients={"clients": 2})
    with agent.client(), agent.client() as second:
        for _ in range(40):
            with pytest.raises(RefusedError, match="2 clients are connected") as refused:
                agent.client()
            assert refused.value.code == "too_many_clients"
        assert "refused" not in agent.log()
        second.status()
    eventually(lambda: can_connect(agent), "there is room again")


def can_connect(agent: Agent) -> bool:
    try:
        with agent.client():
            return True
    except RefusedError:
        return False


def test_a_client_of_another_protocol_is_told_both_ranges(agent: Agent) -> None:
    """Versions without overlap end in an error that names what each side speaks."""
    with (
        Watcher(raw(agent), agent.state) as client,
        pytest.raises(RefusedError, match=r"speaks 7\.\.9.*speaks 1\.\.1") as refused,
    ):
        client.call("hello", HelloParams("future", 7, 9), HelloResult)

    assert refused.value.code == "protocol_version"


@pytest.mark.parametrize("seq", [-1, 10_000])
def test_a_cursor_that_cannot_be_is_refused(agent: Agent, seq: int) -> None:
    """Subscribing or acknowledging outside the journal is refused, so that nothing is trimmed by mistake."""
    with agent.client("laptop") as client:
        for method, params, result in (
            ("subscribe", SubscribeParams("laptop", seq), SubscribeResult),
            ("ack", AckParams("laptop", seq), Empty),
        ):
            with pytest.raises(RefusedError) as refused:
                client.call(method, params, result)
            assert refused.value.code == "bad_cursor"


def test_an_ack_of_nobody_is_refused(agent: Agent) -> None:
    """Only a subscriber can acknowledge."""
    with agent.client() as client, pytest.raises(RefusedError) as refused:
        client.call("ack", AckParams("nobody", 0), Empty)

    assert refused.value.code == "unknown_subscriber"


def test_too_many_requests_at_once_are_refused_one_by_one(make_agent: Callable[..., Agent]) -> None:
    """A client that does not wait for answers gets errors beyond its share, and the agent goes on."""
    agent = make_agent(clients={"requests": 4})
    with raw(agent) as link:
        ask(link, {"jsonrpc": "2.0", "id": 1, "method": "hello", "params": {"client": "c"}})
        line = '{"jsonrpc":"2.0","id":%d,"method":"probe","params":{}}\n'
        link.sendall("".join(line % number for number in range(2, 12)).encode())
        data = b""
        while b'"id":11' not in data:
            data += link.recv(65536)

    assert b"too_many_requests" in data


def test_heartbeats_and_samples_come_by_themselves(make_agent: Callable[..., Agent]) -> None:
    """A subscriber that asks for samples hears of the host; everyone hears the heart beat with the newest seq."""
    agent = make_agent(host_sample_s=0.05)
    with agent.client("", samples=True) as client:
        kinds: dict[type, object] = {}
        for notification in client.notifications():
            kinds.setdefault(type(notification.params), notification.params)
            if {Sample, Heartbeat} <= kinds.keys():
                break

    sample, heartbeat = kinds[Sample], kinds[Heartbeat]
    assert isinstance(sample, Sample)
    assert sample.host is not None
    assert sample.host.memory_total_bytes > sample.host.memory_available_bytes > 0
    assert isinstance(heartbeat, Heartbeat)
    assert heartbeat.newest_seq >= 1


def test_progress_of_a_run_is_sampled_without_a_seq(agent: Agent) -> None:
    """How far a stage is comes as a sample to those who asked for samples."""
    with agent.client("", samples=True) as client:
        params = agent.params("wait:assign")
        client.begin(params)
        found = None
        for notification in client.notifications():
            if isinstance(notification.params, Sample) and notification.params.progress:
                found = notification.params.progress
                break
        agent.order("go-on", "")
        client.finished(params.run_uid)

    assert found is not None
    assert (found.run_uid, found.stage, found.done, found.total) == (params.run_uid, "weights", 500, 1000)


def test_a_shutdown_is_refused_while_something_is_held_unless_forced(agent: Agent) -> None:
    """A holder keeps the agent; force ends both, and its client sees the answer and then the end."""
    with agent.client("") as client:
        client.warm(agent.params())
        pid = client.worker_pid()
        with pytest.raises(RefusedError, match="tiny on cpu") as refused:
            client.call("shutdown", ShutdownParams(), Empty)
        client.call("shutdown", ShutdownParams(force=True), Empty)
        with pytest.raises(ConnectionLostError):
            client.next_event(lambda event: False)

    assert refused.value.code == "busy"
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the holder is gone")
    assert agent.process is not None
    assert agent.process.wait(DEADLINE_S) == 0


def test_who_meets_an_agent_that_ends_is_served_by_the_next(agent: Agent) -> None:
    """It closes its connections before it is gone; asked before that, the next one answers instead of an error."""
    ending, other = socket.socketpair()
    other.close()
    links = iter([ending, raw(agent)])

    with open_client(agent.state, "late", lambda state: next(links)) as client:
        answered = client.call("status", Empty(), StatusResult).processes["agentd"]

    assert agent.process is not None
    assert (answered, ending.fileno()) == (agent.process.pid, -1)
