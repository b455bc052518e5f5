"""Turns numbers into the few characters that a person reads. Pure; sizes and rates are decimal (1 GB = 10⁹ bytes)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, tzinfo

NS_PER_S = 1_000_000_000

_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_BLOCKS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


def _significant(value: float) -> str:
    """Return a number below 1000 with about three digits: ``9.12``, ``46.4``, ``151``."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def _unit_of(size_bytes: float) -> int:
    power = 0
    while abs(size_bytes) >= 999.5 and power < len(_SIZE_UNITS) - 1:
        size_bytes /= 1000
        power += 1
    return power


def size_text(size_bytes: float) -> str:
    """``13.5 GB``."""
    power = _unit_of(size_bytes)
    if power == 0:
        return f"{size_bytes:.0f} B"
    return f"{_significant(size_bytes / 1000**power)} {_SIZE_UNITS[power]}"


def size_pair(done_bytes: float, total_bytes: float) -> str:
    """``9.1/13.5 GB``, both in the unit of the total."""
    power = _unit_of(total_bytes)
    scale = 1000**power
    digits = 0 if power == 0 else 1 if total_bytes / scale >= 9.95 else 2
    whole = 0 if total_bytes / scale >= 99.95 else digits
    return f"{done_bytes / scale:.{digits}f}/{total_bytes / scale:.{whole}f} {_SIZE_UNITS[power]}"


def rate_text(rate_bytes_s: float) -> str:
    """``46.4 GB/s``."""
    return f"{size_text(rate_bytes_s)}/s"


def rate_pair(rate_bytes_s: float, ceiling_bytes_s: float | None) -> str:
    """``46.4 of 55.3 GB/s``, or the rate alone where no ceiling is known."""
    if not ceiling_bytes_s:
        return rate_text(rate_bytes_s)
    power = _unit_of(ceiling_bytes_s)
    scale = 1000**power
    rate, ceiling = _significant(rate_bytes_s / scale), _significant(ceiling_bytes_s / scale)
    return f"{rate} of {ceiling} {_SIZE_UNITS[power]}/s"


def duration_text(duration_ns: float) -> str:
    """``0.4 ms``, ``37 ms``, ``0.36 s``, ``43.9 s``, ``2 min 05 s``, ``3 h 12 min``, ``2 d 4 h``."""
    seconds = duration_ns / NS_PER_S
    if seconds < 0.0995:
        milliseconds = seconds * 1000
        return f"{milliseconds:.1f} ms" if milliseconds < 9.95 else f"{milliseconds:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02d} s"
    return _long_duration(seconds)


def _long_duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def age_text(age_s: float) -> str:
    """One unit only: ``3 s``, ``12 min``, ``5 h``, ``9 d``."""
    age_s = max(0.0, age_s)
    if age_s < 99.5:
        return f"{age_s:.0f} s"
    if age_s < 99.5 * 60:
        return f"{age_s / 60:.0f} min"
    if age_s < 48 * 3600:
        return f"{age_s / 3600:.0f} h"
    return f"{age_s / 86400:.0f} d"


def elapsed_pair(elapsed_ns: float, expected_ns: float) -> str:
    """``0.7 s of 1.1 s expected``."""
    return f"{coarse_duration(elapsed_ns)} of {coarse_duration(expected_ns)} expected"


def coarse_duration(duration_ns: float) -> str:
    """Like `duration_text`, calmer while it counts: one decimal above a tenth of a second."""
    seconds = duration_ns / NS_PER_S
    return f"{seconds:.1f} s" if 0.0995 <= seconds < 59.95 else duration_text(duration_ns)


def delta_text(value: float, baseline: float) -> str:
    """How far ``value`` lies from ``baseline``: ``−4 %``, ``+412 %``, ``±0 %``."""
    if baseline <= 0:
        return ""
    percent = round(100 * (value - baseline) / baseline)
    sign = "±" if percent == 0 else "+" if percent > 0 else "−"
    return f"{sign}{abs(percent)} %"


def percent_text(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""


def bar(fraction: float, width: int, *, ascii_only: bool = False) -> tuple[str, str]:
    """Return the filled and the empty part of a bar, together exactly ``width`` cells.

    The filled part resolves eighths of a cell.
    """
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    if ascii_only:
        full = eighths // 8
        return "#" * full, "." * (width - full)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (_BLOCKS[rest] if rest else "")
    return filled, " " * (width - len(filled))


def cells_of(length: float) -> str:
    """Return a bar of ``length`` cells, fractions drawn in eighths, at least a hair where something is."""
    if length <= 0:
        return ""
    full, rest = divmod(max(1, round(length * 8)), 8)
    return "█" * full + (_BLOCKS[rest] if rest else "")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last ``width`` values as bars between the least and the greatest; alike ones are all low."""
    shown = list(values)[-width:] if width > 0 else []
    low, high = min(shown, default=0), max(shown, default=0)
    if high <= 0 or high - low < 0.02 * high:
        return _LEVELS[0] * len(shown)
    return "".join(_LEVELS[round((value - low) / (high - low) * 7)] for value in shown)


def clock_text(t_wall_ns: int, zone: tzinfo | None = None) -> str:
    """``09:14:05`` in ``zone``, the machine's own where it is None."""
    return _moment(t_wall_ns, zone).strftime("%H:%M:%S")


def date_text(t_wall_ns: int, zone: tzinfo | None = None) -> str:
    """``Nov 29 09:14:05``."""
    return _moment(t_wall_ns, zone).strftime("%b %d %H:%M:%S")


def _moment(t_wall_ns: int, zone: tzinfo | None) -> datetime:
    """Return that time; what no calendar holds becomes the start of 1970 (hosts send what they like)."""
    try:
        return datetime.fromtimestamp(t_wall_ns / NS_PER_S, tz=zone).astimezone(zone)
    except (OverflowError, OSError, ValueError):
        return datetime.fromtimestamp(0, tz=zone).astimezone(zone)


def short_uid(run_uid: str) -> str:
    """Enough of a run's id to tell it from its neighbours."""
    return run_uid[:8]


def counted(count: int, noun: str) -> str:
    """``1 node``, ``3 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
