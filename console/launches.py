"""Starts runs, so many at a time across the fleet and from each storage; the rest wait and are seen waiting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from console.config_nodes import Node
from console.errors import GlowplugError, LinkError, NodeUnreachable, RequestRefused
from console.places import Places
from console.session import Session
from console.state import NodeState, RunDropped, RunQueued, RunView
from remote_agent.protocol.messages import (
    Actor,
    Failure,
    Recipe,
    RunStartParams,
    RunStartResult,
    RunState,
    Tier,
)
from remote_agent.recipe import recipe_hash

CALLED_OFF = "called_off"
"""Code of the failure of a run that was not wanted any more when its turn came."""

LOST_S = 120.0
"""A run on a node that has been out of reach for so long gives its place to the next."""

log = logging.getLogger(__name__)

Unless = Callable[[], Awaitable[str]]
"""Is asked when a run's turn has come after a wait: why not to start it any more, or nothing. Does not raise."""


@dataclass
class _Launch:
    """A run from the wish to its end. ``noticed`` is set once it waits in the queue or the node has answered."""

    view: RunView
    recipe: Recipe
    method: str
    noticed: asyncio.Future[None]
    unless: Unless | None = None
    is_sent: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def run_uid(self) -> str:
        return self.view.run_uid


class Launches:
    """The queue in front of the fleet. A place is kept from the request until the run is over.

    ``storage_groups``: how many loads at one time from each storage that nodes share; a run needs a place there too.
    """

    def __init__(self, parallel: int, actor: Actor, storage_groups: Mapping[str, int], lost_s: float = LOST_S) -> None:
        self.places = Places(parallel)
        self._groups = {name: Places(limit) for name, limit in storage_groups.items()}
        self._actor = actor
        self._lost_s = lost_s
        self._waiting: dict[str, _Launch] = {}

    async def launch(
        self,
        session: Session,
        run_uid: str,
        recipe: Recipe,
        timeout_s: float,
        arm: bool = False,
        unless: Unless | None = None,
    ) -> None:
        """Start a run, or leave it in the queue when every place is taken; with ``arm`` one without weights.

        Raises: RequestRefused by the node; NodeUnreachable, and then the run either was
        not started or, where the node could not say, is still being asked about.
        """
        method = "standby.start" if arm else "run.start"
        view = self._waiting_view(run_uid, recipe)
        launch = _Launch(view, recipe, method, asyncio.get_running_loop().create_future(), unless)
        launch.noticed.add_done_callback(_look_at)
        session.apply(RunQueued(view))
        self._waiting[run_uid] = launch
        launch.task = session.spawn(self._carry(session, launch))
        try:
            async with asyncio.timeout(timeout_s):  # `wait_for` may lose a cancel that comes with the answer
                await asyncio.shield(launch.noticed)
        except TimeoutError:
            text = f"{session.describe_link()}; whether run {run_uid[:8]} was started is not known yet"
            raise NodeUnreachable(text) from None

    def withdraw(self, session: Session, run_uid: str) -> bool:
        """Take a run out of the queue; False if it was already sent to its node."""
        launch = self._waiting.get(run_uid)
        if launch is None or launch.is_sent or launch.task is None:
            return False
        launch.task.cancel()
        del self._waiting[run_uid]  # a task that had not begun yet would not do it
        session.apply(RunDropped(run_uid, time.time_ns()))
        if not launch.noticed.done():
            launch.noticed.set_result(None)
        return True

    def _waiting_view(self, run_uid: str, recipe: Recipe) -> RunView:
        return RunView(
            run_uid=run_uid,
            recipe=recipe.name,
            recipe_hash=recipe_hash(recipe),
            model=recipe.model.path,
            actor=self._actor,
            state=RunState.QUEUED,
            tier_from=Tier.COLD,
            accepted_mono_ns=None,
            accepted_wall_ns=time.time_ns(),
            is_accepted=False,
        )

    async def _carry(self, session: Session, launch: _Launch) -> None:
        try:
            async with AsyncExitStack() as held:
                waits = False
                for places, among in self._needed(session.node):
                    if places.is_full:
                        waits = True
                        session.apply(RunQueued(replace(launch.view, waits_among=among)))
                        if not launch.noticed.done():
                            launch.noticed.set_result(None)
                    await held.enter_async_context(places)
                if waits and launch.unless is not None and (why := await launch.unless()):
                    session.apply(RunDropped(launch.run_uid, time.time_ns(), Failure(CALLED_OFF, why)))
                    return
                session.apply(RunQueued(launch.view))
                await self._start(session, launch)
                self._waiting.pop(launch.run_uid, None)
                await self._stay(session, launch.run_uid)
        except GlowplugError as error:
            log.info("%s: run %s was not started: %s", session.node.name, launch.run_uid, error)
            code = error.code if isinstance(error, RequestRefused) else "unreachable"
            doubt = "; whether it was started is not known" if launch.is_sent and isinstance(error, LinkError) else ""
            failure = Failure(code, f"{error}{doubt}")
            session.apply(RunDropped(launch.run_uid, time.time_ns(), failure))
            if not launch.noticed.done():
                launch.noticed.set_exception(error)
        finally:
            self._waiting.pop(launch.run_uid, None)

    def _needed(self, node: Node) -> Iterator[tuple[Places, str]]:
        """Yield where a run of the node needs a place, with the loads that are there in words.

        Its storage's comes first: whoever waits for that keeps nobody from loading elsewhere.
        """
        if node.storage_group in self._groups:
            yield self._groups[node.storage_group], f"the loads from {node.storage_group}"
        yield self.places, "the parallel loads"

    async def _start(self, session: Session, launch: _Launch) -> None:
        """Ask the node to start the run until it has answered; asking again is harmless.

        Raises: RequestRefused; LinkError if it can't be reached, or never again.
        """
        params = RunStartParams(
            launch.run_uid, launch.recipe, self._actor, session.node.python, session.node.hold_budget
        )
        while True:
            await session.until_connected(None if launch.is_sent else session.node.connect_timeout_s)
            if launch.is_sent and _is_accepted(session.state, launch.run_uid):
                break  # the replay told of it
            launch.is_sent = True
            try:
                answer = await session.request(launch.method, params, RunStartResult)
                session.found(answer.run)
                break
            except LinkError as error:
                log.info("%s: %s was not answered, asking again: %s", session.node.name, launch.method, error)
                await _until_lost_or_later(session)
                if _is_accepted(session.state, launch.run_uid):
                    break
        if not launch.noticed.done():
            launch.noticed.set_result(None)

    async def _stay(self, session: Session, run_uid: str) -> None:
        """Keep the place until the run is over, or its node has been out of reach for long."""
        while True:
            known = await session.until(lambda state: _over_or_lost(state, run_uid))
            if known == "over":
                return
            try:
                await session.until(lambda state: _over_or_found(state, run_uid), self._lost_s)
            except TimeoutError:
                log.info("%s: out of reach, its place goes to another", session.node.name)
                return


def _is_accepted(state: NodeState, run_uid: str) -> bool:
    """Whether an event has told what the answer should have."""
    run = state.runs.get(run_uid)
    return run is not None and run.is_accepted


def _over_or_lost(state: NodeState, run_uid: str) -> str | None:
    run = state.runs.get(run_uid)
    if run is None or run.state.is_terminal:
        return "over"
    return None if state.is_known else "lost"


def _over_or_found(state: NodeState, run_uid: str) -> bool | None:
    return True if state.is_known or _over_or_lost(state, run_uid) == "over" else None


async def _until_lost_or_later(session: Session) -> None:
    """Wait until the link is seen to be lost, or a moment, so that a slow node is not asked in a loop."""
    try:
        await session.until(lambda state: None if state.is_known else True, 2.0)
    except TimeoutError:
        pass


def _look_at(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
