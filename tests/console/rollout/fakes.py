"""The world around a controller, as a test tells it: what each intent comes to, and when."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from console.rollout import events as e
from console.rollout.controller import Controller
from console.rollout.effects import Outcome, Tell
from console.rollout.saved import Settings, node_rows, read_state, settings_json, state_json
from console.rollout.settings import Rollout
from console.rollout.states import NodeState, RolloutState, Rules, Verdict, begin
from db import rollouts
from db.database import open_history
from db.queries import History
from db.rollout_records import RolloutRecord, RolloutRow
from db.rollout_store import RolloutStore
from remote_agent.protocol.messages import ModelSource, Recipe

NAME = "pre-warm"
TICK_S = 0.01


class FakeEffects:
    """`Effects` where everything goes well at once, but for what a test puts into ``answers`` or ``held``.

    ``answers``: by kind of intent, what the next ones come to. ``held``: kinds that wait until they are taken out.
    """

    def __init__(self) -> None:
        self.done: list[e.Intent] = []
        self.begun: list[e.Intent] = []
        self.called_off: list[e.Intent] = []
        self.answers: dict[type, list[Outcome | Exception]] = {}
        self.held: set[type] = set()
        self.links: dict[str, str | None] = {}
        self.lines: dict[str, str] = {}
        self._changed = asyncio.Condition()

    def down(self) -> Mapping[str, str | None]:
        return self.links

    def said(self) -> Mapping[str, str]:
        return self.lines

    async def let_go(self, kind: type) -> None:
        self.held.discard(kind)
        async with self._changed:
            self._changed.notify_all()

    async def carry_out(self, intent: e.Intent, state: RolloutState, tell: Tell) -> Outcome:
        self.begun.append(intent)
        try:
            if isinstance(intent, e.StartNode) and "before_shift" in intent.steps:
                tell(e.NodeReached(intent.node, intent.attempt, NodeState.WARMING), {})
            async with self._changed:
                await self._changed.wait_for(lambda: type(intent) not in self.held)
        except asyncio.CancelledError:
            self.called_off.append(intent)
            raise
        self.done.append(intent)
        waiting = self.answers.get(type(intent))
        if not waiting:
            return Outcome(usual(intent), {"as": "usual"})
        answer = waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def usual(intent: e.Intent) -> e.Event | None:
    """Return what an intent comes to where all is well."""
    match intent:
        case e.StartNode() | e.ReadNode():
            return e.NodeReached(intent.node, intent.attempt, NodeState.VERIFYING)
        case e.RunHook():
            return e.HookEnded(intent.node, intent.attempt, intent.hook, True)
        case e.BackOutNode():
            return e.BackedOut(intent.node, True)
        case e.TakeSample():
            return e.GateSampled(intent.analysis, intent.gate, Verdict.PASS)
        case e.StopNode():
            return e.StopEnded(intent.node, intent.attempt, True)
    return None


def failed_sample(analysis: int) -> Outcome:
    return Outcome(e.GateSampled(analysis, 0, Verdict.FAIL, "too slow"))


class Desk:
    """One rollout in a real history, and the controllers that come and go."""

    def __init__(self, path: Path, rules: Rules, batches: Sequence[Sequence[str]], lease_s: float = 30.0) -> None:
        self.path = open_history(path).path
        self.uid = uuid.uuid4().hex
        self.lease_s = lease_s
        self._stack = contextlib.ExitStack()
        state = begin(rules, batches)
        rollout = Rollout(NAME, "all", "llama")
        settings = settings_json(Settings(rollout, Recipe("llama", ModelSource("/models/llama"))))
        row = RolloutRow(self.uid, NAME, "llama", "ada", "desk", settings, state_json(state), "running", "", 0, 0)
        store = self.store("first")
        store.create(row, node_rows(state))
        store.give_back(self.uid)

    def close(self) -> None:
        self._stack.close()

    def store(self, holder: str) -> RolloutStore:
        store = RolloutStore(self.path, holder, self.lease_s)
        self._stack.callback(store.close)
        return store

    def controller(
        self, effects: FakeEffects, holder: str = "one", clock: Callable[[], float] | None = None
    ) -> Controller:
        store = self.store(holder)
        row = store.take(self.uid)
        return Controller(store, row, effects, tick_s=TICK_S, **({"clock": clock} if clock else {}))

    def read(self) -> RolloutRecord:
        with History(self.path) as history:
            record = rollouts.read(history, self.uid)
        assert record is not None
        return record

    def state(self) -> RolloutState:
        return read_state(self.read().row.state_json)

    def ask(self, verb: str, **arguments: object) -> int:
        ident = self.store("operator").ask(self.uid, ("ada", "desk"), verb, arguments)
        assert ident is not None, "nobody has the lease"
        return ident

    def answer(self, ident: int) -> tuple[bool | None, str | None]:
        with History(self.path) as history:
            command = rollouts.command(history, ident)
        assert command is not None
        return command.is_done, command.answer


MakeDesk = Callable[..., Desk]


@contextlib.asynccontextmanager
async def running(controller: Controller) -> AsyncIterator[asyncio.Task[RolloutState]]:
    """Let the controller work beside the test; end it as Ctrl-C does."""
    task = asyncio.ensure_future(controller.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
