"""A rollout as an operator has it: a real node, hooks, a gate that fails, the fix from another terminal."""

from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path

import pytest

from console.demo import RECIPE, EmbeddedFleet
from db import rollouts
from db.queries import History
from db.rollout_store import lease_of
from tests.end_to_end.consoles import Console, document, soon

pytestmark = pytest.mark.timeout(240)
NAME = "pre-warm"


def write_rollout(config: Path, folder: Path) -> Path:
    """Return a fleet.toml with a rollout whose gate passes once the file ``fixed`` is there."""
    hook = folder / "hook"
    hook.write_text(
        f"#!/bin/sh\ncd {shlex.quote(str(folder))}\n"
        'echo "$GLOWPLUG_ROLLOUT_PHASE $GLOWPLUG_ROLLOUT_ATTEMPT" >> hooks\n'
        'echo "$GLOWPLUG_CONFIG $GLOWPLUG_HISTORY" > places\n'
    )
    hook.chmod(0o755)
    argv = f"{{ argv = [{json.dumps(str(hook))}] }}"
    path = folder / "fleet.toml"
    path.write_text(
        f"{config.read_text()}\n[[rollout]]\nname = '{NAME}'\nselector = 'all'\nrecipe = '{RECIPE}'\nmax_failures = 2\n"
        f"gates = [{{ tier = 'standby' }}, {{ command = ['test', '-e', {json.dumps(str(folder / 'fixed'))}] }}]\n"
        f"[rollout.hooks]\nbefore_shift = {argv}\nshift = {argv}\non_abort = {argv}\n"
    )
    return path


def test_a_canary_fails_its_gate_is_fixed_and_comes_through_over_three_controllers(
    node: EmbeddedFleet, config: Path, tmp_path: Path
) -> None:
    """Interrupted and killed in between: the run goes on there, the node is read, and nothing is done twice."""
    places = ("--config", str(write_rollout(config, tmp_path)), "--history", str(tmp_path / "history.db"))
    hooks, began_ns = tmp_path / "hooks", time.time_ns()

    def is_free() -> bool:
        with History(tmp_path / "history.db") as history:
            record = rollouts.read(history, NAME)
        assert record is not None
        return lease_of(record.row, time.time_ns()) is None

    started = Console(*places, "rollout", "start", NAME)
    started.until_said("paused: gate 2 failed")
    started.until_said("demo-1: backed out")
    assert document(*places, "rollout", "resume", NAME, "--json")[0] == 1
    started.signal(signal.SIGINT)
    assert started.end()[0] == 130
    started.until_said(f"glowplug rollout resume {NAME}")
    assert hooks.read_text() == "before_shift 1\non_abort 1\n"
    assert (tmp_path / "places").read_text() == f"{places[1]} {places[3]}\n"

    (tmp_path / "fixed").touch()
    retried = Console(*places, "rollout", "retry", NAME, "demo-1")
    retried.until_said("demo-1 is tried again")
    retried.signal(signal.SIGKILL)
    assert retried.end()[0] == -signal.SIGKILL
    soon(is_free, "its lease never ran out")

    code, content = document(*places, "rollout", "promote", NAME, "--json")
    assert (code, content["phase"], content["reason"]) == (0, "done", "1 ready")
    assert hooks.read_text() == "before_shift 1\non_abort 1\nbefore_shift 2\nshift 2\n"
    samples = [one for one in content["timeline"] if one["what"] == "GateSampled"]  # type: ignore[attr-defined]
    assert [(one["data"]["analysis"], one["data"]["gate"], one["data"]["verdict"]) for one in sorted(
        samples, key=lambda one: (one["data"]["analysis"], one["data"]["gate"])
    )] == [(1, 0, "pass"), (1, 1, "fail"), (2, 0, "pass"), (2, 1, "pass")]  # fmt: skip
    with History(tmp_path / "history.db") as history:
        runs = [run for run in history.runs() if run.started_ns > began_ns]
    assert len(runs) == 2, "the node's own runs of before aside"
