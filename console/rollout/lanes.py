"""Keeps what is being done in order: for each node one intent after the other, and samples beside them.

What a node's attempt does is called off as soon as nothing more is wanted of it, or it is to be read anew; the next
intent of that node begins only when all before it are really over. One that waits and is called off lets nothing past.
The end of an older attempt, asked for once more, waits for no later one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from console.rollout.effects import Effects, Outcome, Tell, failure_of
from console.rollout.events import Finish, Intent, Paused, ReadNode, RunHook, StartNode, StopNode, TakeSample
from console.rollout.states import RolloutState

log = logging.getLogger(__name__)

Ended = Callable[[int, Intent, Outcome], None]
"""Takes the id of an intent that is over, and what it came to."""

_CALLED_OFF = Outcome(data={"text": "called off"})


@dataclass(frozen=True)
class _Work:
    intent: Intent
    task: asyncio.Task[Outcome]


class Lanes:
    """Lives on the event loop. ``happened`` takes what happens before an intent is over."""

    def __init__(self, effects: Effects, ended: Ended, happened: Tell) -> None:
        self._effects = effects
        self._ended = ended
        self._happened = happened
        self._works: set[_Work] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self._works)

    def begin(self, intent_id: int, intent: Intent, state: RolloutState) -> None:
        """Have an intent carried out once its turn has come."""
        if isinstance(intent, StopNode | ReadNode):
            self.call_off(lambda one: isinstance(one, StartNode | RunHook | ReadNode) and _goes_before(one, intent))
        before = {work.task for work in self._works if _goes_before(work.intent, intent)}
        task = asyncio.ensure_future(self._carry_out(intent, state, before))
        work = _Work(intent, task)
        self._works.add(work)
        task.add_done_callback(functools.partial(self._over, intent_id, work))

    def call_off(self, which: Callable[[Intent], bool]) -> None:
        """End what is being done for these intents; each is over once it really is."""
        for work in tuple(self._works):
            if which(work.intent):
                work.task.cancel()

    def keep_analysis(self, number: int | None) -> None:
        """Call off the samples of any other analysis: nobody waits for them."""
        self.call_off(lambda one: isinstance(one, TakeSample) and one.analysis != number)

    async def close(self) -> None:
        """End everything, and wait until it has."""
        self.call_off(lambda _: True)
        tasks = [work.task for work in self._works]
        if tasks:
            await asyncio.wait(tasks)

    async def _carry_out(self, intent: Intent, state: RolloutState, before: set[asyncio.Task[Outcome]]) -> Outcome:
        if before:
            await asyncio.wait(before)
        return await self._effects.carry_out(intent, state, self._happened)

    def _over(self, intent_id: int, work: _Work, task: asyncio.Task[Outcome]) -> None:
        self._works.discard(work)
        if task.cancelled():
            outcome = _CALLED_OFF
        elif (error := task.exception()) is not None:
            log.error("%s: unexpected", work.intent, exc_info=error)
            reason = f"internal error: {type(error).__name__}: {error}"
            outcome = Outcome(failure_of(work.intent, reason), {"text": reason})
        else:
            outcome = task.result()
        self._ended(intent_id, work.intent, outcome)


def _goes_before(earlier: Intent, later: Intent) -> bool:
    """Whether both are about one node, and the earlier one about no attempt that came after."""
    if isinstance(earlier, TakeSample | Paused | Finish) or isinstance(later, TakeSample | Paused | Finish):
        return False
    return earlier.node == later.node and earlier.attempt <= later.attempt
