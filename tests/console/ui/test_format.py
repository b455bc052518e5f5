"""Numbers in the few characters that a person reads."""

from __future__ import annotations

from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import format as fmt

MS, S = 1_000_000, 1_000_000_000


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (13_476_839_424, "13.5 GB"),
        (150_754_820_096, "151 GB"),
        (999_600_000, "1.00 GB"),
    ],
)
def test_sizes_are_decimal_with_three_digits(size_bytes: int, text: str) -> None:
    """A size has about three digits and steps up before it would show 1000."""
    assert fmt.size_text(size_bytes) == text


def test_a_pair_of_sizes_shares_the_unit_of_the_whole() -> None:
    """Done and total can be compared at a glance."""
    assert fmt.size_pair(9_100_000_000, 13_476_839_424) == "9.1/13.5 GB"
    assert fmt.size_pair(14_600_000_000, 150_754_820_096) == "14.6/151 GB"
    assert fmt.size_pair(440 * 10**9, 1_206 * 10**9) == "0.44/1.21 TB"


def test_a_rate_stands_beside_its_ceiling() -> None:
    """The ceiling is left out where nobody knows it."""
    assert fmt.rate_pair(46.4e9, 55.3e9) == "46.4 of 55.3 GB/s"
    assert fmt.rate_pair(46.4e9, None) == "46.4 GB/s"


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (400_000, "0.4 ms"),
        (37 * MS, "37 ms"),
        (360 * MS, "0.36 s"),
        (1_080 * MS, "1.08 s"),
        (43_900 * MS, "43.9 s"),
        (59_990 * MS, "1 min 00 s"),
        (125 * S, "2 min 05 s"),
        (3_599_900 * MS, "60 min 00 s"),
        (11_520 * S, "3 h 12 min"),
        (187_200 * S, "2 d 4 h"),
    ],
)
def test_durations_have_the_unit_that_fits(duration_ns: int, text: str) -> None:
    """From a tenth of a millisecond to days."""
    assert fmt.duration_text(duration_ns) == text


def test_elapsed_time_is_told_against_the_median() -> None:
    """One decimal, so that it counts calmly."""
    assert fmt.elapsed_pair(712 * MS, 1_130 * MS) == "0.7 s of 1.1 s expected"


@pytest.mark.parametrize(
    ("age_s", "text"), [(-1, "0 s"), (34, "34 s"), (120, "2 min"), (10_800, "3 h"), (10**6, "12 d")]
)
def test_an_age_has_one_unit(age_s: float, text: str) -> None:
    """A clock that ran backwards is no age below zero."""
    assert fmt.age_text(age_s) == text


def test_a_difference_has_a_sign_also_when_there_is_none() -> None:
    """Nothing can be compared with nothing."""
    assert [fmt.delta_text(value, 100) for value in (96, 100, 512)] == ["−4 %", "±0 %", "+412 %"]
    assert fmt.delta_text(5, 0) == ""


@given(st.floats(-2, 3), st.integers(0, 200), st.booleans())
def test_a_bar_has_exactly_its_width(fraction: float, width: int, ascii_only: bool) -> None:
    """Whatever the fraction, also beyond its ends."""
    filled, empty = fmt.bar(fraction, width, ascii_only=ascii_only)

    assert len(filled) + len(empty) == width


def test_a_bar_resolves_eighths_of_a_cell() -> None:
    """Half of one cell is half a block."""
    assert fmt.bar(0.125, 4) == ("▌", "   ")
    assert fmt.cells_of(0.0001) == "▏"


def test_a_sparkline_shows_the_newest_and_is_flat_when_nothing_differs() -> None:
    """The least is the lowest bar, the greatest the highest."""
    assert fmt.sparkline([9, 1, 2, 3], 3) == "▁▅█"
    assert fmt.sparkline([5, 5, 5], 9) == "▁▁▁"
    assert fmt.sparkline([], 9) == ""


@given(st.integers(-(2**63), 2**63 - 1))
def test_no_time_that_a_host_sends_breaks_the_clock(t_wall_ns: int) -> None:
    """Hosts send what they like."""
    assert fmt.clock_text(t_wall_ns, UTC).count(":") == 2
    assert fmt.date_text(t_wall_ns, UTC)
