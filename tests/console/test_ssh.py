"""SSH against a real OpenSSH server: login shells, host keys, jumps, crowds, and servers that go away."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from console.errors import (
    AuthenticationFailed,
    HostKeyChanged,
    HostKeyUnknown,
    LinkLost,
    NodeMisconfigured,
    NodeUnreachable,
)
from console.state import LinkStatus
from console.transports import Gate, known_hosts, open_stream, ssh
from console.transports.gate import CONNECT_LIMIT
from remote_agent.protocol.messages import Empty, Probe
from tests.console.links import Kept, connected, gate, linked, soon
from tests.console.sshd import Sshd, free_port, make_key, script, servers
from tests.needs import need

pytestmark = pytest.mark.ssh

SHELLS = {"bash": "bash", "dash": "dash", "zsh": "zsh", "fish": "fish", "csh": "csh"}
"""Login shells by name, with the Debian package each comes from."""

NOISY = (
    '#!/bin/sh\nprintf "\\033[33m! Only /data is persistent\\033[0m\\n{\\"motd\\": true}\\nGLOWPLUG-SYNC x 1 1\\n"\n'
    'echo "bash: warning: setlocale: cannot change locale" >&2\nexec /bin/sh "$@"\n'
)
TRACING = '#!/bin/sh\nexec /bin/sh -x "$@"\n'
FISHLIKE = (
    '#!/bin/sh\ncase "$2" in "sh -c "*) exec /bin/sh -c "$2";; esac\n'
    'echo "fish: Unsupported use of =. In fish, please use set." >&2; exit 127\n'
)
RESTRICTED = '#!/bin/sh\necho "rbash: $2: restricted: cannot specify / in command names" >&2; exit 1\n'
FORCED = '#!/bin/sh\necho "This key may only run: backup"\n'
OLD_PYTHON = (
    "#!/bin/sh\nshift 3 2>/dev/null\n"
    'echo "  File \\"<stdin>\\", line 1" >&2; echo "SyntaxError: invalid syntax" >&2; exit 1\n'
)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    with servers(tmp_path) as start:
        yield start


def first_reason(kept: Kept) -> str:
    return str(next(state.reason for state in kept.states if state.status is LinkStatus.DISCONNECTED))


async def test_a_link_over_ssh_connects_and_answers(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """The whole way: key exchange, login, command, mark, hello, a request."""
    async with linked(serve().node(), tmp_path) as (link, kept):
        await soon(connected(kept), "connected")
        answer = await link.request("probe", Empty())

    assert isinstance(answer, Probe)


@pytest.mark.parametrize("shell", SHELLS)
async def test_any_login_shell_starts_the_agent(serve: Callable[..., Sshd], tmp_path: Path, shell: str) -> None:
    """bash, dash, zsh, fish and csh read the command alike."""
    binary = need(shell, SHELLS[shell])
    async with linked(serve(shell=binary).node(state_directory="~/a b/é"), tmp_path) as (_, kept):
        await soon(connected(kept), "connected")


@pytest.mark.parametrize("text", [NOISY, TRACING, FISHLIKE], ids=["noisy", "tracing", "fishlike"])
async def test_a_noisy_or_foreign_login_shell_does_no_harm(
    serve: Callable[..., Sshd], tmp_path: Path, text: str
) -> None:
    """Colour, JSON, a false mark, warnings and traces come before the mark and are passed over."""
    server = serve(shell=script(tmp_path, text))
    async with linked(server.node("noisy", script="noisy"), tmp_path) as (_, kept):
        await soon(connected(kept), "connected")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RESTRICTED, ["the command ended with 1", "rbash", "restricted"]),
        (FORCED, ["This key may only run: backup"]),
    ],
    ids=["restricted", "forced"],
)
async def test_a_login_shell_that_runs_something_else_is_shown(
    serve: Callable[..., Sshd], tmp_path: Path, text: str, words: list[str]
) -> None:
    """The reason holds what the shell or the forced command itself said, on stdout or stderr."""
    async with linked(serve(shell=script(tmp_path, text)).node(), tmp_path) as (_, kept):
        await soon(lambda: kept.state.status is LinkStatus.DISCONNECTED, "disconnected")

    assert all(word in first_reason(kept) for word in words), first_reason(kept)


async def test_a_python_that_is_too_old_is_shown(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """What the host's own interpreter said is the reason."""
    node = serve().node(python=(script(tmp_path, OLD_PYTHON, "python3"),))
    async with linked(node, tmp_path) as (_, kept):
        await soon(lambda: kept.state.status is LinkStatus.DISCONNECTED, "disconnected")

    assert "SyntaxError: invalid syntax" in first_reason(kept)


