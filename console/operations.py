"""What an operator asks hosts to do, as a list fixed before the question is put, and what became of it.

A `Task` names its node and its run. Nothing is looked up again after the answer, so
what is done is exactly what the dialog showed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from console.errors import GlowplugError
from console.format import counted, short_uid, size_text
from console.lines import Line, Piece
from console.state import NodeState, unfinished_runs
from remote_agent.protocol.messages import Tier


@dataclass(frozen=True)
class Task:
    """One thing to do to one run of one node; ``line`` is how a dialog names it."""

    node: str
    run_uid: str
    line: Line


@dataclass(frozen=True)
class Outcome:
    """``error`` is one line, None where it was done."""

    node: str
    error: str | None = None


def node_line(name: str, rest: Iterable[Piece] = (), *, hidden: bool = False) -> Line:
    """Return how dialogs name a node."""
    note: tuple[Piece, ...] = (("  (hidden by the filter)", "warning"),) if hidden else ()
    return ((name, "title"), *rest, *note)


def cancel_tasks(states: Iterable[NodeState], shown: Container[str], run_uid: str | None = None) -> tuple[Task, ...]:
    """Return one task for every unfinished run of the nodes, or for the one run."""
    tasks = []
    for state in states:
        for run in unfinished_runs(state):
            if run_uid is not None and run.run_uid != run_uid:
                continue
            stage = f"in {run.current_stage.name}" if run.current_stage else run.state.value
            words: list[Piece] = [(f"  {run.recipe}", "text"), (f"  run {short_uid(run.run_uid)}  {stage}", "muted")]
            tasks.append(Task(state.name, run.run_uid, node_line(state.name, words, hidden=state.name not in shown)))
    return tuple(tasks)


def resident_tasks(
    states: Iterable[NodeState], shown: Container[str], run_uid: str | None = None, tier: Tier | None = None
) -> tuple[Task, ...]:
    """Return one task for every warm model of the nodes, or for those of one run or one tier."""
    tasks: dict[tuple[str, str], Task] = {}
    for state in states:
        for resident in state.residents or ():
            if run_uid not in (None, resident.run_uid) or tier not in (None, resident.tier):
                continue
            words: list[Piece] = [
                (f"  {resident.recipe}", "text"),
                (f"  {resident.tier.value}  {size_text(resident.bytes)}", "muted"),
            ]
            line = node_line(state.name, words, hidden=state.name not in shown)
            tasks.setdefault((state.name, resident.run_uid), Task(state.name, resident.run_uid, line))
    return tuple(tasks.values())


def question(verb: str, tasks: Sequence[Task], noun: str) -> str:
    """``Cancel 2 runs on 2 nodes?``"""
    return f"{verb} {counted(len(tasks), noun)} on {counted(len({task.node for task in tasks}), 'node')}?"


async def carry_out(
    names: Iterable[str],
    calls: Iterable[Callable[[], Awaitable[object]]],
    told: Callable[[Outcome], None] | None = None,
) -> tuple[Outcome, ...]:
    """Make every call at once and return what became of each; one that fails does not stop the others."""

    async def one(node: str, call: Callable[[], Awaitable[object]]) -> Outcome:
        try:
            await call()
            outcome = Outcome(node)
        except (GlowplugError, OSError, TimeoutError) as error:
            outcome = Outcome(node, str(error) or type(error).__name__)
        if told is not None:
            told(outcome)
        return outcome

    return tuple(await asyncio.gather(*(one(node, call) for node, call in zip(names, calls, strict=True))))
