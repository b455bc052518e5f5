"""Warms nodes and follows their runs: one line on stderr for each stage as it ends."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from console import report
from console.cli.common import say
from console.errors import GlowplugError, LinkError
from console.fleet import Fleet
from console.format import NS_PER_S, clock_text
from console.runlog import finish_line, stage_line
from console.state import LinkState, LinkStatus, RunView
from remote_agent.protocol.messages import Recipe, RunState

LOOK_S = 0.1
_UNREACHABLE = "unreachable"


@dataclass
class Outcome:
    """What became of one node's run. ``error`` where there is no run to tell of, or it can't be followed."""

    node: str
    run_uid: str | None = None
    run: RunView | None = None
    error: GlowplugError | None = None

    @property
    def exit_code(self) -> int:
        if self.error is not None:
            return self.error.exit_code
        if self.run is None or self.run.state is RunState.READY or not self.run.state.is_terminal:
            return 0
        unreachable = self.run.failure is not None and self.run.failure.code == _UNREACHABLE
        return 3 if unreachable and not self.run.is_accepted else 1


@dataclass
class Following:
    """The runs of one command, as they stand; readable at any time, after an interruption too."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _told: set[tuple[str, str]] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)
    _fleet: Fleet | None = None

    @property
    def exit_code(self) -> int:
        """1 if any run failed, else 3 if any node was out of reach, else the first other error's, else 0."""
        codes = [outcome.exit_code for outcome in self.outcomes.values()]
        return next((code for code in (1, 3) if code in codes), max(codes, default=0))

    async def warm(
        self, fleet: Fleet, nodes: Sequence[str], recipe: Recipe, *, wait: bool = True, arm: bool = False
    ) -> None:
        """Warm every node, or ``arm`` it, and wait until each run is over, or with ``wait`` False accepted."""
        self._fleet = fleet
        self.outcomes = {name: Outcome(name) for name in nodes}
        telling = asyncio.ensure_future(self._tell(fleet))
        try:
            await asyncio.gather(*(self._one(fleet, name, recipe, wait, arm) for name in nodes))
            self._tell_news(fleet)
        finally:
            telling.cancel()

    async def _one(self, fleet: Fleet, node: str, recipe: Recipe, wait: bool, arm: bool) -> None:
        outcome = self.outcomes[node]
        try:
            outcome.run_uid = uuid.uuid4().hex
            await fleet.warm(node, recipe.name, run_uid=outcome.run_uid, recipe=recipe, arm=arm)
            outcome.run = await (fleet.wait if wait else fleet.accepted)(node, outcome.run_uid)
        except GlowplugError as error:
            outcome.error = error
            refused = f"not {'armed' if arm else 'warmed'}: "
            say(f"{node:<14} {'' if isinstance(error, LinkError) else refused}{error}")

    async def _tell(self, fleet: Fleet) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._tell_news(fleet)

    def _tell_news(self, fleet: Fleet) -> None:
        for outcome in self.outcomes.values():
            run = fleet.state(outcome.node).runs.get(outcome.run_uid or "")
            if run is not None and not (_was_refused(run) and outcome.run is None):  # else its error is told instead
                self._tell_run(outcome.node, run)
                self._tell_link(outcome, run, fleet.state(outcome.node).link)

    def _tell_run(self, node: str, run: RunView) -> None:
        if not run.is_accepted and not run.state.is_terminal:
            if run.waits_among:
                self._once(node, run.waits_among, f"waits for a place among {run.waits_among}")
            return
        for stage in run.stages:
            if stage.status.is_over and stage.status.value != "skipped":
                self._once(node, stage.name, stage_line(stage))
        if run.state.is_terminal:
            self._once(node, "end", f"{report.status_words(run.state.value)[0]} {finish_line(run)}")

    def _tell_link(self, outcome: Outcome, run: RunView, link: LinkState) -> None:
        """Say when a run can't be watched any more, why and since when, and when it can be again."""
        node = outcome.node
        if outcome.error is not None or run.state.is_terminal or not run.is_accepted:
            return
        if link.status is LinkStatus.CONNECTED and node in self._lost:
            self._lost.remove(node)
            say(f"{node:<14} linked again")
        elif link.status in (LinkStatus.SILENT, LinkStatus.DISCONNECTED) and node not in self._lost:
            self._lost.add(node)
            ago_ns = round(max(0.0, time.monotonic() - link.since_s) * NS_PER_S)
            since = clock_text(time.time_ns() - ago_ns)
            why = f": {link.reason}" if link.reason else ""
            say(f"{node:<14} {link.status.value} since {since}{why}; the run goes on there, waiting for the link")

    def _once(self, node: str, key: str, text: str) -> None:
        if (node, key) not in self._told:
            self._told.add((node, key))
            say(f"{node:<14} {text}")

    @property
    def going(self) -> list[Outcome]:
        """The runs that their hosts have accepted and that were not over when last heard of."""
        fleet = self._fleet
        if fleet is None:
            return []
        views = [(one, fleet.state(one.node).runs.get(one.run_uid or "")) for one in self.outcomes.values()]
        return [one for one, run in views if run is not None and run.is_accepted and not run.state.is_terminal]

    def documents(self) -> list[dict[str, object]]:
        """Return a document a run, in the nodes' order."""
        return [report.document(report.of_view(one.node, one.run)) for one in self.outcomes.values() if one.run]

    def errors(self) -> list[Mapping[str, object]]:
        """Return what became of nodes without a run to show."""
        return [
            {"node": one.node, "run_uid": one.run_uid, "error": str(one.error), "exit_code": one.error.exit_code}
            for one in self.outcomes.values()
            if one.error is not None
        ]


def _was_refused(run: RunView) -> bool:
    """Whether a run is over that no node ever accepted."""
    return run.state.is_terminal and not run.is_accepted
