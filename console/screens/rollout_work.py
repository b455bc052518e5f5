"""Asks, does and reports what an operator wants of a rollout. What was shown is what is done: uid and node are fixed
before the question is put."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from console.errors import GlowplugError
from console.format import counted, date_text, short_uid
from console.rollout.plan import Plan
from console.rollout.plan_text import plan_lines
from console.rollout.states import NodeState, Verdict
from console.rollout.view import RolloutView
from console.screens.choice import ChoiceScreen, ReasonScreen
from console.screens.confirm import ConfirmScreen
from console.screens.workers import begin
from console.widgets.paint import Line
from db.rollout_records import RolloutRow

if TYPE_CHECKING:
    from console.app import GlowplugApp

START_NOTE = "This console carries it out, also while other screens are open; quitting pauses it."
ABORT_NOTE = "Nothing more is begun, what is ready stays, what was taken out of traffic is brought back."


class RolloutWork:
    """``shown`` is called with the uid of a rollout that is to be looked at from then on."""

    def __init__(self, app: GlowplugApp, shown: Callable[[str], None]) -> None:
        self._app = app
        self._rollouts = app.rollouts
        self._shown = shown

    # --- which -------------------------------------------------------------------------

    def choose(self) -> None:
        """Ask which rollout of the history to look at."""
        self._begin(self._choose)

    async def _choose(self) -> None:
        rows = await self._rollouts.listed()
        if not rows:
            self._app.say("no rollout was ever started here")
            return

        def chosen(uid: str | None) -> None:
            if uid is not None:
                self._shown(uid)

        choices = [(row.rollout_uid, _choice(row, self._app)) for row in rows]
        self._app.push_screen(ChoiceScreen("Which rollout?", choices), chosen)

    # --- starting -----------------------------------------------------------------------

    def start(self) -> None:
        """Ask which rollout of ``fleet.toml``, show its plan, ask once more, and begin it."""
        names = self._rollouts.names
        if not names:
            self._app.say("fleet.toml has no [[rollout]]; `glowplug config example` shows how one is written")
            return

        def chosen(name: str | None) -> None:
            if name is not None:
                self._begin(partial(self._plan, name))

        self._app.push_screen(ChoiceScreen("Start which rollout?", [(name, name) for name in names]), chosen)

    async def _plan(self, name: str) -> None:
        plan = await self._rollouts.plan(name)
        question = f"Start rollout {name} on {counted(len(plan.nodes), 'node')}?"
        lines: list[Line] = [((line, "text"),) for line in plan_lines(plan)]
        dialog = ConfirmScreen(question, lines, f"Start {name}", note=START_NOTE, grave=False)
        self._app.ask(dialog, partial(self._start, plan))

    async def _start(self, plan: Plan) -> None:
        self._app.say(f"rollout {plan.rollout.name}: its nodes are reached first")
        try:
            uid = await self._rollouts.start(plan)
        except GlowplugError as error:
            self._app.say(str(error), "error")
            return
        self._app.say(f"rollout {plan.rollout.name} ({short_uid(uid)}) is begun")
        self._shown(uid)

    # --- steering -------------------------------------------------------------------------

    def ask(self, view: RolloutView, verb: str) -> None:
        """Have it done without a question."""
        self._begin(partial(self._ask, view.row, verb, {}))

    def retry(self, view: RolloutView, node: str) -> None:
        """Try a node that failed once more; ask first where that ends an attempt that may yet come to something."""
        row = view.state.node(node)
        arguments = {"node": node}
        if row is not None and row.state is NodeState.FAILED:
            self._begin(partial(self._ask, view.row, "retry", arguments))
            return
        line: Line = ((node, "title"), ("  is verifying; that attempt is called off", "muted"))
        dialog = ConfirmScreen(f"Try {node} from the beginning?", [line], "Retry", grave=False)
        self._app.ask(dialog, partial(self._ask, view.row, "retry", arguments))

    def promote(self, view: RolloutView, *, everything: bool) -> None:
        """Ask, naming what it leads past."""
        past = _past(view)
        if everything:
            past.append((("every later pause; no gate", "text"),))
        dialog = ConfirmScreen(
            f"Promote rollout {view.row.name}{' past everything' if everything else ''}?", past, "Promote", grave=False
        )
        self._app.ask(dialog, partial(self._ask, view.row, "promote", {"everything": everything}))

    def abort(self, view: RolloutView) -> None:
        """Ask, naming the nodes that are on their way or out of traffic."""
        lines: list[Line] = [
            ((node.name, "title"), (f"  {node.state.value}{', out of traffic' if node.is_out else ''}", "muted"))
            for node in view.state.nodes
            if node.state.is_under_way or node.is_out
        ]
        dialog = ConfirmScreen(
            f"Abort rollout {view.row.name}?",
            lines or [(("no node is on its way", "muted"),)],
            "Abort",
            note=ABORT_NOTE,
        )
        self._app.ask(dialog, partial(self._ask, view.row, "abort", {}))

    def skip(self, view: RolloutView, node: str) -> None:
        """Ask why, then leave the node out."""

        def answered(reason: str | None) -> None:
            if reason is not None:
                self._begin(partial(self._ask, view.row, "skip", {"node": node, "reason": reason}))

        dialog = ReasonScreen(f"Skip {node} in rollout {view.row.name}: why?", f"Skip {node}")
        self._app.push_screen(dialog, answered)

    async def _ask(self, row: RolloutRow, verb: str, arguments: Mapping[str, object]) -> None:
        try:
            done, text = await self._rollouts.ask(row.rollout_uid, verb, arguments)
        except GlowplugError as error:
            self._app.say(f"{verb} {row.name}: {error}", "error")
            return
        self._app.say(f"{verb} {row.name}: {text}", "information" if done else "warning")

    def _begin(self, work: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            try:
                await work()
            except GlowplugError as error:
                self._app.say(str(error), "error")

        begin(self._app, guarded, "rollout")


def _past(view: RolloutView) -> list[Line]:
    state = view.state
    failed = [node.name for node in state.nodes if node.failed_at_gate]
    lines: list[Line] = [((name, "title"), ("  failed at a gate; it is left out", "failed")) for name in failed]
    analysis = state.analysis
    if analysis is not None and analysis.verdict is Verdict.INCONCLUSIVE:
        lines += [
            ((name, "title"), ("  is taken as passed: too little was measured", "warning")) for name in analysis.nodes
        ]
    if not lines and state.reason:
        lines.append(((state.reason, "text"),))
    return lines


def _choice(row: RolloutRow, app: GlowplugApp) -> str:
    reason = f": {row.reason}" if row.reason else ""
    return f"{date_text(row.created_ns, app.moment().zone)}  {row.name}  {row.phase}{reason}"
