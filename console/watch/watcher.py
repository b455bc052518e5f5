"""Drives the machine of one watched node on a fleet; it wakes where the node's state changes."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from console.errors import GlowplugError, LinkError, NodeUnreachable, RequestRefused
from console.fleet import Fleet
from console.format import short_uid
from console.launches import CALLED_OFF
from console.state import NodeState
from console.watch.machine import Limits, Step, Told, Want, Watched, checked, look, stood_down, wake_s, warmed
from console.watch.standing import Seen, Wanted, is_at, see
from remote_agent.protocol.messages import Failure, RunRecord, RunState

Tell = Callable[[str, Told], None]
Answer = Callable[[Watched], Step]
"""What came of something that was wanted, for the machine."""


class Rights(Protocol):
    """Says whether a node may be loaded now."""

    async def in_the_way(self, node: str) -> str:
        """Return who else is at work on it, or nothing. Raises: HistoryError where another watches it by now."""


@dataclass
class NodeWatch:
    """Keeps one node at its tier while `run` goes on. ``run_uid``: of its try that is going.

    ``clock``: monotonic seconds. ``chance``: within 0..1, anew at each call.
    """

    fleet: Fleet
    node: str
    wanted: Wanted
    limits: Limits
    rights: Rights
    tell: Tell
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random
    run_uid: str | None = None
    _watched: Watched = field(default_factory=Watched)
    _looked_at: Seen = field(default_factory=Seen)

    async def run(self) -> None:
        """Watch until it is cancelled.

        Raises: NodeUnreachable once no retry will be made; HistoryError if another watches it by now.
        """
        doing: asyncio.Task[Answer] | None = None
        try:
            while True:
                if doing is not None and doing.done():
                    want, doing = self._take(doing.result()(self._watched)), None
                else:
                    want = self._take(self._look())
                if want is not None:
                    doing = asyncio.ensure_future(self._check() if want is Want.CHECK else self._warm())
                elif doing is None and self._looked_at.is_final:
                    raise NodeUnreachable(self.fleet.describe_link(self.node))
                else:
                    await self._until_news(doing)
        finally:
            if doing is not None:
                doing.cancel()
                await asyncio.gather(doing, return_exceptions=True)

    def _look(self) -> Step:
        self._looked_at = self._seen()
        return look(self._watched, self._looked_at, self.clock(), self.limits)

    def _take(self, step: Step) -> Want | None:
        self._watched, told, want = step
        for one in told:
            self.tell(self.node, one)
        return want

    async def _until_news(self, doing: asyncio.Task[Answer] | None) -> None:
        """Wait until something else is to be seen, what is being done is over, or it is time to look again."""
        now_s = self.clock()
        at_s = wake_s(self._watched, now_s) if doing is None else None
        changed = asyncio.ensure_future(self.fleet.until(self.node, self._is_news))
        tasks: list[asyncio.Future[bool] | asyncio.Future[Answer]] = [changed]
        if doing is not None:
            tasks.append(doing)
        try:
            timeout_s = at_s - now_s if at_s is not None else None
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    def _is_news(self, state: NodeState) -> bool | None:
        return True if see(state, self.wanted) != self._looked_at else None

    def _seen(self) -> Seen:
        return see(self.fleet.state(self.node), self.wanted)

    async def _check(self) -> Answer:
        """Ask the node what is on it, and whether anybody else is at work there."""
        try:
            seen, in_the_way = await self._truth()
        except LinkError:
            seen, in_the_way = Seen(), ""
        return lambda watched: checked(watched, seen, in_the_way, self.clock(), self.limits)

    async def _truth(self) -> tuple[Seen, str]:
        """Return the node as it says that it is now, and who is at work on it.

        Raises: LinkError where it does not answer; HistoryError if another watches it by now.
        """
        try:
            status = await self.fleet.status(self.node)
            if self.fleet.state(self.node).probe is None:
                await self.fleet.probe(self.node)
        except RequestRefused as error:
            return self._seen(), f"it does not say what is on it: {error}"
        in_the_way = _busy(status.runs) or await self.rights.in_the_way(self.node)
        return self._seen(), in_the_way

    async def _warm(self) -> Answer:
        recipe, failure = self.wanted.recipe, None
        self.run_uid = uuid.uuid4().hex
        try:
            await self.fleet.warm(
                self.node, recipe.name, run_uid=self.run_uid, recipe=recipe, unless=self._why_not_any_more
            )
            run = await self.fleet.wait(self.node, self.run_uid)
            if run.state is RunState.READY:
                await self.fleet.status(self.node)
            else:
                failure = run.failure or Failure(run.state.value, f"its run was {run.state.value}")
        except GlowplugError as error:
            failure = Failure("error", str(error))
        self.run_uid = None
        seen, detail = self._seen(), failure.detail if failure is not None else ""
        if failure is not None and failure.code == CALLED_OFF:
            return lambda watched: stood_down(watched, seen, detail, self.clock(), self.limits)
        return lambda watched: warmed(watched, seen, detail, self.clock(), self.chance(), self.limits)

    async def _why_not_any_more(self) -> str:
        try:
            seen, in_the_way = await self._truth()
        except GlowplugError as error:
            return str(error)
        is_up = seen.tier is not None and is_at(seen.tier, self.limits.tier)
        return in_the_way or (f"it is {seen.tier.value} by now" if is_up and seen.tier else "")


def _busy(runs: Sequence[RunRecord]) -> str:
    """Return what is loading on a node: it does one thing at a time, and not behind somebody's back."""
    for run in runs:
        return f"{run.actor.user}@{run.actor.host} has {run.recipe} in work there, run {short_uid(run.run_uid)}"
    return ""
