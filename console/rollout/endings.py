"""Attempts that were to be ended, until their nodes say that they are: asked again, with growing waits; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from console.rollout.events import StopEnded, StopNode
from console.rollout.states import Ending, NodeRow, RolloutState
from console.rollout.turn import Turn

AGAIN_S, AGAIN_MOST_S = 10.0, 300.0
MOST_ASKS = 8
"""About 20 minutes of silence; then a link that is back, a restart or an abort has it asked again."""


def count_answer(turn: Turn, event: StopEnded) -> None:
    """Forget what has ended; what may go on is due again later."""
    row = turn.state.node(event.node)
    ending = next((one for one in row.endings if one.attempt == event.attempt), None) if row is not None else None
    if row is None or ending is None:
        return
    if event.succeeded:
        turn.change_node(row.name, endings=tuple(one for one in row.endings if one is not ending))
    elif ending.is_asked:
        wait_s = min(AGAIN_MOST_S, AGAIN_S * 2.0 ** (ending.asks - 1))
        due_s = turn.state.now_s + wait_s
        _change(turn, row.name, replace(ending, is_asked=False, due_s=due_s, reason=event.reason))


def ask_anew(turn: Turn, name: str, was_cut_off: bool = False) -> None:
    """Have what a node has not ended asked for now; with ``was_cut_off`` also what was being asked."""
    row = turn.state.node(name)
    for ending in row.endings if row is not None else ():
        if was_cut_off or not ending.is_asked:
            _change(turn, name, replace(ending, is_asked=False, asks=0, due_s=turn.state.now_s))


def ask_again(turn: Turn) -> None:
    """Ask for what is due."""
    for row in turn.state.nodes:
        for ending in row.endings:
            if not ending.is_asked and ending.asks < MOST_ASKS and ending.due_s <= turn.state.now_s:
                _change(turn, row.name, replace(ending, is_asked=True, asks=ending.asks + 1))
                turn.want(StopNode(row.name, ending.attempt))


def may_go_on(state: RolloutState, row: NodeRow) -> Iterator[str]:
    """Yield a line for each attempt whose run may go on at the node, and whether it is asked again."""
    for ending in row.endings:
        if not ending.reason:
            continue
        more = "; it is asked again"
        if state.phase.is_over:
            more = ""
        elif not ending.is_asked and ending.asks >= MOST_ASKS:
            more = f"; asked {ending.asks} times, and again once its link is back"
        yield f"the run of attempt {ending.attempt} may go on there: {ending.reason}{more}"


def _change(turn: Turn, name: str, now: Ending) -> None:
    row = turn.state.node(name)
    assert row is not None
    turn.change_node(name, endings=tuple(now if one.attempt == now.attempt else one for one in row.endings))
