"""What only a GPU host runs still names things that exist."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
OURS = ("remote_agent", "bench", "console", "db")


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.py")), ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_imports_exists(path: Path) -> None:
    """Also inside functions, which no run on a CPU may reach."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    absent = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            module = importlib.import_module(node.module or "")
            absent += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]

    assert absent == []
