"""Drives a rollout's machine: every turn is stored before anything of it is done, and what came of it after.

One controller at a time has a rollout's lease. One that can't store, or has lost the lease, does nothing more: what it
was doing is called off, hooks included, and the rollout can be resumed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from console.rollout.commands import WAITS_FOR_TRUTH, event_of, judge
from console.rollout.effects import Data, Effects, Outcome
from console.rollout.events import (
    AvailabilityChanged,
    BackOutNode,
    Begin,
    Event,
    Finish,
    Intent,
    NodeReached,
    Pause,
    Paused,
    Restarted,
    RunHook,
    StartNode,
    StopNode,
    Tick,
)
from console.rollout.lanes import Lanes
from console.rollout.machine import step
from console.rollout.saved import entry, node_rows, read_state, run_uid, state_json
from console.rollout.states import NodeState, RolloutState
from console.transports.base import unbroken
from db.errors import HistoryError, LeaseLostError, UnavailableError
from db.rollout_records import CommandRow, Entry, RolloutRow, Turn
from db.rollout_store import RolloutStore

TICK_S = 0.25
TRUTH_S = 30.0
"""How long a command may wait for the state of nodes, before the machine says which is missing."""

STORE_AGAIN_S = 0.5

T = TypeVar("T")
log = logging.getLogger(__name__)

Told = Callable[[Sequence[Entry], RolloutState], None]
"""Is called after every turn that was stored, with its entries and the state that it led to."""

Answers = Mapping[int, tuple[bool, str]]


@dataclass(frozen=True)
class _Happening:
    """Something for the machine; ``outcome``: that of the intent which led to it."""

    event: Event | None
    data: Data = field(default_factory=dict)
    outcome: Entry | None = None


class Controller:
    """Carries out one rollout, whose lease ``store`` holds, from where ``row`` has it. ``clock``: monotonic seconds."""

    def __init__(
        self,
        store: RolloutStore,
        row: RolloutRow,
        effects: Effects,
        told: Told = lambda entries, state: None,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float = TICK_S,
    ) -> None:
        self.state = read_state(row.state_json)
        self._uid = row.rollout_uid
        self._is_new = row.updated_ns == row.created_ns
        self._store = store
        self._effects = effects
        self._told = told
        self._clock = clock
        self._tick_s = tick_s
        self._inbox: deque[_Happening] = deque()
        self._woken = asyncio.Event()
        self._lanes = Lanes(effects, self._ended, self._happened)
        self._kept_s = self._looked_s = clock()
        self._zero_s = clock() - self.state.now_s  # the machine's clock goes on where it stood, also after a reboot
        self._out_of_sight: set[str] = set()

    async def run(self) -> RolloutState:
        """Carry the rollout out to its end and return its last state; when cancelled, leave it paused and resumable.

        Raises: LeaseLostError; HistoryError where nothing can be stored for as long as the lease lasts, which names the
        nodes that are out of traffic.
        """
        try:
            await unbroken(self._begin())
            while not self.state.phase.is_over or self._has_work:
                await self._wait()
                await unbroken(self._go_on())
        except asyncio.CancelledError:
            await self._wind_down()
            raise
        except LeaseLostError:
            raise
        except HistoryError as error:  # the history may be gone for good, and with it who knows of them
            out = [row.name for row in self.state.nodes if row.is_out]
            raise type(error)(f"{error}; out of traffic: {', '.join(out)}" if out else str(error)) from error
        finally:
            await self._lanes.close()
        return self.state

    @property
    def _has_work(self) -> bool:
        return self._lanes.is_busy or bool(self._inbox)

    async def _begin(self) -> None:
        if self._is_new:
            await self._turn(Begin())
            return
        left = await self._stored(lambda: self._store.open_intents(self._uid), keeps=False)
        cut_off = '{"text": "cut off by a restart"}'
        entries = [Entry("outcome", one.what, one.node, one.attempt, one.entry_id, cut_off) for one in left]
        await self._turn(Restarted(self.state.now_s), entries=entries)

    async def _wind_down(self) -> None:
        """Pause, let what moves traffic come to its end, and call off the rest, which is read again after a restart."""
        await self._turn(Pause("interrupted"))
        self._lanes.call_off(lambda intent: not isinstance(intent, RunHook | BackOutNode | StopNode))
        while self._has_work:
            await self._wait()
            await self._go_on(listens=False)

    # --- one thing after another ----------------------------------------------------

    async def _wait(self) -> None:
        """Wait until something has happened, or it is time to look around."""
        left_s = self._looked_s + self._tick_s - self._clock()
        if self._inbox or left_s <= 0:
            return
        self._woken.clear()
        try:
            async with asyncio.timeout(left_s):
                await self._woken.wait()
        except TimeoutError:
            pass

    async def _go_on(self, listens: bool = True) -> None:
        """Take in what has happened; with ``listens`` clock, links and operators as well, which begin what is new."""
        while self._inbox:
            await self._take(self._inbox.popleft())
        if self._clock() - self._looked_s < self._tick_s:
            return
        self._looked_s = self._clock()
        if listens:
            await self._turn(Tick(self._looked_s - self._zero_s))
            for event in self._seen():
                await self._turn(event)
            await self._answer_commands()
        if self._clock() - self._kept_s > self._store.lease_s / 4:
            await self._stored(lambda: self._store.renew(self._uid))

    async def _take(self, happening: _Happening) -> None:
        entries = [happening.outcome] if happening.outcome is not None else []
        if happening.event is None:
            await self._keep(self.state, entries)
        else:
            await self._turn(happening.event, happening.data, entries)

    def _happened(self, event: Event, data: Data) -> None:
        self._inbox.append(_Happening(event, data))
        self._woken.set()

    def _ended(self, intent_id: int, intent: Intent, outcome: Outcome) -> None:
        self._inbox.append(_Happening(outcome.event, outcome=entry("outcome", intent, outcome.data, intent_id)))
        self._woken.set()

    def _seen(self) -> list[Event]:
        """Return what the links say and the state does not have yet. Out of sight, a node may still be warming."""
        events: list[Event] = []
        for name, reason in self._effects.down().items():
            row = self.state.node(name)
            if row is None:
                continue
            if row.is_down != (reason is not None):
                events.append(AvailabilityChanged(name, reason is not None))
            if reason is not None and row.state is NodeState.WARMING:
                self._out_of_sight.add(name)
                events.append(NodeReached(name, row.attempt, NodeState.UNKNOWN, reason))
            elif reason is None and row.state is NodeState.UNKNOWN and name in self._out_of_sight:
                events.append(NodeReached(name, row.attempt, NodeState.WARMING))
        return events

    # --- commands -------------------------------------------------------------------

    async def _answer_commands(self) -> None:
        for command in await self._stored(lambda: self._store.asked(self._uid), keeps=False):
            is_unread = any(row.state is NodeState.UNKNOWN for row in self.state.nodes)
            is_young = time.time_ns() - command.asked_ns < TRUTH_S * 1e9
            if not (command.verb in WAITS_FOR_TRUTH and is_unread and is_young):
                await self._answer(command)

    async def _answer(self, command: CommandRow) -> None:
        who = f"{command.actor_user}@{command.actor_host}"
        arguments = json.loads(command.arguments_json)
        event = event_of(command.verb, arguments, who)
        if event is None:
            await self._keep(self.state, (), {command.command_id: (False, f"nothing is known of {command.verb!r}")})
            return
        done, text = judge(event, self.state, step(self.state, event)[0])
        asked = entry("command", command.verb, {**arguments, "by": who, "done": done, "answer": text})
        await self._turn(event, entries=[asked], answers={command.command_id: (done, text)})

    # --- turns ------------------------------------------------------------------------

    async def _turn(
        self,
        event: Event,
        data: Data | None = None,
        entries: Sequence[Entry] = (),
        answers: Answers | None = None,
    ) -> None:
        """Let ``event`` happen: store what it leads to, then begin to do it."""
        state, wanted = step(self.state, event)
        if isinstance(event, Tick) and not wanted and replace(state, now_s=self.state.now_s) == self.state:
            self.state = state
            return
        told = [one for one in wanted if isinstance(one, Paused | Finish)]
        intents = [one for one in wanted if one not in told]
        happened = [*entries, entry("event", event, data), *(entry("controller", one) for one in told)]
        wanting = [entry("intent", intent, self._details(intent)) for intent in intents]
        ids = await self._keep(state, [*happened, *wanting], answers)
        for intent_id, intent in zip(ids[len(happened) :], intents, strict=True):
            self._out_of_sight.discard(getattr(intent, "node", ""))
            self._lanes.begin(intent_id, intent, state)
        self._lanes.keep_analysis(state.analysis.number if state.analysis is not None else None)

    def _details(self, intent: Intent) -> Data:
        """Return what must be known of an intent before it is acted on."""
        return {"run_uid": run_uid(self._uid, intent.node, intent.attempt)} if isinstance(intent, StartNode) else {}

    async def _keep(
        self, state: RolloutState, entries: Sequence[Entry], answers: Answers | None = None
    ) -> tuple[int, ...]:
        """Store a state with its entries, and only then take it for what is."""
        turn = Turn(
            state_json=state_json(state),
            phase=state.phase.value,
            reason=state.reason,
            is_over=state.phase.is_over,
            nodes=node_rows(state, self.state),
            entries=tuple(entries),
            answers=answers,
        )
        ids = await self._stored(lambda: self._store.record(self._uid, turn))
        self.state = state
        self._told(turn.entries, state)
        return ids

    async def _stored(self, store: Callable[[], T], keeps: bool = True) -> T:
        """Ask that of the history, again while it can't be used, but no longer than the lease is ours.

        ``keeps``: it renews the lease, for a time that counts from before it was asked.
        Raises: LeaseLostError, UnavailableError.
        """
        while True:
            began_s = self._clock()
            try:
                result = await asyncio.to_thread(store)
            except UnavailableError as error:
                if self._clock() - self._kept_s > self._store.lease_s:
                    raise
                log.warning("rollout %s: %s; tried again", self._uid, error)
                await asyncio.sleep(STORE_AGAIN_S)
            else:
                self._kept_s = began_s if keeps else self._kept_s
                return result
