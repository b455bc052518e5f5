"""A watch over a real node: what is warm there is released, and killed, and is warm again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from console.demo import RECIPE, EmbeddedFleet
from remote_agent.agentd.paths import StateDir
from remote_agent.client import connect_running, open_client
from remote_agent.protocol.messages import Empty, ReleaseParams, ReleaseResult, ResidentListResult
from tests.end_to_end.consoles import PATIENCE_S, REPOSITORY

pytestmark = pytest.mark.timeout(240)
NODE = "demo-1"
T = TypeVar("T")


@pytest.fixture
def watch(config: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A watch in a process of its own, ended as by Ctrl-C."""
    places = ("--config", str(config), "--history", str(tmp_path / "history.db"))
    started = subprocess.Popen(
        [sys.executable, "-m", "console", *places, "watch", NODE, "--recipe", RECIPE, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.send_signal(signal.SIGINT)
        started.communicate(timeout=PATIENCE_S)


def told(watch: subprocess.Popen[str], *events: str) -> dict[str, Any]:
    """Return the last of the next lines, which have these events."""
    assert watch.stdout is not None
    lines = [json.loads(watch.stdout.readline()) for _ in events]
    assert [(line["node"], line["event"]) for line in lines] == [(NODE, event) for event in events]
    last: dict[str, Any] = lines[-1]
    return last


def ask(node: EmbeddedFleet, method: str, params: object, result: type[T]) -> T:
    """Return the agent's answer, as a verb on its own host gets it."""
    state = StateDir(Path(node.config.nodes[0].state_directory or ""))
    with open_client(state, method, connect_running) as client:
        return client.call(method, params, result)


def test_a_node_falls_twice_and_is_warm_again_each_time(node: EmbeddedFleet, watch: subprocess.Popen[str]) -> None:
    """Whatever it was before; each fall has its cause, and Ctrl-C is exit 130."""
    assert watch.stdout is not None
    first = json.loads(watch.stdout.readline())
    if first["event"] == "below":
        first = told(watch, "warming", "back")
    assert first["tier"] == "standby"

    assert ask(node, "resident.release", ReleaseParams(everything=True), ReleaseResult).released
    fell = told(watch, "fell")
    assert (fell["tier"], fell["cause"], fell["reason"]) == ("cold", "released", "released by request")
    told(watch, "warming", "back")
    (standby,) = ask(node, "resident.list", Empty(), ResidentListResult).residents
    assert standby.pid is not None
    os.kill(standby.pid, signal.SIGKILL)
    assert told(watch, "fell")["cause"] == "process_ended"
    assert told(watch, "warming", "back")["tier"] == "standby"

    watch.send_signal(signal.SIGINT)
    assert watch.wait(PATIENCE_S) == 130
