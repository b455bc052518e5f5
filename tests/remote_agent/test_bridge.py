"""The bridge over real pipes, with the real agent that it starts, and what that agent is as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from remote_agent.agentd.daemon import take_lock
from remote_agent.agentd.launch import connect
from remote_agent.agentd.paths import StateDir
from remote_agent.client import connect_running, open_client
from remote_agent.protocol.framing import SyncScanner
from remote_agent.protocol.messages import Empty, ShutdownParams, StatusResult
from tests.remote_agent.agentd.agents import DEADLINE_S, REPOSITORY, eventually, is_running

TOKEN = "token-0123456789"
RSS_LIMIT_KB = 30 << 10


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    """Return a state directory whose agent, if one was started, is ended afterwards."""
    state = StateDir(tmp_path / "state")
    yield state
    if state.run.exists() and state.run.stat().st_mode & 0o777 == 0o700 and (link := connect(state)) is not None:
        link.close()
        with open_client(state, "clean-up", connect_running) as client:
            client.call("shutdown", ShutdownParams(keeper=True, force=True), Empty)
        os.close(eventually(lambda: take_lock(state) or 0, "the agent has ended"))


def command(state: StateDir, *words: str) -> list[str]:
    return [sys.executable, "-m", "remote_agent", *words, "--state-dir", str(state.root)]


@contextmanager
def bridged(state: StateDir) -> Iterator[subprocess.Popen[bytes]]:
    """Give a bridge as a shell on a host would start it; its stdin closes at the end."""
    process = subprocess.Popen(
        command(state, "bridge", "--mark", TOKEN),
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(DEADLINE_S)
        process.stdout.close()


def read_until(process: subprocess.Popen[bytes], is_enough: Callable[[bytes], bool]) -> bytes:
    assert process.stdout is not None
    data = b""
    while not is_enough(data):
        part = process.stdout.read(65536)
        assert part, data
        data += part
    return data


def say(process: subprocess.Popen[bytes], ident: int, method: str, params: object) -> None:
    assert process.stdin is not None
    message = {"jsonrpc": "2.0", "id": ident, "method": method, "params": params}
    process.stdin.write(json.dumps(message).encode() + b"\n")


def agent_pid(state: StateDir) -> int:
    with open_client(state, "test", connect_running) as client:
        pid = client.call("status", Empty(), StatusResult).processes["agentd"]
    assert pid is not None
    return pid


def test_a_bridge_starts_the_agent_and_carries_bytes_both_ways(state: StateDir) -> None:
    """The mark comes first, then answers; the agent is detached and lives on when the bridge ends."""
    with bridged(state) as bridge:
        say(bridge, 1, "hello", {"client": "test"})
        data = read_until(bridge, lambda data: b'"id":1' in data and data.endswith(b"\n"))
        found = SyncScanner(TOKEN).feed(data)
        assert found is not None
        answer = json.loads(found[2])["result"]
        pid = answer["pid"]
        session = os.getsid(pid)

    assert found[:2] == (1, 1)
    assert bridge.returncode == 0
    assert is_running(pid)
    assert session not in (os.getsid(0), pid)
    assert agent_pid(state) == pid


def test_two_bridges_at_once_start_one_agent(state: StateDir) -> None:
    """Whoever comes second finds the first one's agent."""
    with bridged(state) as one, bridged(state) as two:
        answers = []
        for bridge in (one, two):
            say(bridge, 1, "hello", {"client": "test"})
            data = read_until(bridge, lambda data: b'"id":1' in data and data.endswith(b"\n"))
            found = SyncScanner(TOKEN).feed(data)
            assert found is not None
            answers.append(json.loads(found[2])["result"]["pid"])

    assert answers[0] == answers[1]


