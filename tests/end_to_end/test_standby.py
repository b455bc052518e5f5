"""A standby by README's verbs on this host: armed without weights, found by a run that maps them, ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.hosts import REPOSITORY
from tests.remote_agent import checkpoints

Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """Return a function that runs the agent's verbs as a user with a state directory of their own would."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(REPOSITORY)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "remote_agent", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    yield run
    run("stop", "--force", "--keeper")


def asked(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stage(record: Any, name: str) -> Any:
    return next(one for one in record["stages"] if one["name"] == name)


@pytest.mark.timeout(240)
def test_a_standby_from_start_to_stop(call: Call, tmp_path: Path) -> None:
    """Arm, make resident, run: mapped and answered as by an ordinary run; changed files are loaded, stop ends it."""
    model = checkpoints.write_llama(tmp_path / "llama", max_position_embeddings=256)
    lines = f'model = {{ path = "{model}" }}\ndevices = ["cpu"]\nrequest = {{ prompt_tokens = 16 }}\n'
    (tmp_path / "chat.toml").write_text(lines)
    (tmp_path / "kept.toml").write_text(f'target_tier = "resident"\n{lines}')
    armed = call("standby", "start", "chat.toml")
    assert armed.returncode == 0, armed.stderr
    assert armed.stdout.rstrip().endswith("-> armed"), armed.stdout
    (entry,) = asked(call("status", "--json"))["residents"]
    assert (entry["tier"], entry["recipe"], entry["bytes"] > 0) == ("armed", "chat", True)

    kept = asked(call("run", "kept.toml", "--json"))
    run = asked(call("run", "chat.toml", "--json"))
    assert (run["tier_from"], run["tier_to"], run["output"]) == ("armed", "standby", kept["output"])
    reused = [one["name"] for one in run["stages"] if one["status"] == "reused"]
    assert reused == ["init", "context", "weights", "assign", "compile"]
    assert stage(run, "weights")["path"] == "attached"

    asked(call("standby", "stop", "chat", "--json"))
    left = {one["recipe"]: one["tier"] for one in asked(call("status", "--json"))["residents"]}
    assert set(left.values()) == {"resident"}
    asked(call("standby", "start", "chat.toml", "--json"))
    os.utime(next(model.glob("*.safetensors")))
    changed = asked(call("run", "chat.toml", "--json"))
    assert (changed["tier_to"], changed["output"]) == ("standby", kept["output"])
    assert stage(changed, "assign")["status"] == "done"
    assert call("standby", "stop", "other").returncode == 1
