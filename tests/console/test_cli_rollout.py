"""``glowplug rollout plan``: whole documents, as they are printed, for fleets of 1, 3 and 300 nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from console.cli import run
from console.cli.rollout import command
from console.config import load
from db.database import connect, open_history
from db.store import store_batch
from remote_agent.recipe import recipe_hash
from tests.db.histories import whole_run

RECIPE = '[recipes.llama]\nmodel = { path = "/models/llama" }\n'
MS = 1_000_000


class Desk:
    """A configuration and a history of this test's own."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "fleet.toml"
        self.history = folder / "history.db"

    def write(self, nodes: str, rollout: str) -> None:
        tables = f'[[rollout]]\nname = "pre-warm"\nrecipe = "llama"\n{rollout}'
        self.config.write_text(f"[defaults]\nparallel = 2\n{nodes}{RECIPE}{tables}", encoding="utf-8")

    def remember(self, node: str, *walls_ms: int, tier_from: str = "cold", tier_to: str = "cold") -> None:
        """Store a ready run of the recipe for each time, oldest first."""
        hashed = recipe_hash(load(self.config).recipe("llama"))
        open_history(self.history)
        with contextlib.closing(connect(self.history, read_only=False)) as connection:
            for number, wall_ms in enumerate(walls_ms):
                uid = f"{node}-{tier_from}-{number}"
                records = whole_run(
                    uid,
                    journal=f"journal-{uid}",
                    node=node,
                    recipe_hash=hashed,
                    tier_from=tier_from,
                    tier_to=tier_to,
                    wall_ns=wall_ms * MS,
                    started_ns=(number + 1) * 1_000_000_000,
                )
                whole = [
                    dataclasses.replace(
                        record,
                        event=dataclasses.replace(record.event, node=node),
                        run=record.run and dataclasses.replace(record.run, node=node),
                    )
                    for record in records
                ]
                store_batch(connection, whole)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(tmp_path)
    monkeypatch.setenv("GLOWPLUG_CONFIG", str(desk.config))
    monkeypatch.setenv("GLOWPLUG_HISTORY", str(desk.history))
    monkeypatch.setenv("GLOWPLUG_LOG", str(tmp_path / "glowplug.log"))
    monkeypatch.setenv("GLOWPLUG_STATE", str(tmp_path))
    return desk


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run(["rollout", "plan", "pre-warm", *options]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    return told.out


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    content = json.loads(printed(capsys, "--json"))
    assert isinstance(content, dict)
    return content


def test_one_node_without_history_is_planned_all_the_same(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """No history file is needed, and none is made."""
    desk.write("[nodes.gpu-1]\n", 'selector = "all"\n')

    assert printed(capsys) == (
        "rollout pre-warm: recipe llama to 1 node in 1 batch; this is a plan, nothing is done\n"
        "  at most 1 unavailable at once, and 2 runs at one time\n"
        "  aborts when 1 failed, or after 30 min 00 s without progress\n"
        "  a node has 15 min 00 s; no retry\n"
        "batch 1: 1 node, no history\n"
        "  gpu-1  from cold      no history\n"
        "  steps: warm\n"
        "in all: no history; hooks, pauses and retries come on top\n"
    )
    assert not desk.history.exists()


THREE = '[nodes.gpu-1]\n[nodes.gpu-2]\ntags = ["first"]\n[nodes.gpu-3]\n'
GATED = """
selector = ["gpu-*"]
canary = 1
serial = ["100%"]
order = "tag:first"
max_unavailable = "70%"
max_failures = 2
retries = 2
pause_after = [1, 2]
gates = [
  { tier = "standby" },
  { measure = "first_output", limit_s = 0.5, count = 3, interval_s = 2, failure_limit = 1, batches = [1] },
]
[rollout.hooks]
before_shift = { argv = ["/opt/drain", "now"] }
shift = { argv = ["/opt/shift"], timeout_s = 5 }
on_abort = { argv = ["/opt/back-out"] }
"""


def test_three_nodes_with_gates_hooks_and_history(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """70% of 3 is 2 at once; the canary has a gate more, and the last batch no pause behind it."""
    desk.write(THREE, GATED)
    desk.remember("gpu-1", 4_000, 2_000, 3_000)
    desk.remember("gpu-2", 1_500)

    assert printed(capsys) == (
        "rollout pre-warm: recipe llama to 3 nodes in 2 batches; this is a plan, nothing is done\n"
        "  at most 2 unavailable at once, and 2 runs at one time\n"
        "  aborts when 2 failed, or after 30 min 00 s without progress\n"
        "  a node has 15 min 00 s; 2 retries, the first after 10.0 s\n"
        "  hook before_shift: /opt/drain now (1 min 00 s at most)\n"
        "  hook shift: /opt/shift (5.00 s at most)\n"
        "  hook on_abort: /opt/back-out (1 min 00 s at most)\n"
        "batch 1, canary: 1 node, expected 5.50 s\n"
        "  gpu-2  from cold      1.50 s, median of 1 run\n"
        "  gate 1: tier standby\n"
        "  gate 2: first_output at most 0.5 s, 3 samples 2 s apart, 1 may fail\n"
        "  steps: before_shift → warm → gates → shift\n"
        "  then it waits for the operator\n"
        "batch 2: 2 nodes, expected 3.00 s, without 1 node of no history\n"
        "  gpu-1  from cold      3.00 s, median of 3 runs\n"
        "  gpu-3  from cold      no history\n"
        "  gate 1: tier standby\n"
        "  steps: before_shift → warm → gates → shift\n"
        "in all: expected 8.50 s, without 1 node of no history; hooks, pauses and retries come on top\n"
    )


def test_a_gate_on_the_median_is_said_to_have_none_before_it_is_looked_at(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch whose nodes have a history each has no such note, nor has a gate with a limit of its own."""
    gates = '{ measure = "total", factor = 1.5 }, { measure = "init", limit_s = 9 }'
    desk.write(THREE, f'selector = "all"\nserial = [1, 2]\ngates = [{gates}]\n')
    desk.remember("gpu-1", 4_000)
    desk.remember("gpu-2", 4_000)

    assert [line.strip() for line in printed(capsys).splitlines() if line.startswith("  gate")] == [
        "gate 1: total at most 1.5× the node's median",
        "gate 2: init at most 9 s",
        "gate 1: total at most 1.5× the node's median (inconclusive for 1 node of no history)",
        "gate 2: init at most 9 s",
    ]


def test_three_nodes_as_json(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures, in seconds; null where nothing is known."""
    desk.write(THREE, GATED)
    desk.remember("gpu-1", 4_000, 2_000, 3_000)
    content = document(capsys)
    batches = content.pop("batches")

    assert content == {
        "rollout": "pre-warm",
        "recipe": "llama",
        "nodes": 3,
        "max_unavailable": 2,
        "max_failures": 2,
        "parallel": 2,
        "storage_groups": {},
        "progress_deadline_s": 1800.0,
        "node_timeout_s": 900.0,
        "retries": 2,
        "backoff_s": 10.0,
        "hooks": {
            "before_shift": {"argv": ["/opt/drain", "now"], "timeout_s": 60.0, "dry_run": False},
            "shift": {"argv": ["/opt/shift"], "timeout_s": 5.0, "dry_run": False},
            "on_abort": {"argv": ["/opt/back-out"], "timeout_s": 60.0, "dry_run": False},
        },
        "expected_s": 7.0,
        "nodes_without_history": 2,
    }
    assert [gate["gate"] for gate in batches[0].pop("gates")] == [1, 2]
    assert batches[0] == {
        "batch": 1,
        "canary": True,
        "expected_s": 4.0,
        "steps": ["before_shift", "warm", "gates", "shift"],
        "pauses_after": True,
        "nodes": [{"node": "gpu-2", "from_tier": "cold", "expected_s": None, "runs": 0}],
    }
    assert batches[1]["gates"] == [
        {
            "gate": 1,
            "tier": "standby",
            "status": 200,
            "timeout_s": 10.0,
            "count": 1,
            "interval_s": 5.0,
            "failure_limit": 0,
            "batches": [],
        }
    ]
    assert [(node["node"], node["expected_s"], node["runs"]) for node in batches[1]["nodes"]] == [
        ("gpu-1", 3.0, 3),
        ("gpu-3", None, 0),
    ]


def test_three_hundred_nodes_in_batches_that_round_down(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """33% of 300 is 99, 1.5% can't be said, and each node is in one batch in the file's order."""
    names = [f"gpu-{number:03}" for number in range(300)]
    desk.write(
        "".join(f"[nodes.{name}]\n" for name in names),
        'selector = "all"\ncanary = "1%"\nserial = [1, "33%"]\nmax_unavailable = "7%"\nmax_failures = "1%"\n',
    )
    content = document(capsys)

    assert [len(batch["nodes"]) for batch in content["batches"]] == [3, 1, 99, 99, 98]
    assert [node["node"] for batch in content["batches"] for node in batch["nodes"]] == names
    assert (content["max_unavailable"], content["max_failures"]) == (21, 3)
    assert len(printed(capsys).splitlines()) == 4 + 5 * 2 + 300 + 1


def test_who_shares_storage_or_places_is_said(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """--parallel wins over the configuration's number; the storage of the nodes is named with its own."""
    desk.write('[nodes.gpu-1]\nstorage_group = "nas-1"\n[nodes.gpu-2]\n', 'selector = "all"\n')
    assert run(["rollout", "plan", "pre-warm", "--parallel", "1"]) == 0

    said = capsys.readouterr().out.splitlines()
    assert said[1:3] == [
        "  at most 1 unavailable at once, and 1 run at one time",
        "  from storage nas-1, 1 run at one time",
    ]


def test_the_coldest_come_first_by_what_the_history_knows(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """A node's tier is what its last run left, and its time that of runs from there; parallel runs share a wave."""
    desk.write(THREE, 'selector = "all"\norder = "coldest_first"\nmax_unavailable = 3\n')
    desk.remember("gpu-1", 4_000, tier_to="standby")
    desk.remember("gpu-1", 20, 30, tier_from="standby", tier_to="standby")
    desk.remember("gpu-2", 5_000, tier_to="cached")
    (batch,) = document(capsys)["batches"]

    assert [(node["node"], node["from_tier"], node["expected_s"]) for node in batch["nodes"]] == [
        ("gpu-3", "cold", None),
        ("gpu-2", "cached", None),
        ("gpu-1", "standby", 0.025),
    ]


def test_runs_of_another_recipe_of_that_name_count_for_nothing(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe is its content: changed, it has no history."""
    desk.write("[nodes.gpu-1]\n", 'selector = "all"\n')
    desk.remember("gpu-1", 4_000, tier_to="standby")
    desk.config.write_text(desk.config.read_text().replace("/models/llama", "/models/other"))
    (batch,) = document(capsys)["batches"]

    assert batch["nodes"] == [{"node": "gpu-1", "from_tier": "cold", "expected_s": None, "runs": 0}]


def test_a_selector_that_names_no_node_is_said(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """As with every verb: exit 2, with what is close."""
    desk.write('[nodes.gpu-1]\ntags = ["eu"]\n', 'selector = ["gpu-1", "tag:ue"]\n')

    assert run(["rollout", "plan", "pre-warm"]) == 2
    assert capsys.readouterr().err == "glowplug: no node matches 'tag:ue'; did you mean tag:eu?\n"


HOOKS = """selector = "all"
max_unavailable = 2
[rollout.hooks]
before_shift = {{ argv = ["{program}", "drain"], dry_run = true }}
shift = {{ argv = ["{program}", "shift"] }}
on_abort = {{ argv = ["{program}", "back"], dry_run = true }}
"""


def test_hooks_that_heed_a_dry_run_are_tried_by_the_plan(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For every node, with its own environment; one that does not say so is not run, but named."""
    program = tmp_path / "hook"
    text = f'echo "$1 $GLOWPLUG_ROLLOUT_NODE $GLOWPLUG_ROLLOUT_PHASE $GLOWPLUG_ROLLOUT_DRY_RUN" | tee -a {tmp_path}/ran'
    program.write_text(f'#!/bin/sh\n{text}\n[ "$1 $GLOWPLUG_ROLLOUT_NODE" != "back b" ] || exit 3\n')
    program.chmod(0o755)
    desk.write("[nodes.a]\n[nodes.b]\n", HOOKS.format(program=program))

    assert run(["rollout", "plan", "pre-warm"]) == 0
    assert not (tmp_path / "ran").exists()
    capsys.readouterr()
    assert run(["rollout", "plan", "pre-warm", "--try-hooks"]) == 1
    assert capsys.readouterr().out.split("come on top\n")[1].splitlines() == [
        "tried a before_shift: ok",
        "  drain a before_shift 1",
        "tried a on_abort: ok",
        "  back a on_abort 1",
        "tried b before_shift: ok",
        "  drain b before_shift 1",
        "tried b on_abort: ended with 3: back b on_abort 1",
        "  back b on_abort 1",
        "hook shift was not tried: it does not say dry_run = true",
    ]
    assert run(["rollout", "plan", "pre-warm", "--try-hooks", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["not_tried"] == ["shift"]
    assert [(one["node"], one["hook"], one["done"], one["code"]) for one in found["tried"]] == [
        ("a", "before_shift", True, 0),
        ("a", "on_abort", True, 0),
        ("b", "before_shift", True, 0),
        ("b", "on_abort", False, 3),
    ]
    assert not desk.history.exists()


def test_a_gate_that_asks_for_a_nodes_host_needs_one(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that ssh alone resolves is no address; it is said before anything is begun."""
    gate = 'selector = "all"\ngates = [{ tier = "cached" }, { http = "http://{host}:8000/health" }]\n'
    desk.write('[nodes.a]\nhost = "10.0.0.1"\n[nodes.b]\n[nodes.c]\n', gate)

    assert run(["rollout", "plan", "pre-warm"]) == 2
    assert (
        "rollout pre-warm: gate 2 asks http://{host}:8000/health, and node b and 1 more has no host in fleet.toml"
        in capsys.readouterr().err
    )


def test_a_rollout_that_is_not_there_is_said(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, with what is close."""
    desk.write("[nodes.gpu-1]\n", 'selector = "all"\n')

    assert run(["rollout", "plan", "prewarm"]) == 2
    assert capsys.readouterr().err == "glowplug: no rollout 'prewarm'; did you mean pre-warm?\n"


def test_config_check_counts_rollouts(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """In words, and by name for machines."""
    desk.write("[nodes.gpu-1]\n", 'selector = "all"\n')

    assert run(["config", "check"]) == 0
    assert capsys.readouterr().out == f"{desk.config}: 1 node, 1 recipe, 1 rollout, no mistake\n"
    assert run(["config", "check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rollouts"] == ["pre-warm"]


def test_help_has_each_verb_of_a_rollout_once_and_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """In the order in which they are needed; no line is cut off."""
    assert run(["rollout", "--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    verbs = [line.split()[0] for line in listed]

    assert verbs[:3] == ["plan", "start", "status"]
    assert sorted(verbs) == sorted(command.commands)
    assert not [line for line in listed if "..." in line]
