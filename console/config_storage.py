"""Storage that nodes share: a node's ``storage_group`` names it, ``[storage_groups]`` how many load from it at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from console.config_lines import hint
from console.config_nodes import Node
from console.places import PARALLEL_MOST
from remote_agent.protocol.codec import Problem

ONE_LOAD = 1
"""At one time from a group of which ``[storage_groups]`` says nothing."""


def storage_limits(table: Mapping[str, object], nodes: Sequence[Node], problems: list[Problem]) -> Mapping[str, int]:
    """Return, for each group that a node names, how many of its nodes may load at one time."""
    used = dict.fromkeys(node.storage_group for node in nodes if node.storage_group)
    limits = dict.fromkeys(used, ONE_LOAD)
    for name, limit in table.items():
        path = f"storage_groups.{name}"
        if name not in used:
            problems.append(Problem(path, f"no node has storage_group = {name!r}{hint(name, list(used))}"))
        elif isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= PARALLEL_MOST:
            problems.append(Problem(path, f"expected a number of loads within 1..{PARALLEL_MOST}"))
        else:
            limits[name] = limit
    return limits
