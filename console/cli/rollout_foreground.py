"""Carries a rollout out in this terminal: progress on stderr; Ctrl-C pauses it and says how to go on."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence

import db.errors
from console.cli.common import Context, current_actor, run_async, say
from console.config import Config
from console.errors import HistoryError
from console.format import short_uid
from console.leases import holder_name
from console.rollout.beginning import create
from console.rollout.controller import Controller
from console.rollout.effects import FleetEffects, until_reached_or_not
from console.rollout.plan import Plan
from console.rollout.saved import Settings, read_settings, read_state
from console.rollout.states import NodeState, Phase, RolloutState
from console.rollout.words import line
from db.database import open_history
from db.rollout_records import Entry, RolloutRow
from db.rollout_store import RolloutStore
from remote_agent.protocol.messages import Recipe

log = logging.getLogger(__name__)


@contextlib.contextmanager
def opened_store(context: Context) -> Iterator[RolloutStore]:
    """Open the history for rollouts, made and brought up to date where needed. Raises: HistoryError, inside too."""
    try:
        path = open_history(context.locations.history_file).path
        with contextlib.closing(RolloutStore(path, holder_name())) as store:
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
            create(self._store, uid, planned, settings, current_actor(), down)
            say(f"rollout {self._name} ({short_uid(uid)})")
            return uid, await self._carry_out(uid, effects)

    def take_over(self, row: RolloutRow, verb: str, arguments: Mapping[str, object]) -> RolloutState:
        """Go on with a rollout that nobody carries out, and ask that of it; return its last state.

        Raises: LeaseHeldError while another process carries it out; HistoryError, ConfigError, UsageError, Interrupted.
        """
        config, settings = self._context.load_config(), read_settings(row.settings_json)
        names = [node.name for node in read_state(row.state_json).nodes]
        self._name = row.name

        async def work() -> RolloutState:
            async with self._context.fleet(config, names) as fleet:
                effects = FleetEffects(fleet, row.rollout_uid, settings, self._context.program_environ)
                actor = current_actor()
                self._store.take(row.rollout_uid)
                self._store.ask(row.rollout_uid, (actor.user, actor.host), verb, arguments)
                return await self._carry_out(row.rollout_uid, effects)

        self._store.take(row.rollout_uid)  # before anything else: it may be another's
        say(f"nobody carries out rollout {row.name}: this does from here on")
        try:
            return run_async(work(), self.explain)
        finally:
            self._give_back(row.rollout_uid)

    async def _carry_out(self, uid: str, effects: FleetEffects) -> RolloutState:
        try:
            self._controller = Controller(self._store, self._store.take(uid), effects, _tell)
            return await self._controller.run()
        finally:
            self._give_back(uid)

    def _give_back(self, uid: str) -> None:
        """Let the next one have the lease at once; where that can't be stored it runs out, and nothing else changes."""
        try:
            self._store.give_back(uid)
        except db.errors.HistoryError as error:
            log.warning("rollout %s: its lease runs out by itself: %s", self._name, error)

    def explain(self) -> str:
        """Return what to say where this was interrupted."""
        if self._controller is None:
            return f"interrupted; nothing was done for rollout {self._name}"
        state = self._controller.state
        if state.phase.is_over:
            return f"interrupted; rollout {self._name} is {state.phase.value}"
        going = [row.name for row in state.nodes if row.state in (NodeState.WARMING, NodeState.UNKNOWN)]
        runs = f"; what runs on {', '.join(going)} goes on there" if going else ""
        return (
            f"interrupted; rollout {self._name} is {state.phase.value}{runs}. To go on, or to end it:\n"
            f"  glowplug rollout resume {self._name}\n  glowplug rollout abort {self._name}"
        )


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
