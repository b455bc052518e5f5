"""The SSH server of the demo, through real OpenSSH wire and real processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncssh
import pytest

from console.demo_teardown import MARK, end_nodes, marked_processes
from console.transports.embedded import EmbeddedServer, ServerNode, ServerOrder, ServerReady
from remote_agent.protocol.codec import decode, encode


@pytest.fixture
def order(tmp_path: Path) -> ServerOrder:
    nodes = []
    for name in ("demo-1", "demo-2"):
        home = tmp_path / name
        home.mkdir()
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), MARK: str(tmp_path)}
        nodes.append(ServerNode(name, str(home), str(home / "state"), environment))
    return ServerOrder(str(tmp_path), str(tmp_path), str(tmp_path), tuple(nodes), remove_directory=False)


@pytest.fixture
async def ready(order: ServerOrder) -> AsyncIterator[ServerReady]:
    server = EmbeddedServer(order)
    yield await server.start()
    await server.close()


def reach(ready: ServerReady, user: str = "demo-1") -> asyncssh.SSHClientConnection:
    return asyncssh.connect(
        "127.0.0.1", ready.port, username=user, client_keys=[ready.identity], known_hosts=ready.known_hosts, config=None
    )


async def test_a_command_runs_as_a_real_process_in_its_nodes_environment(ready: ServerReady, tmp_path: Path) -> None:
    """The user picks the node; sh runs the command there and its exit code comes back."""
    async with reach(ready, "demo-2") as connection:
        result = await connection.run('printf \'%s \' "$HOME" "$(pwd)"; exit 7', encoding=None)

    assert result.stdout == f"{tmp_path}/demo-2 {tmp_path}/demo-2 ".encode()
    assert result.exit_status == 7


async def test_bytes_pass_unchanged_and_complete_both_ways(ready: ServerReady) -> None:
    """Every byte value goes through, and the end of a large output is not cut."""
    sent = bytes(range(256)) * 12_000

    async with reach(ready) as connection:
        result = await connection.run("cat", input=sent, encoding=None)

    assert result.stdout == sent


async def test_standard_error_has_its_own_stream(ready: ServerReady) -> None:
    """stderr is not mixed into stdout by the server."""
    async with reach(ready) as connection:
        result = await connection.run("echo out; echo err >&2", encoding=None)

    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


@pytest.mark.parametrize("what", ["shell", "sftp", "forward"])
async def test_nothing_but_commands_is_served(ready: ServerReady, what: str) -> None:
    """A shell, a subsystem and a forwarded port are refused."""
    async with reach(ready) as connection:
        if what == "shell":
            result = await connection.run(encoding=None)
            assert result.exit_status == 1
        elif what == "sftp":
            with pytest.raises(asyncssh.Error):
                await connection.start_sftp_client()
        else:
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.open_connection("127.0.0.1", ready.port)


async def test_another_key_and_another_user_stay_outside(ready: ServerReady) -> None:
    """Only the demo's own key opens, and only for its nodes."""
    stranger = asyncssh.generate_private_key("ssh-ed25519")

    with pytest.raises(asyncssh.PermissionDenied):
        await reach(ready, "root")
    with pytest.raises(asyncssh.PermissionDenied):
        await asyncssh.connect(
            "127.0.0.1",
            ready.port,
            username="demo-1",
            client_keys=[stranger],
            known_hosts=ready.known_hosts,
            config=None,
        )


async def test_the_host_key_is_fresh_and_checked(ready: ServerReady, order: ServerOrder) -> None:
    """Another server's known_hosts does not fit this one."""
    other = EmbeddedServer(order)
    other_ready = await other.start()
    try:
        with pytest.raises(asyncssh.HostKeyNotVerifiable):
            await asyncssh.connect(
                "127.0.0.1",
                ready.port,
                username="demo-1",
                client_keys=[other_ready.identity],
                known_hosts=other_ready.known_hosts,
                config=None,
            )
    finally:
        await other.close()


async def test_a_client_that_vanishes_takes_its_command_along(ready: ServerReady, tmp_path: Path) -> None:
    """A lost connection hangs the command up; nothing stays."""
    connection = await reach(ready)
    process = await connection.create_process("echo started; exec sleep 600", encoding=None)
    assert await process.stdout.readline() == b"started\n"
    await there(str(tmp_path))

    connection.abort()

    await gone(str(tmp_path))


async def there(mark: str) -> None:
    deadline = time.monotonic() + 20
    while not marked_processes(mark):
        assert time.monotonic() < deadline, "no process is there"
        await asyncio.sleep(0.02)


async def gone(mark: str) -> None:
    deadline = time.monotonic() + 20
    while marked_processes(mark):
        assert time.monotonic() < deadline, "processes are still there"
        await asyncio.sleep(0.02)


@pytest.fixture
def server_process(order: ServerOrder) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "console.transports.embedded"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(encode(order)).encode() + b"\n")
    process.stdin.flush()
    yield process
    process.stdin.close()
    process.wait(30)
    assert process.stdout is not None
    process.stdout.close()


async def test_at_the_end_of_its_lifeline_the_server_ends_what_its_nodes_started(
    server_process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """When the console is gone, a daemon that a session left behind ends too."""
    assert server_process.stdout is not None
    assert server_process.stdin is not None
    ready = decode(ServerReady, json.loads(await asyncio.to_thread(server_process.stdout.readline)))
    async with reach(ready) as connection:
        await connection.run("setsid sleep 600 </dev/null >/dev/null 2>&1 & echo", encoding=None)
    assert marked_processes(str(tmp_path))

    server_process.stdin.close()

    assert await asyncio.to_thread(server_process.wait, 40) == 1, "a sleep had to be killed, and that is said"
    assert marked_processes(str(tmp_path)) == ()


def test_a_process_that_does_not_end_by_itself_is_killed_and_named(tmp_path: Path) -> None:
    """What ignores SIGTERM gets SIGKILL, and both are said."""
    stubborn = subprocess.Popen(
        ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"],
        env={**os.environ, MARK: str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert stubborn.stdout is not None
    assert stubborn.stdout.readline() == b"ready\n"

    problems = end_nodes([tmp_path / "never-ran"], str(tmp_path), grace_s=0.0)

    assert any(f"process {stubborn.pid}" in problem and "SIGKILL" in problem for problem in problems)
    assert marked_processes(str(tmp_path)) == ()
    stubborn.stdout.close()
    stubborn.wait()


def test_nothing_running_is_no_problem(tmp_path: Path) -> None:
    """A demo that never started an agent ends without a word."""
    assert end_nodes([tmp_path / "never-ran"], str(tmp_path)) == ()
