"""Tries a rollout's hooks before it begins, as if it were each node's turn: those alone that say that they change
nothing when ``GLOWPLUG_ROLLOUT_DRY_RUN`` is 1."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from console.rollout.hooks import Ended, environment, run_program
from console.rollout.plan import Plan
from console.rollout.settings import Hook, Hooks


@dataclass(frozen=True)
class Tried:
    """One hook of one node, and how it ended."""

    node: str
    hook: str
    ended: Ended


def hooks_to_try(hooks: Hooks) -> Mapping[str, Hook]:
    """Return, by name, the hooks that may be tried, in the order in which they run."""
    found = {name: getattr(hooks, name) for name in hooks.names}
    return {name: hook for name, hook in found.items() if hook.dry_run}


async def try_hooks(plan: Plan, environ: Mapping[str, str]) -> tuple[Tried, ...]:
    """Run them for every node, as many nodes at one time as may load, and return all ends in the plan's order.

    ``environ``: what hooks get beside their own variables. Nothing is stored, and no node is asked.
    """
    uid, places = uuid.uuid4().hex, asyncio.Semaphore(plan.parallel)
    hooks = hooks_to_try(plan.rollout.hooks)

    async def of_node(node: str, batch: int) -> list[Tried]:
        async with places:
            ends = []
            for name, hook in hooks.items():
                own = environment(environ, uid, name, [(node, batch, 1)], is_dry=True)
                ends.append(Tried(node, name, await run_program(hook.argv, own, hook.timeout_s)))
            return ends

    nodes = [(node.name, batch.number - 1) for batch in plan.batches for node in batch.nodes]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(of_node(*node)) for node in nodes]
    return tuple(one for task in tasks for one in task.result())


def tried_lines(plan: Plan, tried: tuple[Tried, ...]) -> Iterator[str]:
    """Yield how each hook ended and what it printed; and which could not be tried."""
    for one in tried:
        yield f"tried {one.node} {one.hook}: {one.ended.reason or 'ok'}"
        yield from (f"  {line}" for line in one.ended.output)
    for name in _left_out(plan):
        yield f"hook {name} was not tried: it does not say dry_run = true"


def tried_document(plan: Plan, tried: tuple[Tried, ...]) -> dict[str, Any]:
    """Return the same for machines."""
    return {
        "tried": [
            {
                "node": one.node,
                "hook": one.hook,
                "done": one.ended.succeeded,
                "code": one.ended.code,
                "reason": one.ended.reason,
                "output": one.ended.output,
            }
            for one in tried
        ],
        "not_tried": _left_out(plan),
    }


def _left_out(plan: Plan) -> list[str]:
    hooks = plan.rollout.hooks
    return [name for name in hooks.names if name not in hooks_to_try(hooks)]
