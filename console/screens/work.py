"""Asks, does and reports what an operator wants of hosts; the same from every screen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from console.format import counted
from console.operations import Outcome, Task, cancel_tasks, carry_out, question, resident_tasks
from console.screens.confirm import ConfirmScreen
from console.screens.workers import begin
from console.state import NodeState
from remote_agent.protocol.messages import Tier

if TYPE_CHECKING:
    from console.app import GlowplugApp

PARK_NOTE = "They wait in the host's memory; their weights stay on the GPU. The next run puts its own back."
RELEASE_NOTE = "Their memory is freed; the next start there is a cold or a cached one."


class HostWork:
    """Does what the dialog named, and nothing else; says what became of it."""

    def __init__(self, app: GlowplugApp) -> None:
        self._app = app

    def cancel(self, states: Iterable[NodeState], shown: Collection[str], run_uid: str | None = None) -> None:
        """Ask, then cancel every unfinished run of those nodes, or the one run."""
        tasks = cancel_tasks(states, shown, run_uid)
        if tasks:
            dialog = ConfirmScreen(
                question("Cancel", tasks, "run"), [task.line for task in tasks], f"Cancel {counted(len(tasks), 'run')}"
            )
            self._app.ask(dialog, partial(self._each, "run", "cancelled", tasks, self._app.fleet.cancel))

    def release(self, states: Iterable[NodeState], shown: Collection[str], run_uid: str | None = None) -> None:
        """Ask, then let go of every warm model of those nodes, or of the one run's."""
        tasks = resident_tasks(states, shown, run_uid)
        if tasks:
            text = question("Release", tasks, "warm model")
            dialog = ConfirmScreen(text, [task.line for task in tasks], "Release", note=RELEASE_NOTE)
            self._app.ask(dialog, partial(self._each, "warm model", "released", tasks, self._app.fleet.release))

    def park(self, states: Iterable[NodeState], shown: Collection[str]) -> None:
        """Ask, then take every standby of those nodes off its GPU."""
        tasks = resident_tasks(states, shown, tier=Tier.STANDBY)
        if tasks:
            dialog = ConfirmScreen(
                question("Park", tasks, "standby"), [task.line for task in tasks], "Park", note=PARK_NOTE
            )
            self._app.ask(dialog, partial(self._each, "standby", "parked", tasks, self._app.fleet.park))

    def unpark(self, states: Iterable[NodeState], shown: Collection[str]) -> None:
        """Ask, then put every parked standby of those nodes back."""
        tasks = resident_tasks(states, shown, tier=Tier.PARKED)
        if tasks:
            dialog = ConfirmScreen(question("Unpark", tasks, "standby"), [task.line for task in tasks], "Unpark")
            self._app.ask(dialog, partial(self._each, "standby", "put back", tasks, self._app.fleet.unpark))

    def probe(self, names: Sequence[str]) -> None:
        begin(self._app, partial(self._probe, names), "probe")

    async def _probe(self, names: Sequence[str]) -> None:
        calls = [partial(self._app.fleet.probe, name) for name in names]
        self._report("node", "probed", await carry_out(names, calls))

    async def _each(
        self, noun: str, done: str, tasks: Sequence[Task], call: Callable[[str, str], Awaitable[object]]
    ) -> None:
        names = [task.node for task in tasks]
        calls = [partial(call, task.node, task.run_uid) for task in tasks]
        self._report(noun, done, await carry_out(names, calls))

    def _report(self, noun: str, done: str, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if len(failed) < len(outcomes):
            self._app.say(f"{counted(len(outcomes) - len(failed), noun)} {done}")
        for outcome in failed:
            self._app.say(f"{outcome.node}: {outcome.error}", "error")
