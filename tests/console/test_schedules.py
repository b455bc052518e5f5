"""When something is due: moments, cron's words, and days on which a clock is changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo

import pytest

from console.errors import UsageError
from console.schedules import Every, parse_at
from console.system_zone import SystemZone

NOW = datetime(2026, 3, 1, 11, 30, tzinfo=UTC)


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[tzinfo]:
    """This process lives in Berlin's time, by rules that need no files."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield SystemZone()
    monkeypatch.undo()
    time.tzset()


def due(words: str, start: str, zone: tzinfo, count: int = 3) -> list[str]:
    """Return the next moments after ``start``, as the zone's clock shows them."""
    moment, found = datetime.fromisoformat(start), []
    for _ in range(count):
        later = Every(words, zone).after(moment)
        assert later is not None
        assert later > moment
        found.append(later.isoformat(timespec="minutes"))
        moment = later
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("30 6 * * 1-5", ["2026-03-02T06:30+01:00", "2026-03-03T06:30+01:00"]),
        ("*/20 8-9 * * *", ["2026-03-02T08:00+01:00", "2026-03-02T08:20+01:00"]),
        ("0 0 1 */2 *", ["2026-05-01T00:00+02:00", "2026-07-01T00:00+02:00"]),
        ("15 4 29 2 *", ["2028-02-29T04:15+01:00", "2032-02-29T04:15+01:00"]),
        ("0 12 * MAR sun", ["2026-03-08T12:00+01:00", "2026-03-15T12:00+01:00"]),
        ("0 12 * * 7", ["2026-03-08T12:00+01:00", "2026-03-15T12:00+01:00"]),
        ("0 0 13 * 5", ["2026-03-06T00:00+01:00", "2026-03-13T00:00+01:00"]),
        ("@hourly", ["2026-03-01T13:00+01:00", "2026-03-01T14:00+01:00"]),
        ("@daily", ["2026-03-02T00:00+01:00", "2026-03-03T00:00+01:00"]),
        (" @Weekly ", ["2026-03-08T00:00+01:00", "2026-03-15T00:00+01:00"]),
        ("@monthly", ["2026-04-01T00:00+02:00", "2026-05-01T00:00+02:00"]),
        ("@yearly", ["2027-01-01T00:00+01:00", "2028-01-01T00:00+01:00"]),
    ],
)
def test_cron_words_mean_what_cron_means(words: str, expected: list[str], zone: tzinfo) -> None:
    """Five fields and the words for them, on the zone's wall clock; 12:30 there when it begins."""
    assert due(words, "2026-03-01T12:30+01:00", zone, 2) == expected


@pytest.mark.parametrize("words", ["30 2 * * *", "*/30 2 * * *", "0,30 2 29 3 *"])
def test_a_time_that_the_clock_skips_comes_once_at_the_next_valid_moment(words: str, zone: tzinfo) -> None:
    """In the night to 29 March 2026 Berlin's clocks go from 02:00 to 03:00."""
    assert due(words, "2026-03-29T00:00+01:00", zone, 1) == ["2026-03-29T03:00+02:00"]
    assert due(words, "2026-03-29T03:00+02:00", zone, 1)[0] > "2026-03-29T03:00+02:00"


def test_a_time_that_the_clock_shows_twice_comes_once(zone: tzinfo) -> None:
    """In the night to 25 October 2026 they go from 03:00 back to 02:00: whoever begins in between has missed it."""
    expected = ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]
    assert due("30 2 * * *", "2026-10-25T00:00+02:00", zone, 2) == expected
    assert due("30 2 * * *", "2026-10-25T02:10+01:00", zone, 1) == expected[1:]


def test_what_names_no_hour_comes_every_hour_that_passes(zone: tzinfo) -> None:
    """The hour that comes twice has it twice, the one that is skipped has none; however all hours are spelled."""
    for hours in ("*", "0-23", "*/1"):
        autumn = due(f"30 {hours} * * *", "2026-10-25T01:00+02:00", zone, 4)
        spring = due(f"30 {hours} * * *", "2026-03-29T01:00+01:00", zone, 2)

        assert autumn == [
            "2026-10-25T01:30+02:00", "2026-10-25T02:30+02:00", "2026-10-25T02:30+01:00", "2026-10-25T03:30+01:00",
        ]  # fmt: skip
        assert spring == ["2026-03-29T01:30+01:00", "2026-03-29T03:30+02:00"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "give five fields"),
        ("* * * *", "give five fields"),
        ("0 * * * * *", "give five fields"),
        ("@reboot", "give five fields"),
        ("60 * * * *", "bad minute"),
        ("* 24 * * *", "bad hour"),
        ("* * 0 * *", "bad day-of-month"),
        ("* * * 13 *", "bad month"),
        ("* * * * mo", "bad day-of-week"),
        ("5-1 * * * *", "bad minute"),
        ("*/0 * * * *", "bad minute"),
        ("0 0 31 2 *", "bad day-of-month"),
        ("* * */20 * 1L", "no such day comes within 50 years"),
    ],
)
def test_words_that_are_no_schedule_are_refused_in_one_line(words: str, text: str, zone: tzinfo) -> None:
    """With the words and what is wrong with them."""
    with pytest.raises(UsageError) as raised:
        Every(words, zone)

    assert repr(words) in str(raised.value)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-03-01T13:00+02:00", None),
        ("2026-12-01T06:00+01:00", "2026-12-01T05:00"),
        ("2026-12-01T06:00:30Z", "2026-12-01T06:00"),
        ("12:31", "2026-03-01T11:31"),
        ("12:30", "2026-03-02T11:30"),
        ("6:05", "2026-03-02T05:05"),
        ("+90m", "2026-03-01T13:00"),
        ("+1h30m", "2026-03-01T13:00"),
        ("+1d", "2026-03-02T11:30"),
        ("+90", None),
        ("+", None),
        ("+0x5m", None),
        ("+99999h", None),
        ("24:00", None),
        ("2026-12-01T06:00", None),
        ("2026-12-01", None),
        ("tomorrow", None),
    ],
)
def test_a_moment_is_a_time_with_its_zone_a_clock_time_or_a_while_from_now(
    text: str, expected: str | None, zone: tzinfo
) -> None:
    """At 11:30 UTC; what is over, has no zone or can't be read is refused."""
    if expected is None:
        with pytest.raises(UsageError, match="--at"):
            parse_at(text, NOW, zone)
        return
    schedule = parse_at(text, NOW, zone)
    moment = schedule.after(NOW)
    assert moment is not None

    assert moment.astimezone(UTC).isoformat(timespec="minutes") == f"{expected}+00:00"
    assert schedule.after(moment) is None


def test_this_machines_zone_agrees_with_the_c_library_at_every_hour_of_a_year(zone: tzinfo) -> None:
    """There and back again, across both changes, and in the hour that comes twice."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    for _ in range(2 * 24 * 366):
        here = moment.astimezone(zone)
        assert here.strftime("%H:%M") == time.strftime("%H:%M", time.localtime(moment.timestamp()))
        assert here.astimezone(UTC) == moment
        moment += timedelta(minutes=30)
    assert {datetime(2026, month, 1, tzinfo=zone).tzname() for month in (1, 7)} == {"CET", "CEST"}
