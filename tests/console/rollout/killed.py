"""Controllers that are killed at one exact point: a process that forks one for each line on its standard input.

The world that they act on is a file of lines, appended to as things are done, so that it outlives them. A line in is an
`Order` as JSON, a line out the controller's exit status.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from console.rollout import events as e
from console.rollout.controller import Controller
from console.rollout.effects import Outcome, Tell
from console.rollout.states import NodeState, Phase, RolloutState, Verdict
from db.errors import LeaseHeldError
from db.rollout_records import RolloutRow, Turn
from db.rollout_store import RolloutStore

T = TypeVar("T")
LEASE_S = 0.2
TICK_S = 0.005
TAKE_S = 30.0


@dataclass(frozen=True)
class Order:
    """``kill_at``: the number of the point at which it dies, 0 for never. ``verb``: what it is asked first."""

    history: str
    world: str
    uid: str
    seed: int
    kill_at: int = 0
    verb: str = ""


class Points:
    """Counts the moments between which a process may die, and has it die at one of them."""

    def __init__(self, kill_at: int) -> None:
        self._left = kill_at

    def passed(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlyStore(RolloutStore):
    """A store whose process may die before a turn is stored, and after."""

    points: Points

    def record(self, rollout_uid: str, turn: Turn) -> tuple[int, ...]:
        self.points.passed()
        ids = super().record(rollout_uid, turn)
        self.points.passed()
        return ids


class DiskEffects:
    """`Effects` on a world that is a file. Every gate's verdict, and every hook's, is the seed's."""

    def __init__(self, order: Order, points: Points) -> None:
        self._order = order
        self._points = points
        self.under_way = 0

    def down(self) -> Mapping[str, str | None]:
        return {}

    def _do(self, what: str, intent: e.StartNode | e.RunHook | e.BackOutNode | e.StopNode, deed: str) -> None:
        self._points.passed()
        line = json.dumps({"deed": deed, "what": what, "node": intent.node, "attempt": intent.attempt}) + "\n"
        with open(self._order.world, "a", encoding="utf-8") as file:
            file.write(line)
        self._points.passed()

    async def carry_out(self, intent: e.Intent, state: RolloutState, tell: Tell) -> Outcome:
        self.under_way += 1
        try:
            await asyncio.sleep(0)
            return Outcome(self._come_to(intent, state, tell))
        finally:
            self.under_way -= 1

    def _come_to(self, intent: e.Intent, state: RolloutState, tell: Tell) -> e.Event | None:
        match intent:
            case e.StartNode():
                self._do("StartNode", intent, "drain")
                tell(e.NodeReached(intent.node, intent.attempt, NodeState.WARMING), {})
                self._do("StartNode", intent, "warm")
                return e.NodeReached(intent.node, intent.attempt, NodeState.VERIFYING)
            case e.RunHook():
                self._do("RunHook", intent, intent.hook)
                fails = self._is_drawn(0.1, intent.node, intent.attempt, intent.hook)
                return e.HookEnded(intent.node, intent.attempt, intent.hook, not fails)
            case e.BackOutNode():
                self._do("BackOutNode", intent, "back")
                return e.BackedOut(intent.node, True)
            case e.StopNode():
                self._do("StopNode", intent, "stop")
                return e.StopEnded(intent.node, intent.attempt, True)
            case e.TakeSample():
                fails = self._is_drawn(0.25, intent.analysis)
                return e.GateSampled(intent.analysis, intent.gate, Verdict.FAIL if fails else Verdict.PASS)
            case e.ReadNode():
                return e.NodeReached(intent.node, intent.attempt, self._read(intent, state))
        return None

    def _read(self, intent: e.ReadNode, state: RolloutState) -> NodeState:
        row = state.node(intent.node)
        warm = any(
            (one["deed"], one["node"], one["attempt"]) == ("warm", intent.node, intent.attempt)
            for one in read_world(Path(self._order.world))
        )
        if not warm:
            return NodeState.PENDING
        return NodeState.SHIFTING if row is not None and row.is_shifted else NodeState.VERIFYING

    def _is_drawn(self, share: float, *of: object) -> bool:
        return random.Random(f"{self._order.seed} {of}").random() < share


def read_world(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _taken(store: RolloutStore, uid: str) -> RolloutRow:
    late_s = time.monotonic() + TAKE_S
    while True:
        try:
            return store.take(uid)
        except LeaseHeldError:
            assert time.monotonic() < late_s
            time.sleep(0.01)


async def _carry_out(order: Order) -> None:
    """Take the rollout over and work on it until it is over, or waits for the operator with nothing under way."""
    points = Points(order.kill_at)
    store = DeadlyStore(Path(order.history), f"controller {os.getpid()}", LEASE_S)
    store.points = points
    effects = DiskEffects(order, points)
    row = _taken(store, order.uid)
    if order.verb:
        store.ask(order.uid, ("ada", "desk"), order.verb, {})
    controller = Controller(store, row, effects, tick_s=TICK_S)
    task = asyncio.ensure_future(controller.run())
    while not task.done():
        await asyncio.wait({task}, timeout=0.02)
        waits = controller.state.phase is Phase.PAUSED and not effects.under_way and not store.asked(order.uid)
        if waits and controller.state.reason != "restarted":
            task.cancel()
            await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    store.give_back(order.uid)
    store.close()


def _in_child(order: Order) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(_carry_out(order))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ask(order: Order, write: Callable[[str], object], read: Callable[[], str]) -> int:
    """Have a controller carry an order out; return its exit status."""
    write(json.dumps(asdict(order)) + "\n")
    return int(read())


if __name__ == "__main__":
    for given in sys.stdin:
        print(_in_child(Order(**json.loads(given))), flush=True)
