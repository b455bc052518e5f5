"""Carries a rollout out in this terminal: progress on stderr; Ctrl-C pauses it and says how to go on."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import db.errors
from console.cli.common import Context, current_actor, run_async, say
from console.config import Config
from console.errors import HistoryError
from console.format import short_uid
from console.leases import holder_name, may_live
from console.rollout.beginning import create
from console.rollout.commands import verb_to_go_on
from console.rollout.controller import Controller
from console.rollout.effects import Effects, FleetEffects, until_reached_or_not
from console.rollout.plan import Plan
from console.rollout.reaching import Answer, Asked, give_back, in_thread, to_its_end
from console.rollout.saved import Settings, read_state
from console.rollout.states import NodeState, Phase, RolloutState
from console.rollout.words import line
from db.database import open_history
from db.queries import History
from db.rollout_records import Entry, RolloutRow
from db.rollout_store import RolloutStore
from remote_agent.protocol.messages import Recipe


@contextlib.contextmanager
def opened_store(context: Context) -> Iterator[RolloutStore]:
    """Open the history for rollouts, made and brought up to date where needed. Raises: HistoryError, inside too."""
    try:
        path = open_history(context.locations.history_file).path
        with contextlib.closing(RolloutStore(path, holder_name(), may_live=may_live)) as store:
            yield store
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error


class Foreground:
    """One rollout from here to its end, or to where it is interrupted."""

    def __init__(self, context: Context, store: RolloutStore) -> None:
        self._context = context
        self._store = store
        self._controller: Controller | None = None
        self._name = ""
        self._left: str | None = None

    def start(self, config: Config, planned: Plan, recipe: Recipe) -> tuple[str, RolloutState]:
        """Begin a rollout and carry it out; return its uid and last state. Raises: HistoryError, Interrupted."""
        return run_async(self.begin(config, planned, recipe), self.explain)

    async def begin(self, config: Config, planned: Plan, recipe: Recipe) -> tuple[str, RolloutState]:
        """`start`, on an event loop that runs already. Raises: HistoryError."""
        settings, uid = Settings(planned.rollout, recipe), uuid.uuid4().hex
        self._name = planned.rollout.name
        names = [node.name for node in planned.nodes]
        async with self._context.fleet(config, names, planned.parallel) as fleet:
            await until_reached_or_not(fleet, fleet.nodes)
            effects = FleetEffects(fleet, uid, settings, self._context.program_environ)
            down = [node for node, reason in effects.down().items() if reason is not None]
            row = await to_its_end(lambda: create(self._store, uid, planned, settings, current_actor(), down))
            say(f"rollout {self._name} ({short_uid(uid)})")
            return uid, await self._carry_out(row, effects)

    def ask(self, row: RolloutRow, verb: str, arguments: Mapping[str, object]) -> Answer | RolloutState:
        """Ask it of whoever carries the rollout out and return the answer; or take it over and return its last state.

        Raises: GlowplugError where no answer is to be expected; HistoryError, ConfigError, UsageError, Interrupted.
        """
        return run_async(self._ask(row, verb, arguments), self.explain)

    async def _ask(self, row: RolloutRow, verb: str, arguments: Mapping[str, object]) -> Answer | RolloutState:
        self._name = row.name
        asked = Asked(self._store, row.rollout_uid, current_actor(), verb, arguments)
        reached = await asked.reach_or(partial(self._take_over, asked))
        if not isinstance(reached, int):
            return reached
        self._left = verb
        history = await in_thread(lambda: History(self._context.locations.history_file))
        with contextlib.closing(history):
            return await asked.answered(history, reached)

    async def _take_over(self, asked: Asked) -> RolloutState:
        config = self._context.load_config()
        async with contextlib.AsyncExitStack() as stack:

            async def effects(row: RolloutRow, settings: Settings) -> Effects:
                say(f"nobody carries out rollout {row.name}: this does from here on")
                names = [node.name for node in read_state(row.state_json).nodes]
                fleet = await stack.enter_async_context(self._context.fleet(config, names))
                return FleetEffects(fleet, row.rollout_uid, settings, self._context.program_environ)

            taken = await asked.take_over(config, effects)
            return await self._carry_out(taken.row, taken.effects)

    async def _carry_out(self, row: RolloutRow, effects: Effects) -> RolloutState:
        try:
            self._controller = Controller(self._store, row, effects, _tell)
            return await self._controller.run()
        finally:
            await give_back(self._store, row)

    def explain(self) -> str:
        """Return what to say where this was interrupted."""
        if self._left is not None:
            return f"interrupted; rollout {self._name} was asked to {self._left}, which may still be done"
        if self._controller is None:
            return f"interrupted; nothing was done for rollout {self._name}"
        return interrupted_text(self._name, self._controller.state)


def interrupted_text(name: str, state: RolloutState) -> str:
    """Return where an interrupted rollout stands, and the verbs that do something about it."""
    if state.phase.is_over:
        return f"interrupted; rollout {name} is {state.phase.value}"
    going = [row.name for row in state.nodes if row.state in (NodeState.WARMING, NodeState.UNKNOWN)]
    runs = f"; what runs on {', '.join(going)} goes on there" if going else ""
    verb = verb_to_go_on(state.phase)
    to_do = "To bring that to its end" if verb == "abort" else "To go on, or to end it"
    lines = "".join(f"\n  glowplug rollout {one} {name}" for one in dict.fromkeys((verb, "abort")))
    return f"interrupted; rollout {name} is {state.phase.value}{runs}. {to_do}:{lines}"


def exit_code(state: RolloutState) -> int:
    """4 for an aborted rollout, 1 where a node has failed, 0 otherwise."""
    if state.phase is Phase.ABORTED:
        return 4
    return 1 if any(row.state is NodeState.FAILED for row in state.nodes) else 0


def _tell(entries: Sequence[Entry], state: RolloutState) -> None:
    for entry in entries:
        text = line(entry)
        if text is not None:
            say(text)
