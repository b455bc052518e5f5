"""What is due is done once, at its time, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest

from console.cli import ahead
from console.cli.ahead import Done
from console.errors import NodeUnreachable
from console.schedules import Every, Once
from console.timetable import Ended, LeftOut, Next, Started, keep
from tests.console.fake_host import eventually

SIX = datetime(2026, 12, 1, 6, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)


class FakeClock:
    """A wall clock that stands where the test puts it; ``runs``: who waits goes on at the moment it waits for."""

    def __init__(self, now: datetime, runs: bool = False) -> None:
        self._now = now
        self._runs = runs
        self._moved = asyncio.Event()

    def now(self) -> datetime:
        return self._now

    def set(self, now: datetime) -> None:
        self._now = now
        self._moved.set()
        self._moved = asyncio.Event()

    async def until(self, moment: datetime) -> None:
        if self._runs:
            self._now = max(self._now, moment)
        while self._now < moment:
            await self._moved.wait()


class Job:
    """Work that ends when the test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.cut_off = 0
        self._end = asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        try:
            await self._end.wait()
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        self._end.clear()
        return self.begun

    def end(self) -> None:
        self._end.set()


async def test_one_moment_is_waited_for_and_its_work_is_the_end() -> None:
    """Nothing before it; what it came to is the answer."""
    clock, job, told = FakeClock(SIX - HOUR), Job(), []
    keeping = asyncio.ensure_future(keep(Once(SIX), job, told.append, clock))
    await eventually(lambda: told)
    clock.set(SIX - timedelta(seconds=1))
    await asyncio.sleep(0)
    assert job.begun == 0
    clock.set(SIX)
    await eventually(lambda: job.begun)
    job.end()

    assert await keeping == 1
    assert told == [Next(SIX), Started(SIX, 0.0, 0), Ended(SIX, 1)]


async def test_what_still_goes_on_is_not_started_twice() -> None:
    """That is said, and the next after its end is done."""
    clock, job, told = FakeClock(SIX - HOUR), Job(), []
    keeping = asyncio.ensure_future(keep(Every("0 6-8 * * *", UTC), job, told.append, clock))
    await eventually(lambda: told)
    clock.set(SIX)
    await eventually(lambda: job.begun)
    clock.set(SIX + HOUR)
    await eventually(lambda: LeftOut(SIX + HOUR, SIX) in told)
    job.end()
    await eventually(lambda: Ended(SIX, 1) in told)
    clock.set(SIX + 2 * HOUR)
    await eventually(lambda: job.begun == 2)
    keeping.cancel()
    await asyncio.wait([keeping])

    assert job.cut_off == 1
    assert told[-2:] == [Started(SIX + 2 * HOUR, 0.0, 0), Next(SIX + 24 * HOUR)]


async def test_a_machine_that_slept_catches_up_once() -> None:
    """Of what was due meanwhile one is done, and how many are not is said; then all is as ever."""
    clock, job, told = FakeClock(SIX - HOUR), Job(), []
    keeping = asyncio.ensure_future(keep(Every("0 * * * *", UTC), job, told.append, clock))
    await eventually(lambda: told)
    clock.set(SIX + 5.5 * HOUR)
    await eventually(lambda: job.begun)
    job.end()
    await eventually(lambda: Ended(SIX, 1) in told)
    assert told == [Next(SIX), Started(SIX, 5.5 * 3600, 5), Next(SIX + 6 * HOUR), Ended(SIX, 1)]
    keeping.cancel()
    await asyncio.wait([keeping])

    assert job.begun == 1


async def test_a_clock_that_is_put_back_brings_nothing_twice() -> None:
    """The next one is after the last one that was done."""
    clock, told = FakeClock(SIX - HOUR), []

    async def work() -> None:
        clock.set(SIX - HOUR)

    keeping = asyncio.ensure_future(keep(Every("0 6 * * *", UTC), work, told.append, clock))
    await eventually(lambda: told)
    clock.set(SIX)
    await eventually(lambda: Ended(SIX, None) in told)
    keeping.cancel()
    await asyncio.wait([keeping])

    assert told[:3] == [Next(SIX), Started(SIX, 0.0, 0), Next(SIX + 24 * HOUR)]


def test_as_json_each_thing_that_happens_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An error ends that time's work alone, with its exit code; the last one's is the verb's."""

    async def work() -> Done:
        raise NodeUnreachable("a: disconnected: connection refused")

    code = ahead.run_ahead(Once(SIX), work, lambda: "", as_json=True, clock=FakeClock(SIX - HOUR, runs=True))
    told = capsys.readouterr()

    assert code == 3
    assert [json.loads(line) for line in told.out.splitlines()] == [
        {"event": "next", "due": "2026-12-01T06:00:00+00:00"},
        {"event": "started", "due": "2026-12-01T06:00:00+00:00", "late_s": 0.0, "missed": 0},
        {
            "event": "ended",
            "due": "2026-12-01T06:00:00+00:00",
            "exit_code": 3,
            "error": "a: disconnected: connection refused",
        },
    ]
    assert told.err.splitlines() == [
        "next: Tue 2026-12-01 06:00 UTC, in 1 h 00 min",
        "due Tue 2026-12-01 06:00 UTC: it is done now",
        "a: disconnected: connection refused",
    ]


def test_what_is_late_or_left_out_is_said() -> None:
    """With how late, and what stands in the way."""
    late = ahead.line(Started(SIX, 7500.0, 2), SIX)
    left_out = ahead.line(LeftOut(SIX + HOUR, SIX), SIX)

    assert late == "due Tue 2026-12-01 06:00 UTC, 2 h 05 min late: it is done now; 2 more since then are left out"
    assert left_out == ("due Tue 2026-12-01 07:00 UTC: left out, what was due Tue 2026-12-01 06:00 UTC still goes on")
