"""A keystroke's worth of command line, real SSH, real agents, real first tokens, a history, and nothing left."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from db.queries import History
from remote_agent.protocol.messages import NATIVE_STAGES
from tests.end_to_end.consoles import Console, document, processes_naming, soon

pytestmark = pytest.mark.timeout(240)


def test_the_demo_warms_three_nodes_and_its_parts_sum_to_the_whole(tmp_path: Path) -> None:
    """One document, three ready runs, every stage, exact sums, the same in the history, nothing running."""
    directory = tmp_path / "demo"

    code, content = document("demo", "--headless", "--json", "--directory", str(directory), "--device", "cpu")

    runs = content["runs"]
    assert isinstance(runs, list)
    assert code == 0, content
    assert [run["node"] for run in runs] == ["demo-1", "demo-2", "demo-3"]
    for run in runs:
        assert (run["status"], run["tier_to"], run["failure"]) == ("ready", "standby", None)
        assert run["tier_from"] in ("cold", "cached")
        assert run["actor"]["user"]
        assert [stage["name"] for stage in run["stages"]] == list(NATIVE_STAGES)
        assert {stage["status"] for stage in run["stages"]} <= {"done", "skipped"}
        assert sum(stage["attributed_ns"] for stage in run["stages"]) + run["unattributed_ns"] == run["wall_ns"]
        weights = run["stages"][NATIVE_STAGES.index("weights")]
        assert weights["bytes"] == 39_096_832
        assert 0 < run["first_output_ns"] <= run["wall_ns"]
    assert len({run["output"] for run in runs}) == 1, "the same weights and prompt give the same first token"
    with History(directory / "history.db") as history:
        stored = {run.run_uid: run for run in history.runs()}
        assert {uid: run.state for uid, run in stored.items()} == {run["run_uid"]: "ready" for run in runs}
        assert {uid: run.wall_ns for uid, run in stored.items()} == {run["run_uid"]: run["wall_ns"] for run in runs}
    assert processes_naming(str(directory)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals) -> None:
    """Ctrl-C in the middle of a run: exit code 130, no document, no process, no directory."""
    console = Console("demo", "--headless", "--json", "--nodes", "1")
    directory = console.until_said("warming").split(" in ")[-1]
    console.until_said("queue done")

    console.signal(number)

    code, out = console.end()
    assert (code, out) == (130, ""), console.lines
    assert not any("Traceback" in line for line in console.lines)
    assert processes_naming(directory) == []
    assert not Path(directory).exists()


def test_a_killed_demo_leaves_nothing() -> None:
    """After SIGKILL the server ends the nodes in the middle of their run, and removes the directory."""
    console = Console("demo", "--headless", "--json", "--nodes", "1")
    directory = console.until_said("warming").split(" in ")[-1]
    console.until_said("queue done")

    console.signal(signal.SIGKILL)

    assert console.end() == (-signal.SIGKILL, "")
    soon(lambda: not processes_naming(directory), "nodes are still running")
    soon(lambda: not Path(directory).exists(), "the directory is still there")


def test_a_model_that_is_none_is_a_failed_run(tmp_path: Path) -> None:
    """A checkpoint that preflight refuses: exit code 1, and the document says why."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"<html>not found</html>" * 10)

    code, content = document("demo", "--headless", "--json", "--nodes", "1", "--model", str(tmp_path / "model"))

    (run,) = json.loads(json.dumps(content["runs"]))
    assert code == 1
    assert (run["status"], run["failure"]["stage"]) == ("failed", "preflight")
    assert "model.safetensors" in run["failure"]["detail"]
    assert sum(stage["attributed_ns"] for stage in run["stages"]) + run["unattributed_ns"] == run["wall_ns"]
