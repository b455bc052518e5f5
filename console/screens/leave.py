"""Asks before the console is left while it carries rollouts out."""

from __future__ import annotations

from collections.abc import Mapping

from console.format import counted
from console.rollout.states import RolloutState
from console.screens.confirm import ConfirmScreen
from console.widgets.paint import Line

NOTE = "They are paused: hooks that move traffic are waited for, what runs on nodes goes on there."


class LeaveScreen(ConfirmScreen):
    """Names each rollout with its phase."""

    def __init__(self, carried: Mapping[str, RolloutState]) -> None:
        lines: list[Line] = [((name, "title"), (f"  {state.phase.value}", "muted")) for name, state in carried.items()]
        question = f"Quit? This console carries out {counted(len(carried), 'rollout')}."
        super().__init__(question, lines, "Pause and quit", note=NOTE)
