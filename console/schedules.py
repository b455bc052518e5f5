"""When something is due: at one moment, or by cron's words. Pure: the time and the zone are handed in.

Moments are instants. Words mean the zone's wall clock, and each of its times comes once: one that a change of the clock
skips is due at the next valid moment, one that the clock shows twice at the first. Words that name no hour mean every
hour that passes, so they have nothing to skip or to leave out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Protocol

from cronsim import CronSim, CronSimError

from console.errors import UsageError
from console.format import duration_text

NAMED = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
LONGEST = timedelta(days=366)

_FORMS = "a time with its zone (2026-12-01T06:00+01:00), HH:MM or +90m"
_IN = re.compile(r"\+(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?")
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_ALL_HOURS = set(range(24))
_SOME_TIME = datetime(2000, 1, 1, tzinfo=UTC)


class Schedule(Protocol):
    """Tells what is due next."""

    def after(self, moment: datetime) -> datetime | None:
        """Return the first due moment after that one, in the zone to show it in; None where there is none."""


class Once:
    """One moment."""

    def __init__(self, moment: datetime) -> None:
        self._moment = moment

    def after(self, moment: datetime) -> datetime | None:
        return self._moment if self._moment > moment else None


class Every:
    """Cron's five fields, or one of `NAMED`. Raises: UsageError for anything else, and for what never comes."""

    def __init__(self, words: str, zone: tzinfo) -> None:
        self._zone = zone
        fields = NAMED.get(words.strip().lower(), words).split()
        if len(fields) != 5:
            raise UsageError(f"--every {words!r}: give five fields, such as '30 6 * * 1-5', or {', '.join(NAMED)}")
        try:
            hours = CronSim(" ".join(fields), _SOME_TIME).hours
        except CronSimError as error:
            raise UsageError(f"--every {words!r}: {str(error).lower()}") from error
        self._is_hourly = hours == _ALL_HOURS
        if self._is_hourly:
            fields[1] = "*"  # the one spelling that is counted in hours that pass
        self._words = " ".join(fields)
        if self.after(_SOME_TIME) is None:
            raise UsageError(f"--every {words!r}: no such day comes within 50 years")

    def after(self, moment: datetime) -> datetime | None:
        here = moment.astimezone(self._zone)
        found = CronSim(self._words, here) if self._is_hourly else self._by_wall_clock(here)
        return next((one for one in map(self._fixed, found) if one > moment), None)

    def _fixed(self, moment: datetime) -> datetime:
        return _with_offset(moment.astimezone(UTC), self._zone)

    def _by_wall_clock(self, here: datetime) -> Iterator[datetime]:
        for wall in CronSim(self._words, here.replace(tzinfo=None, fold=0)):
            yield _valid(wall, self._zone)


def parse_at(text: str, now: datetime, zone: tzinfo) -> Once:
    """Return the moment that ``text`` means at ``now``. Raises: UsageError for none, and for one that is over."""
    if text.startswith("+"):
        return Once(_with_offset(now + _duration(text), zone))
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        return Once(_next_clock(int(clock[1]), int(clock[2]), now, zone))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--at {text!r}: give {_FORMS}") from None
    if moment.tzinfo is None:
        raise UsageError(f"--at {text!r}: has no zone; give {_FORMS}")
    if moment <= now:
        raise UsageError(f"--at {text!r}: is over since {duration_text((now - moment).total_seconds() * 1e9)}")
    return Once(moment)


def _with_offset(moment: datetime, zone: tzinfo) -> datetime:
    """Return that instant in the zone by its offset of then: two times of one zone would be compared by the clock."""
    here = moment.astimezone(zone)
    offset = here.utcoffset()
    assert offset is not None
    return here.replace(tzinfo=timezone(offset, f"{here:%Z}"), fold=0)


def _duration(text: str) -> timedelta:
    parts = _IN.fullmatch(text)
    if parts is None or not any(parts.groups()):
        raise UsageError(f"--at {text!r}: give {_FORMS}; after the + stand d, h, m and s, such as +1h30m")
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if length > LONGEST:
        raise UsageError(f"--at {text!r}: is more than {LONGEST.days} days")
    return length


def _next_clock(hour: int, minute: int, now: datetime, zone: tzinfo) -> datetime:
    found = Every(f"{minute} {hour} * * *", zone).after(now)
    assert found is not None, "every day has that time, or the moment after it"
    return found


def _valid(wall: datetime, zone: tzinfo) -> datetime:
    """Return the first instant at which the zone's clock shows that time, or the next one where it never does."""
    while True:
        moment = wall.replace(tzinfo=zone, fold=0)
        if moment.astimezone(UTC).astimezone(zone).replace(tzinfo=None, fold=0) == wall:
            return moment
        wall += timedelta(minutes=1)
