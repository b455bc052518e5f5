"""``glowplug watch``: what the verb refuses, looks at once, tells, and how it ends."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from console.cli import run
from console.cli.common import Context
from console.config import Config
from db.database import open_history
from db.watch_store import WatchStore
from remote_agent.protocol.messages import Hold, ModelSource, Recipe, Tier
from tests.console.fake_host import FakeLink
from tests.console.fleet_world import World
from tests.console.happenings import resident
from tests.end_to_end.consoles import REPOSITORY

FILES = Recipe("files", ModelSource("/models/llama"), target_tier="cached")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return three hosts that every verb of the test asks; on n1 the model is warm, n3 can't be reached."""
    world = World(tmp_path)
    world.hosts["n1"].residents = [resident().resident]
    world.hosts["n3"].is_reachable = False
    recipes = {**world.config.recipes, "files": FILES, "locked": replace(FILES, name="locked", hold=Hold(lock=True))}
    world.config = Config(world.config.nodes, recipes)
    monkeypatch.setattr(Context, "load_config", lambda context: world.config)
    monkeypatch.setattr(Context, "fleet", lambda context, config, names=None, parallel=None: world.fleet())
    monkeypatch.setenv("GLOWPLUG_HISTORY", str(world.history_path))
    monkeypatch.setenv("GLOWPLUG_STATE", str(tmp_path))
    return world


def test_looked_at_once_all_at_the_tier_is_exit_0(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A warmer tier than the one asked for is enough; nothing is loaded and no lease taken."""
    assert run(["watch", "n1", "--recipe", "llama", "--tier", "resident", "--once"]) == 0
    assert capsys.readouterr().out == "✔ n1             standby\n"

    assert "run.start" not in world.hosts["n1"].asked


def test_looked_at_once_one_below_is_exit_1_and_one_out_of_reach_alone_exit_3(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can't be reached has not fallen; as a document each has its tier or why it has none."""
    assert run(["watch", "--recipe", "llama", "--once", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert run(["watch", "n1", "n3", "--recipe", "llama", "--once"]) == 3
    told = capsys.readouterr().out.splitlines()

    assert (document["recipe"], document["wanted"]) == ("llama", "standby")
    assert [(one["node"], one["tier"], one["at_tier"]) for one in document["nodes"]] == [
        ("n1", "standby", True),
        ("n2", "cold", False),
        ("n3", None, None),
    ]
    assert "connection refused" in document["nodes"][2]["error"]
    assert told[1].startswith("? n3")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("n1",), "Missing option '--recipe'"),
        (("n1", "--recipe", "no-such"), "no-such"),
        (("no-such", "--recipe", "llama"), "no-such"),
        (("n1", "--recipe", "llama", "--tier", "armed"), "Invalid value for '--tier'"),
        (("n1", "--recipe", "llama", "--tries", "0"), "Invalid value for '--tries'"),
        (("n1", "--recipe", "locked", "--tier", "resident"), "recipe locked goes no further than cached"),
        (("n1", "--recipe", "files"), "set hold.lock"),
    ],
)
def test_what_can_not_be_watched_is_exit_2(
    world: World, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str
) -> None:
    """One line says what."""
    assert run(["watch", *argv]) == 2
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_a_second_watch_is_exit_2_and_told_who_watches(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Another recipe on the same node is no hindrance, and looking once neither."""
    path = open_history(world.history_path).path
    with contextlib.closing(WatchStore(path, "desk:1:ab", ("llama", "standby"), ("ada", "desk"))) as store:
        store.take(["n1"])
        assert run(["watch", "n1", "n2", "--recipe", "llama"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert not world.links, "no host was even connected"
        assert run(["watch", "n1", "--recipe", "llama", "--once"]) == 0

    assert said.startswith("glowplug: n1 is watched for llama by ada@desk (desk:1:ab); its lease has ")


def test_a_watch_whose_last_node_is_lost_for_good_is_exit_3(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was told stands on stdout, a line of JSON each; the node is given back."""
    monkeypatch.setattr(FakeLink, "start", lambda link: link.lose("permission denied", final=True))
    assert run(["watch", "n3", "--recipe", "llama", "--tier", Tier.RESIDENT.value, "--json"]) == 3
    told = capsys.readouterr()

    happened: list[dict[str, Any]] = [json.loads(line) for line in told.out.splitlines()]
    assert [(one["node"], one["event"]) for one in happened] == [("n3", "unreachable"), ("n3", "ended")]
    assert told.err.splitlines()[0] == "watch llama (/models/llama) on 1 node: n3"
    with contextlib.closing(WatchStore(world.history_path, "x", ("llama", "standby"), ("ada", "desk"))) as store:
        store.take(["n3"])


def test_ctrl_c_is_exit_130_and_gives_the_node_back(tmp_path: Path) -> None:
    """Its lines came as things happened."""
    config, history = tmp_path / "fleet.toml", tmp_path / "history.db"
    config.write_text('[nodes.a]\ntransport = ["false"]\n[recipes.llama]\nmodel = { path = "/models/llama" }\n')
    places = ("--config", str(config), "--history", str(history))
    watch = subprocess.Popen(
        [sys.executable, "-m", "console", *places, "watch", "--recipe", "llama", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert watch.stdout is not None
    first = json.loads(watch.stdout.readline())
    watch.send_signal(signal.SIGINT)
    _, said = watch.communicate(timeout=60)

    assert (watch.returncode, first["node"], first["event"]) == (130, "a", "unreachable")
    assert said.splitlines()[-1] == "glowplug: interrupted; nothing is watched any more, and nothing was left running"
    with contextlib.closing(WatchStore(history, "x", ("llama", "standby"), ("ada", "desk"))) as store:
        store.take(["a"])
