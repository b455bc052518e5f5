"""``glowplug release``: what the verb asks of a node, and how it ends."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from console.cli import run
from console.cli.common import Context
from remote_agent.protocol.messages import ReleaseParams
from tests.console.fake_host import FakeHost
from tests.console.fleet_world import World
from tests.console.happenings import resident


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return three hosts that every verb of the test asks, in place of a configuration's."""
    world = World(tmp_path)
    monkeypatch.setattr(Context, "load_config", lambda context: world.config)
    monkeypatch.setattr(Context, "fleet", lambda context, config, names=None, parallel=None: world.fleet())
    monkeypatch.setenv("GLOWPLUG_STATE", str(tmp_path))
    return world


@pytest.fixture
def host(world: World) -> FakeHost:
    """Return the host of ``n1``, where two models are warm."""
    host = world.hosts["n1"]
    host.residents = [resident(uid).resident for uid in ("run-00000001", "run-00000002")]
    return host


def test_waiting_goes_with_the_request_and_its_answer_is_waited_for(world: World, host: FakeHost) -> None:
    """One request for everything, as the host's own verb makes it: where it is refused nothing has gone."""
    assert run(["release", "n1", "--all", "--wait", "60", "--yes"]) == 0

    assert host.released == [ReleaseParams(everything=True, wait_s=60.0)]
    assert world.links["n1"].patience_s > 60.0


def test_the_driver_goes_with_everything_or_alone(host: FakeHost, capsys: pytest.CaptureFixture[str]) -> None:
    """With --all also where nothing is warm; alone it leaves models as they are, and under those it is refused."""
    assert run(["release", "n1", "--driver", "--yes"]) == 1
    assert "residents" in capsys.readouterr().err
    assert len(host.residents) == 2

    for _ in range(2):
        assert run(["release", "n1", "--all", "--driver", "--yes"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "n1: the driver is released"
    assert run(["release", "n1", "--driver", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"node": "n1", "released": [], "driver_released": True}


def test_a_driver_that_is_still_held_is_exit_code_1(host: FakeHost, capsys: pytest.CaptureFixture[str]) -> None:
    """The keeper may have been silent."""
    host.keeps_driver = True

    assert run(["release", "n1", "--all", "--driver", "--yes"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "n1: the driver is still held"


def test_what_is_attached_is_refused_with_exit_code_1_but_for_force(host: FakeHost) -> None:
    """As --help says."""
    host.residents = [dataclasses.replace(one, attached=1) for one in host.residents]

    assert run(["release", "n1", "--run", "run-00000002", "--yes"]) == 1
    assert len(host.residents) == 2
    assert run(["release", "n1", "--run", "run-00000002", "--force", "--yes"]) == 0
    assert [one.run_uid for one in host.residents] == ["run-00000001"]


@pytest.mark.parametrize("seconds", ["-1", "3601", "nan"])
def test_an_impossible_wait_is_a_usage_error(host: FakeHost, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asked of the node."""
    assert run(["release", "n1", "--all", "--wait", seconds]) == 2

    assert capsys.readouterr().err == f"glowplug: --wait: {seconds} is not within 0..3600 seconds\n"
    assert host.asked == []
