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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import db.errors
from console.config import Config
from console.errors import GlowplugError, HistoryError, UsageError
from console.fleet import Fleet
from console.leases import holder_name
from console.rollout.beginning import create, planned
from console.rollout.controller import Controller
from console.rollout.effects import Effects, FleetEffects, until_reached_or_not
from console.rollout.idle import WITHOUT_CONTROLLER, apply_idle
from console.rollout.plan import Plan
from console.rollout.saved import Settings, read_settings, read_state
from console.rollout.states import NodeState, RolloutState
from console.rollout.view import RolloutView, up_to_date
from console.rollout.words import line
from console.transports.base import unbroken
from db import rollouts
from db.database import open_history
from db.queries import History
from db.rollout_records import Entry, RolloutRow
from db.rollout_store import RolloutStore, lease_of
from remote_agent.protocol.messages import Actor

T = TypeVar("T")
log = logging.getLogger(__name__)

ANSWER_S = 60.0
POLL_S = 0.1

Answer = tuple[bool, str]
"""Whether what was asked was done, and one line on what came of it."""


@dataclass(frozen=True)
class Notice:
    """What an operator should hear of a rollout, whatever screen is open; ``severity`` as notices have it."""

    text: str
    is_bad: bool = False


@dataclass(frozen=True)
class _Work:
    name: str
    controller: Controller
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
        return () if history is None else await _in_thread(lambda: rollouts.listed(history))

    async def read(self, rollout_uid: str) -> RolloutView | None:
        """Return a rollout as the history has it now; None where there is none of that uid."""
        history = await self._reader()
        if history is None:
            return None
        before = self._views.get(rollout_uid)

        def read() -> RolloutView | None:
            record = rollouts.read(history, rollout_uid, before.last_entry if before is not None else 0)
            return None if record is None else up_to_date(before, record, self._holder, time.time_ns())

        view = await _in_thread(read)
        if view is not None:
            self._views = {rollout_uid: view}
        return view

    async def plan(self, name: str) -> Plan:
        """Return what a rollout of ``fleet.toml`` would do."""
        return await _in_thread(lambda: planned(self._config, name, self._history_file))

    # --- what is done -----------------------------------------------------------------

    async def start(self, plan: Plan) -> str:
        """Begin what was planned, go on with it in the background, and return its uid."""
        store = await self._writer()
        recipe = self._config.recipe(plan.rollout.recipe)
        settings, uid = Settings(plan.rollout, recipe), uuid.uuid4().hex
        await self._reach([node.name for node in plan.nodes])
        effects = self._effects(uid, settings)
        down = [node for node, reason in effects.down().items() if reason is not None]
        row = await _in_thread(lambda: create(store, uid, plan, settings, self._actor, down))
        self._carry_out(store, row, effects)
        return uid

    async def ask(self, rollout_uid: str, verb: str, arguments: Mapping[str, object]) -> Answer:
        """Ask it of whoever carries the rollout out, and return the answer; where nobody does, this console will.

        What needs no carrying out, a pause or most skips, is stored and no more.
        """
        store = await self._writer()
        async with self._deciding:
            asked = await self._ask(store, rollout_uid, verb, arguments)
        return await self._answered(store, rollout_uid, asked) if isinstance(asked, int) else asked

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

    async def _ask(self, store: RolloutStore, uid: str, verb: str, arguments: Mapping[str, object]) -> int | Answer:
        """Return the command's number where somebody carries the rollout out by now, or the answer where none has to.

        One at a time: all that is asked here has one holder's name, whose lease any of it could take or give back.
        """
        await self._settle(store, uid)
        while True:
            try:
                return await self._ask_once(store, uid, verb, arguments)
            except HistoryError as error:
                if not isinstance(error.__cause__, db.errors.LeaseHeldError):
                    raise  # else somebody was between our look and our take, and is asked

    async def _ask_once(
        self, store: RolloutStore, uid: str, verb: str, arguments: Mapping[str, object]
    ) -> int | Answer:
        who = (self._actor.user, self._actor.host)
        ident = await _in_thread(lambda: store.ask(uid, who, verb, arguments))
        if ident is not None:
            return ident
        if verb in WITHOUT_CONTROLLER:
            by = f"{self._actor.user}@{self._actor.host}"
            answer = await _in_thread(lambda: apply_idle(store, uid, verb, arguments, by))
            if answer is not None:
                return answer
        return await self._take_over(store, uid, verb, arguments)

    async def _settle(self, store: RolloutStore, uid: str) -> None:
        """Have our own controller's lease hold, which runs out while a machine sleeps; or that controller be gone."""
        work = self._works.get(uid)

        def renewed() -> bool:
            try:
                store.renew(uid)
            except db.errors.LeaseLostError:
                return False
            return True

        if work is not None and not await _in_thread(renewed):
            await asyncio.wait({work.task})

    async def _take_over(self, store: RolloutStore, uid: str, verb: str, arguments: Mapping[str, object]) -> int:
        row = await _in_thread(lambda: store.take(uid))
        try:
            if row.finished_ns is not None:
                raise UsageError(f"rollout {row.name} is over: {row.phase}")
            known = {node.name for node in self._config.nodes}
            missing = [node.name for node in read_state(row.state_json).nodes if node.name not in known]
            if missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise UsageError(f"rollout {row.name} has node {missing[0]}{more}, which this fleet has not")
            effects = self._effects(uid, read_settings(row.settings_json))
            who = (self._actor.user, self._actor.host)
            ident = await _in_thread(lambda: store.ask(uid, who, verb, arguments))
            if ident is None or self._closing:
                raise GlowplugError(f"rollout {row.name}: {verb} came too late")
        except BaseException:
            await asyncio.to_thread(store.give_back, uid)
            raise
        self._notices.append(Notice(f"nobody carried out rollout {row.name}: this console does from here on"))
        self._carry_out(store, row, effects)
        return ident

    def _carry_out(self, store: RolloutStore, row: RolloutRow, effects: Effects) -> None:
        uid = row.rollout_uid

        def told(entries: Sequence[Entry], state: RolloutState) -> None:
            said = [text for entry in entries if entry.kind == "controller" and (text := line(entry))]
            is_bad = any(node.state is NodeState.FAILED for node in state.nodes)
            self._notices += [Notice(f"rollout {row.name} {text}", is_bad) for text in said]

        controller = Controller(store, row, effects, told)
        task = asyncio.ensure_future(self._work(store, row, controller))
        self._works[uid] = _Work(row.name, controller, task)

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
            try:
                await unbroken(asyncio.to_thread(store.give_back, row.rollout_uid))
            except db.errors.HistoryError as error:
                log.warning("rollout %s: its lease runs out by itself: %s", row.name, error)
            del self._works[row.rollout_uid]

    async def _answered(self, store: RolloutStore, uid: str, ident: int) -> Answer:
        """Wait for the controller's answer. Raises: GlowplugError once it is not to be expected any more."""
        late_s = time.monotonic() + ANSWER_S
        while True:
            history = await self._reader()
            assert history is not None, "there is a rollout in it"
            answer = await _in_thread(partial(rollouts.command, history, ident))
            if answer is not None and answer.answer is not None:
                return bool(answer.is_done), answer.answer
            record = await _in_thread(partial(rollouts.read, history, uid, after_entry=2**62))
            is_gone = record is None or lease_of(record.row, time.time_ns()) is None
            if (is_gone or time.monotonic() > late_s) and await _in_thread(lambda: store.withdraw(ident)):
                what = "has ended" if is_gone else f"did not answer within {ANSWER_S:g} s"
                raise GlowplugError(f"its controller {what}; nothing was done, say it again")
            await asyncio.sleep(POLL_S)

    async def _reader(self) -> History | None:
        """Return the history, None while there is none."""
        async with self._opening:
            if self._history is None:
                try:
                    self._history = await _in_thread(lambda: History(self._history_file))
                except _NoHistory:
                    return None
            return self._history

    async def _writer(self) -> RolloutStore:
        async with self._opening:
            if self._store is None:

                def opened() -> RolloutStore:
                    return RolloutStore(open_history(self._history_file).path, self._holder)

                self._store = await _in_thread(opened)
            return self._store


def carrier_of(fleet: Fleet, history_file: Path, actor: Actor, environ: Mapping[str, str]) -> Carrier:
    """Return what carries rollouts out on that fleet; ``environ`` is what hooks get beside their own variables."""

    def effects(uid: str, settings: Settings) -> Effects:
        return FleetEffects(fleet, uid, settings, environ)

    return Carrier(fleet.config, history_file, actor, effects, partial(until_reached_or_not, fleet))


class _NoHistory(HistoryError):
    """Nothing was ever recorded."""


async def _in_thread(work: Callable[[], T]) -> T:
    """Return what ``work`` gives, done in a thread. Raises: HistoryError in place of db's."""
    try:
        return await asyncio.to_thread(work)
    except db.errors.NoHistoryError as error:
        raise _NoHistory(str(error)) from error
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error
    except ValueError as error:
        raise HistoryError(f"a rollout of the history can't be read: {error}") from error
