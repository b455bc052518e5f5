"""Rollouts of this console: begun, carried out and steered here, beside whatever screen is open.

A rollout that nobody carries out becomes this console's with the verb that needs it; one that another process has is
steered by commands. Everything lives on the event loop; the history is read and written in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import db.errors
from console.config import Config
from console.errors import GlowplugError
from console.fleet import Fleet
from console.leases import holder_name, may_live
from console.rollout.beginning import create, planned
from console.rollout.controller import Controller
from console.rollout.effects import Effects, FleetEffects, until_reached_or_not
from console.rollout.others import Other, others_of
from console.rollout.plan import Plan
from console.rollout.reaching import Answer, Asked, NoHistory, give_back, in_thread, to_its_end
from console.rollout.saved import Settings
from console.rollout.states import NodeState, RolloutState
from console.rollout.view import RolloutView, up_to_date
from console.rollout.words import line
from db import rollouts
from db.database import open_history
from db.queries import History
from db.rollout_records import Entry, RolloutRow
from db.rollout_store import RolloutStore
from remote_agent.protocol.messages import Actor

log = logging.getLogger(__name__)

TAKEN_OVER = "nobody carried it out: this console does from here on"


@dataclass(frozen=True)
class Notice:
    """What an operator should hear of a rollout, whatever screen is open; ``severity`` as notices have it."""

    text: str
    is_bad: bool = False


@dataclass(frozen=True)
class _Work:
    name: str
    controller: Controller
    effects: Effects
    task: asyncio.Task[None]


class Carrier:
    """``effects`` makes what acts for one rollout, of that uid; ``reach`` waits until nodes answered or can't.

    Methods raise GlowplugError, one line for a person.
    """

    def __init__(
        self,
        config: Config,
        history_file: Path,
        actor: Actor,
        effects: Callable[[str, Settings], Effects],
        reach: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._config = config
        self._history_file = history_file
        self._actor = actor
        self._effects = effects
        self._reach = reach
        self._holder = holder_name()
        self._store: RolloutStore | None = None
        self._history: History | None = None
        self._opening = asyncio.Lock()
        self._deciding = asyncio.Lock()
        self._views: dict[str, RolloutView] = {}
        self._works: dict[str, _Work] = {}
        self._notices: list[Notice] = []
        self._closing = False

    # --- what is known --------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The rollouts of ``fleet.toml``."""
        return tuple(rollout.name for rollout in self._config.rollouts)

    @property
    def carried(self) -> Mapping[str, RolloutState]:
        """What this console carries out now, by the rollout's name."""
        return {work.name: work.controller.state for work in self._works.values()}

    def take_notices(self) -> list[Notice]:
        notices, self._notices = self._notices, []
        return notices

    async def listed(self) -> tuple[RolloutRow, ...]:
        """Return the newest rollouts of the history, newest first."""
        history = await self._reader()
        return () if history is None else await in_thread(lambda: rollouts.listed(history))

    async def others(self) -> tuple[Other, ...]:
        """Return what is not over and not carried out here; what nobody carries out comes first."""
        history = await self._reader()
        rows = () if history is None else await in_thread(lambda: rollouts.unfinished(history))
        return others_of(rows, self._works, time.time_ns())

    async def read(self, rollout_uid: str) -> RolloutView | None:
        """Return a rollout as the history has it now; None where there is none of that uid."""
        history = await self._reader()
        if history is None:
            return None
        before = self._views.get(rollout_uid)

        def read() -> RolloutView | None:
            record = rollouts.read(history, rollout_uid, before.last_entry if before is not None else 0)
            return None if record is None else up_to_date(before, record, self._holder, time.time_ns())

        view = await in_thread(read)
        if view is not None:
            work = self._works.get(rollout_uid)
            view = replace(view, said=dict(work.effects.said()) if work is not None else {})
            self._views = {rollout_uid: view}
        return view

    async def plan(self, name: str) -> Plan:
        """Return what a rollout of ``fleet.toml`` would do."""
        return await in_thread(lambda: planned(self._config, name, self._history_file))

    # --- what is done -----------------------------------------------------------------

    async def start(self, plan: Plan) -> str:
        """Begin what was planned, go on with it in the background, and return its uid."""
        store = await self._writer()
        recipe = self._config.recipe(plan.rollout.recipe)
        settings, uid = Settings(plan.rollout, recipe), uuid.uuid4().hex
        await self._reach([node.name for node in plan.nodes])
        effects = self._effects(uid, settings)
        down = [node for node, reason in effects.down().items() if reason is not None]
        row = await to_its_end(lambda: create(store, uid, plan, settings, self._actor, down))
        self._carry_out(store, row, effects)
        return uid

    async def ask(self, rollout_uid: str, verb: str, arguments: Mapping[str, object]) -> Answer:
        """Ask it of whoever carries the rollout out, and return the answer; where nobody does, this console will.

        What needs no carrying out, a pause or most skips, is stored and no more.
        """
        asked = Asked(await self._writer(), rollout_uid, self._actor, verb, arguments)
        async with self._deciding:
            before = self._works.get(rollout_uid)
            ident = await self._reach_or_take_over(asked)
            is_taken_over = self._works.get(rollout_uid) is not before
        if not isinstance(ident, int):
            return ident
        history = await self._reader()
        assert history is not None, "there is a rollout in it"
        is_done, text = await asked.answered(history, ident)
        return is_done, f"{text}; {TAKEN_OVER}" if is_taken_over else text

    async def close(self) -> None:
        """Pause what this console carries out, wait for hooks that move traffic, and call off the rest, as Ctrl-C."""
        self._closing = True
        tasks = [work.task for work in self._works.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in (self._store, self._history):
            if connection is not None:
                await asyncio.to_thread(connection.close)
        self._store = self._history = None

    def hurry(self) -> None:
        """Have `close` wait for no hook any more."""
        for work in self._works.values():
            work.task.cancel()

    # --- within -------------------------------------------------------------------------

    async def _reach_or_take_over(self, asked: Asked) -> int | Answer:
        """Return the command's number where somebody carries the rollout out by now, or the answer where none has to.

        One at a time: all that is asked here has one holder's name, whose lease any of it could take or give back.
        """
        await self._settle(asked.store, asked.uid)
        return await asked.reach_or(partial(self._take_over, asked))

    async def _take_over(self, asked: Asked) -> int:
        async def effects(row: RolloutRow, settings: Settings) -> Effects:
            return self._effects(row.rollout_uid, settings)

        taken = await asked.take_over(self._config, effects)
        if self._closing:
            await give_back(asked.store, taken.row)
            raise GlowplugError(f"rollout {taken.row.name}: {asked.verb} came too late, the console ends")
        self._carry_out(asked.store, taken.row, taken.effects)
        return taken.ident

    async def _settle(self, store: RolloutStore, uid: str) -> None:
        """Have our own controller's lease hold, which runs out while a machine sleeps; or that controller be gone."""
        work = self._works.get(uid)

        def renewed() -> bool:
            try:
                store.renew(uid)
            except db.errors.LeaseLostError:
                return False
            return True

        if work is not None and not await in_thread(renewed):
            await asyncio.wait({work.task})

    def _carry_out(self, store: RolloutStore, row: RolloutRow, effects: Effects) -> None:
        uid = row.rollout_uid

        def told(entries: Sequence[Entry], state: RolloutState) -> None:
            if any(entry.what == "Restarted" for entry in entries):
                return  # the pause that this makes lasts until the verb is answered, which says what came of it
            said = [text for entry in entries if entry.kind == "controller" and (text := line(entry))]
            is_bad = any(node.state is NodeState.FAILED for node in state.nodes)
            self._notices += [Notice(f"rollout {row.name} {text}", is_bad) for text in said]

        controller = Controller(store, row, effects, told)
        task = asyncio.ensure_future(self._work(store, row, controller))
        self._works[uid] = _Work(row.name, controller, effects, task)

    async def _work(self, store: RolloutStore, row: RolloutRow, controller: Controller) -> None:
        try:
            await controller.run()
        except asyncio.CancelledError:
            if not self._closing:
                raise
        except db.errors.HistoryError as error:
            self._notices.append(Notice(str(error), is_bad=True))
        except Exception as error:
            log.error("rollout %s: unexpected", row.name, exc_info=error)
            text = f"rollout {row.name} stopped: internal error: {type(error).__name__}: {error}"
            self._notices.append(Notice(text, is_bad=True))
        finally:
            await give_back(store, row)
            del self._works[row.rollout_uid]

    async def _reader(self) -> History | None:
        """Return the history, None while there is none."""
        async with self._opening:
            if self._history is None:
                try:
                    self._history = await in_thread(lambda: History(self._history_file))
                except NoHistory:
                    return None
            return self._history

    async def _writer(self) -> RolloutStore:
        async with self._opening:
            if self._store is None:

                def opened() -> RolloutStore:
                    return RolloutStore(open_history(self._history_file).path, self._holder, may_live=may_live)

                self._store = await in_thread(opened)
            return self._store


def carrier_of(fleet: Fleet, history_file: Path, actor: Actor, environ: Mapping[str, str]) -> Carrier:
    """Return what carries rollouts out on that fleet; ``environ`` is what hooks get beside their own variables."""

    def effects(uid: str, settings: Settings) -> Effects:
        return FleetEffects(fleet, uid, settings, environ)

    return Carrier(fleet.config, history_file, actor, effects, partial(until_reached_or_not, fleet))
