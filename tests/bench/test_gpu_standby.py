"""What a standby's benchmark takes for right, and the kernels that it lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.gpu_standby import check_process, check_run
from bench.kernel_table import as_text, profile_kernels
from remote_agent.devices.cpu import CpuDevice

RIGHT = {"token": 7, "pass_token": 7, "is_right": True, "replayed": True, "difference": 0.01}


def process(row: dict[str, Any], prompt: str) -> dict[str, Any]:
    return {
        "medians_ms": {},
        "armed": {"graph": "1x128", "prompt": prompt},
        "first": RIGHT,
        "rounds": [{**RIGHT, **row}],
    }


@pytest.mark.parametrize(
    ("row", "prompt", "problem"),
    [
        ({}, "compiled: cache hit", ""),
        ({"token": 8}, "compiled: cache hit", ""),
        ({"is_right": False}, "compiled: cache hit", "logits off by 0.01"),
        ({"replayed": False}, "compiled: cache hit", "replayed is False"),
        ({}, "compile failed: TypeError", "not of compiled layers: compile failed: TypeError"),
    ],
)
def test_another_token_is_right_only_where_its_logits_are_near(row: dict[str, Any], prompt: str, problem: str) -> None:
    """And a graph counts as one of compiled layers only where it is."""
    problems = "; ".join(check_process("layer", process(row, prompt), 7, has_graphs=True))

    assert bool(problems) is bool(problem)
    assert problem in problems


@pytest.mark.parametrize(("mode", "problem"), [("off", "a pass's token 8, transformers' 7"), ("layer", "")])
def test_what_is_not_compiled_gives_what_transformers_gives(mode: str, problem: str) -> None:
    """However near a graph's logits are to it: both may be of the wrong weights."""
    problems = check_process(mode, process({"token": 8, "pass_token": 8}, "compiled: cache hit"), 7, has_graphs=True)

    assert problems == ([f"off, round 1: {problem}"] if problem else [])


def test_a_run_that_did_not_start_from_what_was_armed_is_a_problem() -> None:
    """Its tiers are named; one that did, and whose token is another, must have been compared."""
    stages = [{"name": name, "extra": {"token_ids": "8", "replayed": True}} for name in ("first_request", "hold")]
    record = {"state": "ready", "tier_from": "armed", "tier_to": "standby", "failure": None, "stages": stages}

    assert "resident" in str(check_run("layer", {**record, "tier_from": "resident"}, 8, has_graphs=True))
    assert check_run("layer", record, 8, has_graphs=True) is None
    assert "answered" in str(check_run("layer", record, 7, has_graphs=True))
    stages[1]["extra"] = {"graph_difference": 0.01, "graph_equal": True}
    assert check_run("layer", record, 7, has_graphs=True) is None
    assert "answered" in str(check_run("off", record, 7, has_graphs=True))
    stages[1]["extra"] = {"graph_difference": 0.01, "graph_equal": False}
    assert check_run("off", record, 7, has_graphs=True) is None


def test_kernels_are_counted_by_name() -> None:
    """On a CPU its operators; the table has a line for each, the longest first."""
    rows = torch.ones(64, 64)
    found = profile_kernels(lambda: (rows @ rows) @ rows, CpuDevice())
    counts = {name: count for name, count, _ in found["kernels"]}

    assert counts["aten::mm"] == 2
    assert found["count"] == sum(counts.values())
    assert "2 x  aten::mm" in as_text(found)