def test_a_large_exchange_passes_whole_in_both_directions(state: StateDir) -> None:
    """Neither side's full pipe blocks the other: many requests in one go are all answered."""
    count = 3000
    with bridged(state) as bridge:
        say(bridge, 1, "hello", {"client": "test"})
        read_until(bridge, lambda data: b'"id":1' in data and data.endswith(b"\n"))
        writer = os.fork()
        if writer == 0:
            for number in range(2, count):
                say(bridge, number, "resident.list", {"padding": "x" * 500})
            os._exit(0)
        answers = read_until(bridge, lambda data: data.count(b'"jsonrpc"') >= count - 2)
        os.waitpid(writer, 0)

    frames = [json.loads(line) for line in answers.splitlines() if b'"id"' in line]
    assert {frame["id"] for frame in frames} == set(range(2, count))


def test_a_bridge_ends_when_its_agent_does(state: StateDir) -> None:
    """With the agent gone the channel is closed, so that the console sees it at once."""
    with bridged(state) as bridge:
        say(bridge, 1, "hello", {"client": "test"})
        read_until(bridge, lambda data: b'"id":1' in data and data.endswith(b"\n"))
        os.kill(agent_pid(state), signal.SIGKILL)

        assert bridge.wait(DEADLINE_S) == 1


def test_an_agent_that_cannot_start_is_explained_before_any_mark(state: StateDir) -> None:
    """What went wrong is printed for the operator, with exit code 1, and no mark is."""
    state.prepare()
    state.run.chmod(0o755)
    done = subprocess.run(
        command(state, "bridge", "--mark", TOKEN),
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    state.run.chmod(0o700)

    assert done.returncode == 1
    assert "mode 0755 lets others in" in done.stdout
    assert "GLOWPLUG-SYNC" not in done.stdout


def test_an_agent_that_dies_at_its_start_shows_the_end_of_its_log(state: StateDir) -> None:
    """The bridge prints the agent's own last words."""
    state.prepare()
    (state.journal / "meta.json").mkdir()
    done = subprocess.run(
        command(state, "bridge", "--mark", TOKEN),
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )

    assert done.returncode == 1
    assert "the agent did not start" in done.stdout
    assert "IsADirectoryError" in done.stdout


@pytest.mark.parametrize(
    "words", [[], ["--mark"], ["--mark", "short"], ["--mark", "bad token!"], ["--mark", TOKEN, "--what", "x"]]
)
def test_a_bridge_without_a_proper_mark_is_a_usage_error(words: list[str]) -> None:
    """Nothing is started by a mistyped command."""
    done = subprocess.run(
        [sys.executable, "-m", "remote_agent", "bridge", *words],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=DEADLINE_S,
    )

    assert done.returncode == 2


def test_a_bridge_imports_little(state: StateDir) -> None:
    """No wire types, no asyncio, no argparse: that is what makes it start quickly."""
    heavy = ["asyncio", "argparse", "json", "dataclasses", "subprocess", "remote_agent.protocol.messages", "torch"]
    code = f"import sys, remote_agent.bridge; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_an_idle_agent_is_small_and_has_no_gpu_library(state: StateDir) -> None:
    """The real daemon stays within its memory and never maps CUDA, torch or NVML."""
    with bridged(state) as bridge:
        say(bridge, 1, "hello", {"client": "test"})
        read_until(bridge, lambda data: b'"id":1' in data and data.endswith(b"\n"))
    pid = agent_pid(state)
    status = Path(f"/proc/{pid}/status").read_text()
    rss_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    maps = Path(f"/proc/{pid}/maps").read_text()

    assert rss_kb <= RSS_LIMIT_KB
    assert not [name for name in ("libcuda", "libtorch", "libnvidia-ml", "libc10") if name in maps]


def test_a_daemon_keeps_nothing_of_its_starters_open(state: StateDir) -> None:
    """Its stdin is empty, its output its log, and no other descriptor of the caller is left in it."""
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    started = subprocess.run(
        command(state, "agentd"), cwd=REPOSITORY, close_fds=False, capture_output=True, check=False, timeout=DEADLINE_S
    )
    theirs.close()
    pid = agent_pid(state)
    targets = {number: str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in (0, 1, 2)}

    assert started.returncode == 0
    assert ours.recv(1) == b""
    assert targets == {0: "/dev/null", 1: str(state.log), 2: str(state.log)}
    ours.close()
