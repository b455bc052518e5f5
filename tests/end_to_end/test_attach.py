"""README's way to attach from a serving process, as it stands there, against a real agent and a real resident."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remote_agent.agentd.paths import StateDir
from remote_agent.keeper.client import KeeperAddress, list_residents
from tests.end_to_end.hosts import REPOSITORY
from tests.remote_agent import checkpoints

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SECTION = README[README.index("## Attach from a serving process") : README.index("## Verbs")]

Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """Return a function that runs this Python as a user with a state directory of their own would."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(REPOSITORY)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    yield run
    run("-m", "remote_agent", "stop", "--force", "--keeper")


@pytest.mark.timeout(240)
def test_readme_attaches_to_what_a_run_left_resident(call: Call, tmp_path: Path) -> None:
    """Run, end the agent, attach by README's own lines, start from the resident again, release: nothing is left."""
    model = checkpoints.write_llama(tmp_path / "llama", max_position_embeddings=256)
    (tmp_path / "llama.toml").write_text(
        f'model = {{ path = "{model}" }}\ndevices = ["cpu"]\ntarget_tier = "resident"\n'
    )
    state = StateDir(tmp_path / "state" / "glowplug-agent")
    first = call("-m", "remote_agent", "run", "llama.toml")
    assert first.returncode == 0, first.stderr
    assert first.stdout.rstrip().endswith("-> resident"), first.stdout
    assert call("-m", "remote_agent", "stop").returncode == 0
    (name,) = [one.name for one in list_residents(KeeperAddress(state))]

    (example,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    said = call("-W", "error", "-c", example)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == f"{name} torch.Size([1, {checkpoints.VOCABULARY}])\n"

    again = call("-m", "remote_agent", "run", "llama.toml")
    assert "resident -> resident" in again.stdout, again.stdout + again.stderr
    assert f"attached  the keeper has it as {name}" in again.stdout
    refused = call("-m", "remote_agent", "stop", "--keeper")
    assert (refused.returncode, "still here: llama on cpu" in refused.stderr) == (1, True)
    released = call("-m", "remote_agent", "release", "--all")
    assert (released.returncode, "released llama on cpu" in released.stdout) == (0, True)
    assert list_residents(KeeperAddress(state)) == ()
    assert call("-m", "remote_agent", "stop", "--keeper").returncode == 0


def test_readme_s_example_is_short() -> None:
    """Ten lines and no more are what a reader takes in."""
    (example,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)

    assert len([line for line in example.splitlines() if line]) <= 10
