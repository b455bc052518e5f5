"""Does one thing whenever a schedule says so, at most once at a time, and tells what it does.

Times are compared with the wall clock, which goes on while a machine sleeps: what was missed meanwhile is caught up
with once, however often it was due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, Protocol, TypeVar

from console.schedules import Schedule

LOOK_S = 5.0
"""How late a machine that has slept notices it: timers stand still meanwhile."""

R = TypeVar("R")


class WallClock(Protocol):
    def now(self) -> datetime: ...

    async def until(self, moment: datetime) -> None:
        """Return once ``now`` has reached that moment, also where the clock is set or the machine sleeps."""


class SystemClock:
    """The real one."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def until(self, moment: datetime) -> None:
        while (left_s := (moment - self.now()).total_seconds()) > 0:  # noqa: ASYNC110 - time itself is waited for
            await asyncio.sleep(min(left_s, LOOK_S))


@dataclass(frozen=True)
class Next:
    """Nothing happens before ``due``."""

    due: datetime


@dataclass(frozen=True)
class Started:
    """What was due at ``due`` is begun. ``missed``: how many more were due since, which are left out."""

    due: datetime
    late_s: float
    missed: int


@dataclass(frozen=True)
class LeftOut:
    """What was due at ``due`` is not begun: that of ``running`` still goes on."""

    due: datetime
    running: datetime


@dataclass(frozen=True)
class Ended(Generic[R]):
    due: datetime
    result: R


Told = Callable[[Next | Started | LeftOut | Ended[R]], None]


async def keep(schedule: Schedule, work: Callable[[], Awaitable[R]], told: Told[R], clock: WallClock) -> R | None:
    """Do ``work`` at each due moment until none is left, and return what the last one came to; None without one.

    When cancelled, what is going is cancelled too and is over before this is.
    """
    due = schedule.after(clock.now())
    going: asyncio.Future[R] | None = None
    began = last = None
    if due is not None:
        told(Next(due))
    try:
        while due is not None or going is not None:
            await _until_due_or_done(due, going, clock)
            if going is not None and going.done():
                assert began is not None
                last, going = going.result(), None
                told(Ended(began, last))
            now = clock.now()
            if due is None or now < due:
                continue
            if going is not None and began is not None:
                told(LeftOut(due, began))
            else:
                told(Started(due, (now - due).total_seconds(), _count(schedule, due, now)))
                going, began = asyncio.ensure_future(work()), due
            due = schedule.after(max(now, due))
            if due is not None:
                told(Next(due))
    finally:
        if going is not None:
            going.cancel()
            await asyncio.wait([going])
    return last


async def _until_due_or_done(due: datetime | None, going: asyncio.Future[R] | None, clock: WallClock) -> None:
    waiting = asyncio.ensure_future(clock.until(due)) if due is not None else None
    try:
        await asyncio.wait([one for one in (waiting, going) if one is not None], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if waiting is not None:
            waiting.cancel()


def _count(schedule: Schedule, due: datetime, now: datetime) -> int:
    """Return how many moments after ``due`` have come as well."""
    count, later = 0, schedule.after(due)
    while later is not None and later <= now:
        count, later = count + 1, schedule.after(later)
    return count
