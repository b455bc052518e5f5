"""``--at`` and ``--every``: a verb's work at its time, in the foreground."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

import click

from console.cli.common import run_async, say
from console.errors import GlowplugError, UsageError
from console.format import NS_PER_S, duration_text
from console.schedules import Every, Schedule, parse_at
from console.system_zone import SystemZone
from console.timetable import Ended, LeftOut, Next, Started, SystemClock, WallClock, keep

LATE_S = 30.0
"""Later than that is said: the machine slept, or its clock was set."""

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Done:
    """What one time's work came to. ``document``: of it, for ``--json``."""

    exit_code: int
    document: Mapping[str, object] = field(default_factory=dict)


def ahead_options(command: F) -> F:
    """Add ``--at`` and ``--every``, given as ``at`` and ``every``."""
    at = click.option("--at", metavar="TIME", help="Wait until then: 2026-12-01T06:00+01:00, HH:MM here, or +90m.")
    every = click.option(
        "--every", metavar="CRON", help="At these times: '30 6 * * 1-5', @hourly, @daily …, until Ctrl-C."
    )
    return at(every(command))


def read_schedule(at: str | None, every: str | None) -> Schedule | None:
    """Return what the two options say; None without either. Raises: UsageError."""
    if at is not None and every is not None:
        raise UsageError("--at and --every: give one of them")
    if every is not None:
        return Every(every, SystemZone())
    return parse_at(at, datetime.now(UTC), SystemZone()) if at is not None else None


def run_ahead(
    schedule: Schedule,
    work: Callable[[], Awaitable[Done]],
    explain: Callable[[], str],
    as_json: bool,
    clock: WallClock | None = None,
) -> int:
    """Do the work at each of its times and return the last one's exit code.

    With ``as_json`` each thing that happens is one line of JSON on stdout. ``explain``: what to say of work that is cut
    off. Raises: Interrupted.
    """
    watch = clock or SystemClock()

    async def caught() -> Done:
        try:
            return await work()
        except GlowplugError as error:
            for line in str(error).splitlines():
                say(line)
            return Done(error.exit_code, {"error": str(error)})

    def told(one: Next | Started | LeftOut | Ended[Done]) -> None:
        if as_json:
            click.echo(json.dumps(document(one), ensure_ascii=False, default=str))
        if (text := line(one, watch.now())) is not None:
            say(text)

    async def last_code() -> int:
        done = await keep(schedule, caught, told, watch)
        return done.exit_code if done is not None else 0

    return run_async(last_code(), explain)


def line(one: Next | Started | LeftOut | Ended[Done], now: datetime) -> str | None:
    """Return what is said of it; None of an end, of which the work has told."""
    match one:
        case Next(due):
            return f"next: {_moment(due)}, in {duration_text((due - now).total_seconds() * NS_PER_S)}"
        case Started(due, late_s, missed):
            late = f", {duration_text(late_s * NS_PER_S)} late" if late_s > LATE_S else ""
            more = f"; {missed} more since then are left out" if missed else ""
            return f"due {_moment(due)}{late}: it is done now{more}"
        case LeftOut(due, running):
            return f"due {_moment(due)}: left out, what was due {_moment(running)} still goes on"
    return None


def document(one: Next | Started | LeftOut | Ended[Done]) -> dict[str, object]:
    """Return it as ``--json`` has it."""
    match one:
        case Next(due):
            return {"event": "next", "due": due.isoformat()}
        case Started(due, late_s, missed):
            return {"event": "started", "due": due.isoformat(), "late_s": round(late_s, 3), "missed": missed}
        case LeftOut(due, running):
            return {"event": "left_out", "due": due.isoformat(), "running": running.isoformat()}
        case Ended(due, done):
            return {"event": "ended", "due": due.isoformat(), "exit_code": done.exit_code, **done.document}


def _moment(moment: datetime) -> str:
    """``Tue 2026-12-01 06:30 CET``."""
    return f"{moment:%a %Y-%m-%d %H:%M}{f':{moment:%S}' if moment.second else ''} {moment.tzname()}"
