"""One turn of the machine: the state as it becomes, and what it wants done, in order.

What happens to a single node in it stands here; nothing here decides for the rollout as a whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from console.rollout.events import Finish, Intent, Paused, ReadNode, RunHook, StartNode, StopNode
from console.rollout.states import BackOut, Ending, NodeRow, NodeState, Phase, RolloutState

BACKOFF_MOST_S = 3600.0
AFTER_GATES = ("shift", "after_shift")


class Turn:
    """Collects one turn; lives within `machine.step` and is seen by nobody else."""

    def __init__(self, state: RolloutState) -> None:
        self.state = state
        self.intents: list[Intent] = []

    def want(self, intent: Intent) -> None:
        self.intents.append(intent)

    def change(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def change_node(self, name: str, **changes: Any) -> None:
        self.change(nodes=tuple(replace(row, **changes) if row.name == name else row for row in self.state.nodes))

    def rows(self, *states: NodeState) -> tuple[NodeRow, ...]:
        """Return the nodes that are in one of these states now."""
        return tuple(row for row in self.state.nodes if row.state in states)

    def progressed(self) -> None:
        """Give `progress_deadline_s` from now on."""
        self.change(progress_s=self.state.now_s)

    def pause(self, reason: str) -> None:
        self.change(phase=Phase.PAUSED, reason=reason)
        self.want(Paused(reason))

    def finish(self, phase: Phase, reason: str) -> None:
        self.change(phase=phase, reason=reason)
        self.want(Finish(phase is Phase.ABORTED, reason))

    def abort(self, reason: str) -> None:
        """End all that is under way; who can't be seen is asked first, for it may be ready."""
        self.change(phase=Phase.ABORTING, reason=reason, analysis=None)
        for row in self.state.nodes:
            if row.state.is_under_way:
                self.call_off(row, "aborted")
            elif row.state is NodeState.UNKNOWN:
                self.change_node(row.name, hook=None)
                self.want(ReadNode(row.name, row.attempt))

    def call_off(self, row: NodeRow, reason: str) -> None:
        """End an attempt that has not failed: the node is as if its turn had not come, but may be out of traffic."""
        self.stop(row)
        self.wait(row, reason, self.state.now_s)

    def stop(self, row: NodeRow) -> None:
        """Have what runs of a node's attempt ended; it is kept until the node has said that it is."""
        others = tuple(one for one in row.endings if one.attempt != row.attempt)
        self.change_node(row.name, endings=(*others, Ending(row.attempt)))
        self.want(StopNode(row.name, row.attempt))

    def wait(self, row: NodeRow, reason: str, due_s: float) -> None:
        self.change_node(
            row.name,
            state=NodeState.PENDING,
            reason=reason,
            due_s=due_s,
            hook=None,
            is_verified=False,
            is_shifted=False,
            failed_at_gate=False,
        )

    def start(self, row: NodeRow) -> None:
        drains = "before_shift" in self.state.rules.hooks
        self.change_node(
            row.name,
            state=NodeState.DRAINING if drains else NodeState.WARMING,
            reason="",
            attempt=row.attempt + 1,
            tries=row.tries + 1,
            since_s=self.state.now_s,
            is_out=row.is_out or drains,
            back_out=BackOut.NONE,
        )
        self.want(StartNode(row.name, row.attempt + 1, ("before_shift", "warm") if drains else ("warm",)))

    def shift(self, row: NodeRow) -> None:
        """Move a verified node's traffic to it, from the first of its hooks on."""
        self._run_hook_after(row, ())

    def hook_succeeded(self, row: NodeRow, hook: str) -> None:
        self._run_hook_after(row, AFTER_GATES[: AFTER_GATES.index(hook) + 1])

    def _run_hook_after(self, row: NodeRow, over: tuple[str, ...]) -> None:
        hook = next((one for one in AFTER_GATES if one in self.state.rules.hooks and one not in over), None)
        if hook is None:
            self.become_ready(row)
            return
        self.change_node(
            row.name,
            state=NodeState.SHIFTING,
            hook=hook,
            is_out=row.is_out or hook == "shift",
            is_shifted=True,
            since_s=row.since_s if over else self.state.now_s,
        )
        self.want(RunHook(row.name, row.attempt, hook))

    def become_ready(self, row: NodeRow) -> None:
        self.change_node(row.name, state=NodeState.READY, reason="", hook=None, is_out=False, is_down=False)
        self.progressed()

    def fail(self, row: NodeRow, reason: str, unreachable: bool = False) -> None:
        """Try again later while there are tries left and nothing was aborted; else the node has failed."""
        rules, is_down = self.state.rules, row.is_down or unreachable
        if row.tries <= rules.retries and self.state.phase is not Phase.ABORTING:
            backoff_s = min(BACKOFF_MOST_S, rules.backoff_s * 2.0 ** (row.tries - 1))
            self.wait(row, reason, self.state.now_s + backoff_s)
        else:
            self.fail_for_good(row, reason)
        self.change_node(row.name, is_down=is_down)

    def fail_for_good(self, row: NodeRow, reason: str, at_gate: bool = False) -> None:
        """Fail a node whatever tries it has left; only the operator has it tried again."""
        self.change_node(
            row.name,
            state=NodeState.FAILED,
            reason=reason,
            hook=None,
            is_verified=False,
            is_shifted=False,
            has_failed=True,
            failed_at_gate=at_gate,
        )
