"""How what is asked of a rollout reaches it: whoever carries it out is asked, or nobody has to be, or it is taken over.

The history is read and written in threads: a file that is locked keeps no event loop from its links.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import db.errors
from console.config import Config
from console.errors import GlowplugError, HistoryError, UsageError
from console.rollout.effects import Effects
from console.rollout.idle import WITHOUT_CONTROLLER, apply_idle
from console.rollout.saved import Settings, read_settings, read_state
from console.transports.base import unbroken
from db import rollouts
from db.queries import History
from db.rollout_records import RolloutRow
from db.rollout_store import RolloutStore, lease_of
from remote_agent.protocol.messages import Actor

T = TypeVar("T")
log = logging.getLogger(__name__)

ANSWER_S = 60.0
POLL_S = 0.1

Answer = tuple[bool, str]
"""Whether what was asked was done, and one line on what came of it."""


class NoHistory(HistoryError):
    """Nothing was ever recorded."""


class Held(HistoryError):
    """Another one carries the rollout out."""


async def in_thread(work: Callable[[], T]) -> T:
    """Return what ``work`` gives, done in a thread. Raises: HistoryError in place of db's."""
    try:
        return await asyncio.to_thread(work)
    except db.errors.NoHistoryError as error:
        raise NoHistory(str(error)) from error
    except db.errors.LeaseHeldError as error:
        raise Held(str(error)) from error
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error
    except ValueError as error:
        raise HistoryError(f"a rollout of the history can't be read: {error}") from error


async def to_its_end(work: Callable[[], T]) -> T:
    """Return what ``work`` gives, as `in_thread`; whoever is cancelled meanwhile is so at its next wait, and knows it.

    For what makes or takes something that is to be let go of.
    """
    task = asyncio.ensure_future(in_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        assert waiting is not None
        await asyncio.wait({task})
        waiting.uncancel()
        waiting.cancel()
        return task.result()


@dataclass(frozen=True)
class TakenOver:
    """A rollout whose lease is ours, what acts for it, and the number of the command that its controller finds."""

    row: RolloutRow
    effects: Effects
    ident: int


@dataclass(frozen=True)
class Asked:
    """A verb for one rollout, and who says it."""

    store: RolloutStore
    uid: str
    actor: Actor
    verb: str
    arguments: Mapping[str, object]

    async def leave(self) -> int | None:
        """Leave it for whoever carries the rollout out, and return its number; None where nobody does."""
        who = (self.actor.user, self.actor.host)
        return await in_thread(lambda: self.store.ask(self.uid, who, self.verb, self.arguments))

    async def reach(self) -> int | Answer | None:
        """`leave` it, or do it where nobody has to carry it out and return the answer; None: it is to be taken over.

        Raises: HistoryError.
        """
        ident = await self.leave()
        if ident is not None or self.verb not in WITHOUT_CONTROLLER:
            return ident
        who = f"{self.actor.user}@{self.actor.host}"
        return await in_thread(lambda: apply_idle(self.store, self.uid, self.verb, self.arguments, who))

    async def reach_or(self, take_over: Callable[[], Awaitable[T]]) -> int | Answer | T:
        """`reach` it, or return what ``take_over`` gives; where another one was quicker to, it is asked."""
        while True:
            reached = await self.reach()
            if reached is not None:
                return reached
            with contextlib.suppress(Held):
                return await take_over()

    async def answered(self, history: History, ident: int) -> Answer:
        """Wait for the controller's answer to what was left for it.

        Raises: GlowplugError once it is not to be expected any more, and it is taken back; HistoryError.
        """
        late_s = time.monotonic() + ANSWER_S
        while True:
            command = await in_thread(partial(rollouts.command, history, ident))
            if command is not None and command.answer is not None:
                return bool(command.is_done), command.answer
            now = await in_thread(partial(rollouts.find, history, self.uid))
            is_gone = now is None or lease_of(now, time.time_ns()) is None
            if (is_gone or time.monotonic() > late_s) and await in_thread(partial(self.store.withdraw, ident)):
                what = "has ended" if is_gone else f"did not answer within {ANSWER_S:g} s"
                name = now.name if now is not None else self.uid
                raise GlowplugError(f"the controller of rollout {name} {what}; nothing was done, say it again")
            await asyncio.sleep(POLL_S)

    async def take_over(
        self, config: Config, effects: Callable[[RolloutRow, Settings], Awaitable[Effects]]
    ) -> TakenOver:
        """Take the lease of a rollout that nobody carries out, to go on with it on the fleet of that configuration.

        ``effects`` makes what acts for it; where that fails, the lease is free again.
        Raises: Held while another has it; HistoryError; UsageError where it is over, or has nodes that the fleet has
        not; GlowplugError where the lease has run out meanwhile.
        """
        row = await to_its_end(partial(self.store.take, self.uid))
        try:
            made = await effects(row, await in_thread(partial(_settings, row, config)))
            ident = await self.leave()
            if ident is None:
                raise GlowplugError(f"rollout {row.name}: its lease ran out before it could {self.verb}; say it again")
        except BaseException:
            await give_back(self.store, row)
            raise
        return TakenOver(row, made, ident)


def _settings(row: RolloutRow, config: Config) -> Settings:
    """Return what a rollout was started with. Raises: UsageError, ValueError."""
    if row.finished_ns is not None:
        raise over(row)
    known = {node.name for node in config.nodes}
    missing = [node.name for node in read_state(row.state_json).nodes if node.name not in known]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(f"rollout {row.name} has node {missing[0]}{more}, which this fleet has not")
    return read_settings(row.settings_json)


def over(row: RolloutRow) -> UsageError:
    """Return what to say of a verb for a rollout that is over."""
    return UsageError(f"rollout {row.name} is over: {row.phase}{': ' if row.reason else ''}{row.reason}")


async def give_back(store: RolloutStore, row: RolloutRow) -> None:
    """Let the next one have the lease at once; where that can't be stored it runs out, and nothing else changes."""
    try:
        await unbroken(asyncio.to_thread(store.give_back, row.rollout_uid))
    except db.errors.HistoryError as error:
        log.warning("rollout %s: its lease runs out by itself: %s", row.name, error)
