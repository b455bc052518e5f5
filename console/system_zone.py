"""This machine's own time zone, with its daylight saving, from the C library's rules alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo


class SystemZone(tzinfo):
    """What ``TZ`` or ``/etc/localtime`` says, at any date; `datetime.astimezone` has the offset of one moment only."""

    def utcoffset(self, dt: datetime | None) -> timedelta | None:
        if dt is None:
            return None
        wall = dt.replace(tzinfo=None, microsecond=0)
        return wall - datetime.fromtimestamp(wall.timestamp(), UTC).replace(tzinfo=None)

    def dst(self, dt: datetime | None) -> timedelta | None:
        return None

    def tzname(self, dt: datetime | None) -> str | None:
        return None if dt is None else dt.replace(tzinfo=None).astimezone().tzname()

    def fromutc(self, dt: datetime) -> datetime:
        return datetime.fromtimestamp(dt.replace(tzinfo=UTC).timestamp()).replace(tzinfo=self)  # noqa: DTZ006 - local
