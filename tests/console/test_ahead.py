"""``--at`` and ``--every`` of ``glowplug warm`` and ``glowplug rollout start``."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from console.cli import run
from console.cli.common import Context
from console.config import Config
from console.rollout.settings import Rollout
from tests.console.fleet_world import World
from tests.end_to_end.consoles import Console


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return three hosts that every verb of the test asks, and a rollout to two of them."""
    world = World(tmp_path)
    nodes = tuple(replace(node, tags=("gpu",)) if node.name != "n3" else node for node in world.config.nodes)
    world.config = Config(nodes, world.config.recipes, rollouts=(Rollout("pre-warm", "tag:gpu", "llama"),))
    monkeypatch.setattr(Context, "load_config", lambda context: world.config)
    monkeypatch.setattr(Context, "fleet", lambda context, config, names=None, parallel=None: world.fleet())
    monkeypatch.setenv("GLOWPLUG_HISTORY", str(world.history_path))
    monkeypatch.setenv("GLOWPLUG_STATE", str(tmp_path))
    return world


def happened(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_warm_up_waits_for_its_moment(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes and recipe are named before; its runs stand in the line of its end, its exit code is the verb's."""
    world.hosts["n2"].is_refusing = True
    code = run(["warm", "llama", "n1", "n2", "--no-wait", "--at", "+1s", "--json"])
    told = capsys.readouterr()
    lines = happened(told.out)

    assert code == 1
    assert [one["event"] for one in lines] == ["next", "started", "ended"]
    assert [one["node"] for one in lines[2]["runs"]] == ["n1"]
    assert [one["node"] for one in lines[2]["errors"]] == ["n2"]
    assert told.err.splitlines()[0] == "warm llama (/models/llama) on 2 nodes: n1, n2"
    assert told.err.splitlines()[1].startswith("next: ")
    assert "run.start" in world.hosts["n1"].asked


def test_a_rollout_is_planned_and_begun_at_its_moment(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """What it came to is in the line of its end."""
    for host in world.hosts.values():
        host.is_refusing = True
    code = run(["rollout", "start", "pre-warm", "--at", "+1s", "--json"])
    lines = happened(capsys.readouterr().out)

    assert code == 4
    assert [one["event"] for one in lines] == ["next", "started", "ended"]
    assert (lines[2]["rollout"], lines[2]["phase"], lines[2]["exit_code"]) == ("pre-warm", "aborted", 4)
    assert [one["node"] for one in lines[2]["nodes"]] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("warm", "llama", "n1", "--at", "+1s", "--every", "@daily"), "--at and --every: give one of them"),
        (("warm", "llama", "n1", "--every", "@daily", "--no-wait"), "leave --no-wait out"),
        (("warm", "llama", "n1", "--at", "soon"), "--at 'soon'"),
        (("warm", "no-such", "n1", "--at", "+1s"), "no-such"),
        (("rollout", "start", "no-such", "--at", "+1s"), "no-such"),
        (("rollout", "start", "pre-warm", "--every", "often"), "--every 'often'"),
    ],
)
def test_a_mistake_is_told_before_anything_is_waited_for(
    world: World, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str
) -> None:
    """Exit 2, one line."""
    assert run(list(argv)) == 2
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_ctrl_c_while_it_waits_is_exit_130(tmp_path: Path) -> None:
    """And nothing was started."""
    config = tmp_path / "fleet.toml"
    config.write_text('[nodes.a]\ntransport = ["false"]\n[recipes.llama]\nmodel = { path = "/models/llama" }\n')
    console = Console("--config", str(config), "warm", "llama", "a", "--every", "@yearly", "--json")
    console.until_said("next: ")
    console.signal(signal.SIGINT)
    code, out = console.end()

    assert code == 130
    assert [one["event"] for one in happened(out)] == ["next"]
    assert console.lines[-1] == "glowplug: interrupted; nothing was left running"
