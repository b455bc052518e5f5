"""The ``[[rollout]]`` tables of ``fleet.toml``: names that are there once, recipes that exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from console.config_lines import hint
from console.rollout.settings import Rollout
from remote_agent.protocol.codec import Problem


def rollout_tables(raw: Mapping[str, Any], problems: list[Problem]) -> Sequence[object]:
    """Return what stands under ``rollout``, having said where that is not a list of tables."""
    tables = raw.get("rollout", [])
    if isinstance(tables, list):
        return tables
    problems.append(Problem("rollout", "expected tables [[rollout]], in double brackets"))
    return []


def name_problems(rollouts: Sequence[Rollout | None], recipes: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each name that an earlier rollout has, and each recipe that is not among ``recipes``."""
    seen: dict[str, int] = {}
    for index, rollout in enumerate(rollouts):
        if rollout is None:
            continue
        first = seen.setdefault(rollout.name.lower(), index)
        if first != index:
            yield Problem(f"rollout[{index}].name", f"rollout {first + 1} has the name {rollout.name!r} already")
        if rollout.recipe not in recipes:
            yield Problem(f"rollout[{index}].recipe", f"no recipe {rollout.recipe!r}{hint(rollout.recipe, recipes)}")
