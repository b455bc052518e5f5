"""A plan as a person reads it, and as a JSON document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from console.format import NS_PER_S, counted, duration_text
from console.rollout.plan import Candidate, Plan, PlannedBatch
from console.rollout.settings import Rollout
from remote_agent.protocol.codec import encode

NO_HISTORY = "no history"


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the plan, a line at a time."""
    rollout = plan.rollout
    sizes = f"{counted(len(plan.nodes), 'node')} in {_batches(len(plan.batches))}"
    yield f"rollout {rollout.name}: recipe {rollout.recipe} to {sizes}; this is a plan, nothing is done"
    rules, deadline = plan.rules, _seconds(rollout.progress_deadline_s)
    yield f"  at most {rules.max_unavailable} unavailable at once, and {counted(plan.parallel, 'run')} at one time"
    for name, limit in plan.storage_groups.items():
        yield f"  from storage {name}, {counted(limit, 'run')} at one time"
    yield f"  aborts when {rules.max_failures} failed, or after {deadline} without progress"
    retries = "no retry"
    if rollout.retries:
        word = "retry" if rollout.retries == 1 else "retries"
        retries = f"{rollout.retries} {word}, the first after {_seconds(rollout.backoff_s)}"
    yield f"  a node has {_seconds(rollout.node_timeout_s)}; {retries}"
    for name in rollout.hooks.names:
        hook = getattr(rollout.hooks, name)
        yield f"  hook {name}: {' '.join(hook.argv)} ({_seconds(hook.timeout_s)} at most)"
    width = max(len(node.name) for node in plan.nodes)
    for batch in plan.batches:
        yield from _batch_lines(batch, rollout, width)
    yield f"in all: {_expected(plan)}; hooks, pauses and retries come on top"


def _batch_lines(batch: PlannedBatch, rollout: Rollout, width: int) -> Iterator[str]:
    canary = ", canary" if batch.is_canary else ""
    yield f"batch {batch.number}{canary}: {counted(len(batch.nodes), 'node')}, {_expected(batch)}"
    for node in batch.nodes:
        yield f"  {node.name:{width}}  from {node.tier.value:8}  {_node_expected(node)}"
    for number, gate in batch.gates.items():
        unknown = batch.without_history if gate.factor is not None else 0
        note = f" (inconclusive for {counted(unknown, 'node')} of no history)" if unknown else ""
        yield f"  gate {number}: {gate}{note}"
    yield f"  steps: {' → '.join(_steps(batch, rollout))}"
    if batch.pauses_after:
        yield "  then it waits for the operator"


def _steps(batch: PlannedBatch, rollout: Rollout) -> list[str]:
    """What is done with each node of the batch, in order."""
    hooks = rollout.hooks
    steps = (
        ("before_shift", hooks.before_shift is not None),
        ("warm", True),
        ("gates", bool(batch.gates)),
        ("shift", hooks.shift is not None),
        ("after_shift", hooks.after_shift is not None),
    )
    return [name for name, is_done in steps if is_done]


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the plan for machines: durations in seconds, null where there is no history."""
    rollout = plan.rollout
    return {
        "rollout": rollout.name,
        "recipe": rollout.recipe,
        "nodes": len(plan.nodes),
        "max_unavailable": plan.rules.max_unavailable,
        "max_failures": plan.rules.max_failures,
        "parallel": plan.parallel,
        "storage_groups": dict(plan.storage_groups),
        "progress_deadline_s": rollout.progress_deadline_s,
        "node_timeout_s": rollout.node_timeout_s,
        "retries": rollout.retries,
        "backoff_s": rollout.backoff_s,
        "hooks": {name: encode(getattr(rollout.hooks, name)) for name in rollout.hooks.names},
        "expected_s": plan.expected_ns / NS_PER_S,
        "nodes_without_history": plan.without_history,
        "batches": [_batch_document(batch, rollout) for batch in plan.batches],
    }


def _batch_document(batch: PlannedBatch, rollout: Rollout) -> dict[str, Any]:
    return {
        "batch": batch.number,
        "canary": batch.is_canary,
        "expected_s": batch.expected_ns / NS_PER_S,
        "steps": _steps(batch, rollout),
        "pauses_after": batch.pauses_after,
        "gates": [
            {"gate": number, **{key: value for key, value in encode(gate).items() if value is not None}}
            for number, gate in batch.gates.items()
        ],
        "nodes": [
            {
                "node": node.name,
                "from_tier": node.tier.value,
                "expected_s": None if node.wall_ns is None else node.wall_ns / NS_PER_S,
                "runs": node.runs,
            }
            for node in batch.nodes
        ],
    }


def _node_expected(node: Candidate) -> str:
    if node.wall_ns is None:
        return NO_HISTORY
    return f"{duration_text(node.wall_ns)}, median of {counted(node.runs, 'run')}"


def _expected(part: PlannedBatch | Plan) -> str:
    """Say how long a batch or all of it is expected to take, and of how many nodes nothing is known."""
    left_out, count = part.without_history, len(part.nodes)
    if left_out == count:
        return NO_HISTORY
    missing = f", without {counted(left_out, 'node')} of no history" if left_out else ""
    return f"expected {duration_text(part.expected_ns)}{missing}"


def _seconds(seconds: float) -> str:
    return duration_text(seconds * NS_PER_S)


def _batches(count: int) -> str:
    return f"{count} batch" if count == 1 else f"{count} batches"
