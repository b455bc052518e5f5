"""What only a GPU host runs still names things that exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
OURS = ("remote_agent", "bench", "console", "db")


def exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.py")), ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_imports_exists(path: Path) -> None:
    """Also inside functions, which no run on a CPU may reach."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    absent = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            absent += [name for name in names if not exists(name)]

    assert absent == []