async def test_an_unknown_host_key_is_shown_and_works_once_it_was_accepted(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """The fingerprint is OpenSSH's; nothing is written until `append` is called."""
    server = serve()
    server.known_hosts.unlink()
    node = dataclasses.replace(server.node(), known_hosts=())
    async with linked(node, tmp_path) as (link, kept):
        await soon(lambda: kept.state.final, "final")
        error = link.error
        assert isinstance(error, HostKeyUnknown)
        assert error.fingerprint == server.fingerprint()
        assert error.line == server.known_hosts_line()
        assert error.known_hosts_file == tmp_path / "our_known_hosts"
        assert not error.known_hosts_file.exists()
        known_hosts.append(error.known_hosts_file, error.line)
        link.retry_now()
        await soon(connected(kept), "connected")


async def test_a_changed_host_key_is_a_hard_stop(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """Another key than the known one is not an unknown key, and there is nothing to accept."""
    server = serve()
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text().split()
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {other[0]} {other[1]}\n")

    with pytest.raises(HostKeyChanged, match="has changed") as changed:
        await open_stream(server.node(), "token", gate=gate(tmp_path))

    assert changed.value.final
    assert server.fingerprint() in str(changed.value)


async def test_a_revoked_host_key_is_a_hard_stop(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """A revoked key is refused even where it is also known."""
    server = serve()
    server.known_hosts.write_text(f"{server.known_hosts_line()}\n@revoked {server.known_hosts_line()}\n")

    with pytest.raises(HostKeyChanged, match="is revoked"):
        await open_stream(server.node(), "token", gate=gate(tmp_path))


async def test_a_malformed_known_hosts_line_is_named(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """A file that can't be read as a whole vouches for nobody."""
    server = serve()
    server.known_hosts.write_text(f"# a comment\n{server.known_hosts_line()}\nbroken\n")

    with pytest.raises(NodeMisconfigured, match="known_hosts:3: "):
        await open_stream(server.node(), "token", gate=gate(tmp_path))


async def test_a_key_that_is_not_authorised_is_an_authentication_failure(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """The message names the user and the key that was tried."""
    stranger = make_key(tmp_path / "stranger")
    with pytest.raises(AuthenticationFailed, match=rf"did not let \S+ in with {stranger}"):
        await open_stream(serve().node(identity=(str(stranger),)), "token", gate=gate(tmp_path))


async def test_an_encrypted_identity_is_named_where_nobody_can_be_asked(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """The error says which file, and the way out."""
    locked = make_key(tmp_path / "locked", "open sesame")
    with pytest.raises(AuthenticationFailed, match="locked is encrypted: add it to ssh-agent"):
        await open_stream(serve().node(identity=(str(locked),)), "token", gate=gate(tmp_path))


async def test_two_hops_are_made_one_by_one_and_bastions_are_shared(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """Four nodes behind two bastions: one login on each bastion, each host key checked against its own file."""
    outer, inner, target = serve(), serve(), serve()
    first = outer.node("outer")
    second = inner.node("inner", jump=("outer",))
    shared = gate(tmp_path)
    nodes = [
        target.node(f"gpu-{index}", jump=("outer", "inner"), hops=(first, second), heartbeat_s=0.5)
        for index in range(4)
    ]
    kepts = [Kept() for _ in nodes]
    async with asyncio.TaskGroup() as group:
        for node, kept in zip(nodes, kepts, strict=True):
            group.create_task(_connect_and_leave(node, kept, tmp_path, shared, kepts))

    assert (outer.logins(), inner.logins(), target.logins()) == (1, 1, 4)
    await soon(lambda: not outer.connection_processes() and not inner.connection_processes(), "bastions let go")


async def _connect_and_leave(node: Any, kept: Kept, directory: Path, shared: Gate, all_kept: list[Kept]) -> None:
    async with linked(node, directory, sink=kept, gate=shared):
        await soon(lambda: all(LinkStatus.CONNECTED in [s.status for s in each.states] for each in all_kept), "all")


async def test_an_unknown_bastion_is_told_apart_from_its_node(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """The host key error names the hop it is about."""
    bastion, target = serve(), serve()
    bastion.known_hosts.write_text("")
    node = target.node(jump=("outer",), hops=(bastion.node("outer"),))

    with pytest.raises(HostKeyUnknown) as unknown:
        await open_stream(node, "token", gate=gate(tmp_path))

    assert unknown.value.port == bastion.port


async def test_a_node_that_its_bastion_can_not_reach_says_so(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """A refused forward is a matter between bastion and node."""
    node = serve().node(jump=("outer",), hops=(serve().node("outer"),), port=free_port())

    with pytest.raises(NodeUnreachable, match="can't be reached from the host before it"):
        await open_stream(node, "token", gate=gate(tmp_path))


async def test_twelve_links_get_through_a_server_that_admits_two_at_a_time(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """Dropped connections are tried again, with chance in the delay, until everyone is in."""
    server = serve(options=("MaxStartups 2:100:2",))
    shared = gate(tmp_path)
    kepts = [Kept() for _ in range(12)]
    async with asyncio.TaskGroup() as group:
        for index, kept in enumerate(kepts):
            node = server.node(f"gpu-{index}", heartbeat_s=2.0)
            group.create_task(_connect_and_leave(node, kept, tmp_path, shared, kepts))

    assert server.logins() >= 12


@pytest.mark.faults
async def test_a_killed_server_ends_the_link_with_a_reason_and_its_return_brings_it_back(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """Lost, refused while it is away, connected again when it is back."""
    server = serve()
    async with linked(server.node(), tmp_path) as (_, kept):
        await soon(connected(kept), "connected")
        server.stop()
        await soon(lambda: "Connection refused" in str(kept.state.reason), "refused")
        server.start()
        await soon(connected(kept), "connected again")

    assert "127.0.0.1 port" in first_reason(kept) or "connection" in first_reason(kept).lower()


@pytest.mark.faults
async def test_a_server_process_that_stands_still_makes_the_link_silent_and_then_drops_it(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """The TCP connection is fine, sshd is stopped: only the agent's own heartbeat can tell."""
    server = serve()
    async with linked(server.node(heartbeat_s=0.1), tmp_path) as (_, kept):
        await soon(connected(kept), "connected")
        stopped = server.connection_processes()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        await soon(lambda: kept.saw(LinkStatus.CONNECTED, LinkStatus.SILENT, LinkStatus.DISCONNECTED), "dropped")

    assert "no heartbeat for" in first_reason(kept)


async def test_a_listener_that_never_answers_is_given_up_in_time(tmp_path: Path) -> None:
    """A black hole costs the node its connect time-out, and the reason says so."""
    with socket.create_server(("127.0.0.1", 0)) as hole:
        node = Sshd(tmp_path / "none").node(port=hole.getsockname()[1], connect_timeout_s=0.5)
        async with linked(node, tmp_path) as (_, kept):
            await soon(lambda: kept.state.status is LinkStatus.DISCONNECTED, "disconnected")

    assert "gave no SSH login within 0.5 s" in first_reason(kept)


async def test_a_host_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """A name that does not resolve is a reason of its own."""
    with pytest.raises(NodeUnreachable, match=r"no-such-host\.invalid: no such host"):
        await open_stream(Sshd(tmp_path / "none").node(host="no-such-host.invalid"), "token", gate=gate(tmp_path))


async def test_a_stopped_link_leaves_nothing_on_the_host(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """The channel's end is the command's end."""
    server = serve()
    async with linked(server.node(), tmp_path) as (_, kept):
        await soon(connected(kept), "connected")
        assert server.descendants()

    await soon(lambda: not server.descendants(), "no process of this connection left")


async def test_no_more_than_eight_connect_at_once(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """With every place taken a node waits without a login, and goes on when one is free."""
    server, shared = serve(), gate(tmp_path)
    for _ in range(CONNECT_LIMIT):
        await shared.connects.acquire()
    opening = asyncio.ensure_future(open_stream(server.node(), "token", gate=shared))
    await soon(lambda: bool(shared.connects._waiters), "it waits for a place")
    assert server.logins() == 0

    shared.connects.release()
    await (await opening).close()

    assert (CONNECT_LIMIT, server.logins()) == (8, 1)


async def test_a_connection_is_kept_alive_and_forwards_no_agent(
    serve: Callable[..., Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead peer is found in twenty seconds; nothing is left to a configuration that asyncssh would read itself."""
    asked: list[dict[str, Any]] = []
    real = asyncssh.connect

    def connect(*arguments: Any, **options: Any) -> Any:
        asked.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(asyncssh, "connect", connect)
    await (await open_stream(serve().node(), "token", gate=gate(tmp_path))).close()

    (options,) = asked
    assert (options["keepalive_interval"], options["keepalive_count_max"]) == (5, 3)
    assert options["agent_forwarding"] is False
    assert options["config"] is None


async def test_a_server_that_starts_no_command_is_given_up_in_time(
    serve: Callable[..., Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logged in, but the channel never opens: the node's time-out ends that wait too, and the connection with it."""

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncssh.SSHClientConnection, "create_process", never)
    server = serve()
    with pytest.raises(NodeUnreachable, match="logged in, but no command could be started: no answer within 3 s"):
        async with asyncio.timeout(30):
            await open_stream(server.node(connect_timeout_s=3.0), "token", gate=gate(tmp_path))

    await soon(lambda: not server.descendants(), "the connection ends")


@pytest.mark.faults
async def test_a_host_that_takes_no_data_is_given_up_in_time(
    serve: Callable[..., Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stands still with a full window does not hold a write for ever."""
    monkeypatch.setattr(ssh, "WRITE_TIMEOUT_S", 0.2)
    server = serve()
    stream = await open_stream(server.node(), "token", gate=gate(tmp_path))
    stopped = server.connection_processes()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(LinkLost, match=r"took no data for 0\.2 s"):
            async with asyncio.timeout(30):
                await stream.write(b"x" * (32 << 20))
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        stream.abort()
        await stream.close()
