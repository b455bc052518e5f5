"""Tells what of a checkpoint lies in the page cache, range by range.

Asked in turn, since none can always be had or believed: ``cachestat`` (Linux 6.5; knows of no page where
a filesystem lies over another), ``mincore`` (knows of no page in some control groups, and calls every page
of a file cached that one neither owns nor may write), single reads that return at once where the page
is not there, and, for a load alone, single reads that are timed. The first that finds a page is believed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remote_agent.loader.filemap import PAGE_BYTES, FileMap
from remote_agent.loader.files import describe, open_regular
from remote_agent.loader.filesystem import WITH_OWN_PAGES, filesystem_of
from remote_agent.loader.headers import Header

RANGE_BYTES = 8 << 20
"""A load is told about ranges of this size, counted from the beginning of a file."""

WHOLLY_CACHED = 0.99

WINDOW_BYTES = 1 << 30
SAMPLE_BYTES = 64 << 10
SAMPLES = 4
"""``mincore`` takes milliseconds a gigabyte: during a load it is asked about so many samples of each range."""

PROBES = 64
"""Pages asked for in one file; only where one of them is there is every range asked about.
A page that is not there is on its way in afterwards."""

TIMED_READS = 16
CACHED_READ_NS = 30_000
"""A page comes from memory within some microseconds, from a disk not within fifty."""

CACHESTAT = 451
MACHINES_WITH_CACHESTAT = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Residency:
    """``cached_bytes`` of the data sections are in memory; None if nobody can tell.

    ``how``: ``cachestat``, ``mincore``, ``probes``, or ``unknown``; ``reason`` why not the one before it.
    """

    cached_bytes: int | None
    how: str = "cachestat"
    reason: str | None = None


@dataclass(frozen=True)
class RangeResidency:
    """``shares[i]``: how much of range ``i`` is in memory, 0 to 1; all 0 if nobody can tell (``unknown``)."""

    shares: tuple[float, ...]
    how: str
    reason: str | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether all of the file is in memory."""
        return all(share >= WHOLLY_CACHED for share in self.shares)

    def is_cached(self, offset: int, length: int) -> bool:
        """Return whether bytes ``offset..offset+length`` of the file, counted as the ranges are, are all in memory."""
        first, last = offset // RANGE_BYTES, (offset + length - 1) // RANGE_BYTES
        return all(share >= WHOLLY_CACHED for share in self.shares[first : last + 1])

    def has_every_page(self, offset: int, length: int) -> bool:
        """Return whether the kernel counted every page of those bytes in memory: samples and probes count none."""
        first, last = offset // RANGE_BYTES, (offset + length - 1) // RANGE_BYTES
        return self.how == "cachestat" and all(share == 1 for share in self.shares[first : last + 1])


Range = tuple[int, int]
"""Offset in the file and length, both in bytes."""

Ask = Callable[[int, Sequence[Range]], "list[float]"]
"""Returns the cached share of each range. Raises: OSError where it can't be asked."""


def measure_residency(headers: Sequence[Header]) -> Residency:
    """Return how much of the headers' data sections is cached, without reading.

    Raises: CheckpointError if a file is gone.
    """
    found = [_measure_file(header) for header in headers]
    reason = next((one.reason for one in found if one.reason is not None), None)
    known = [one.cached_bytes for one in found if one.cached_bytes is not None]
    if len(known) < len(found):
        return Residency(None, "unknown", reason)
    ways = {one.how for one in found}
    how = next((way for way in ("probes", "mincore") if way in ways), "cachestat")
    return Residency(sum(known), how, reason)


def measure_ranges(header: Header, descriptor: int) -> RangeResidency:
    """Return how much of each range of an open shard is cached; takes about a millisecond a gigabyte."""
    ranges = _cut(0, header.size_bytes, RANGE_BYTES)
    asked: list[tuple[str, Ask]] = [
        ("cachestat", _cachestat),
        ("mincore", _sampled_mincore),
        ("probes", _probe),
        ("timed", _time_reads),
    ]
    return _first_believed(header, descriptor, ranges, asked)


def _measure_file(header: Header) -> Residency:
    if not header.data_bytes:
        return Residency(0)
    descriptor = open_regular(header.path)
    try:
        if os.fstat(descriptor).st_size < header.size_bytes:
            return Residency(None, "unknown", f"{header.path.name} became shorter")
        ranges = _cut(header.data_start, header.size_bytes, max(header.data_bytes // PROBES, PAGE_BYTES))
        asked: list[tuple[str, Ask]] = [("cachestat", _cachestat), ("mincore", _mincore), ("probes", _probe)]
        found = _first_believed(header, descriptor, ranges, asked)
    finally:
        os.close(descriptor)
    if found.how == "unknown":
        return Residency(None, "unknown", found.reason)
    cached = sum(share * length for share, (_, length) in zip(found.shares, ranges, strict=True))
    return Residency(min(round(cached), header.data_bytes), found.how, found.reason)


def _cut(start: int, end: int, length: int) -> list[Range]:
    return [(offset, min(length, end - offset)) for offset in range(start, end, length)]


def _first_believed(
    header: Header, descriptor: int, ranges: Sequence[Range], asked: Sequence[tuple[str, Ask]]
) -> RangeResidency:
    """Return the first answer that finds a page, else the first answer there is."""
    reasons: list[str] = []
    nothing: RangeResidency | None = None
    for how, ask in asked:
        if how == "mincore" and not _is_told_by_mincore(header, descriptor):
            reasons.append("mincore is not told about files of others")
            continue
        try:
            shares = ask(descriptor, ranges)
        except OSError as error:
            reasons.append(_refusal(how, header, error))
            continue
        if any(shares):
            return RangeResidency(tuple(shares), how, "; ".join(reasons) or None)
        nothing = nothing or RangeResidency(tuple(shares), how, "; ".join(reasons) or None)
        reasons.append(f"{how} says that nothing is cached")
        if how == "probes" or (how == "cachestat" and filesystem_of(header.path) in WITH_OWN_PAGES):
            break  # that is the truth, and each probe would bring a page in
    return nothing or RangeResidency((0.0,) * len(ranges), "unknown", "; ".join(reasons) or None)


def _refusal(how: str, header: Header, error: OSError) -> str:
    if how == "mincore":
        return f"mmap refused on {filesystem_of(header.path)}: {describe(error)}"
    if how == "probes" and error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
        return "cached pages can't be asked for"
    return f"{how}: {describe(error)}"


def _is_told_by_mincore(header: Header, descriptor: int) -> bool:
    return os.fstat(descriptor).st_uid == os.geteuid() or os.access(header.path, os.W_OK)


class _CacheRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


def _cachestat(descriptor: int, ranges: Sequence[Range]) -> list[float]:
    if platform.machine() not in MACHINES_WITH_CACHESTAT:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if not ranges:
        return []
    libc = ctypes.CDLL(None, use_errno=True)

    def share(offset: int, length: int) -> float:
        asked, told = _CacheRange(offset, length), _CacheStat()
        number = ctypes.c_long(CACHESTAT)
        if libc.syscall(number, descriptor, ctypes.byref(asked), ctypes.byref(told), 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        cached: int = told.cached
        return min(1.0, cached / _pages_in(offset, length))

    # Most files are in memory whole or not at all, and one call costs what the one for a range does.
    start, (last, length) = ranges[0][0], ranges[-1]
    whole = share(start, last + length - start)
    return [whole] * len(ranges) if whole in (0.0, 1.0) else [share(*one) for one in ranges]


def _mincore(descriptor: int, ranges: Sequence[Range]) -> list[float]:
    """Ask about every page; adjoining ranges share windows of the map."""
    return [_mincore_share(descriptor, offset, length) for offset, length in ranges]


def _mincore_share(descriptor: int, offset: int, length: int) -> float:
    first = offset // PAGE_BYTES * PAGE_BYTES
    cached = 0
    for start, window in _cut(first, offset + length, WINDOW_BYTES):
        with FileMap(descriptor, window, start) as content:
            cached += content.count_cached(0, window)
    return min(1.0, cached / _pages_in(offset, length))


def _sampled_mincore(descriptor: int, ranges: Sequence[Range]) -> list[float]:
    if not ranges:
        return []
    shares = []
    with FileMap(descriptor, ranges[-1][0] + ranges[-1][1]) as content:
        for offset, length in ranges:
            sample = min(SAMPLE_BYTES, length)
            step = (length - sample) // max(SAMPLES - 1, 1) // PAGE_BYTES * PAGE_BYTES
            places = {offset + number * step for number in range(SAMPLES)}
            cached = sum(content.count_cached(place, sample) for place in places)
            shares.append(cached / (len(places) * _pages_in(0, sample)))
    return shares


def _probe(descriptor: int, ranges: Sequence[Range]) -> list[float]:
    """Ask for one page in the middle of each range; a few ranges decide whether there is more to ask for."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # or a page that is not there brings in its neighbours
    try:
        step = max(1, len(ranges) // PROBES)
        few = {number: _is_there(descriptor, ranges[number]) for number in range(0, len(ranges), step)}
        if not any(few.values()):
            return [0.0] * len(ranges)
        # Nothing is asked twice: a page that was not there is on its way in since.
        return [few[number] if number in few else _is_there(descriptor, one) for number, one in enumerate(ranges)]
    finally:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)


def _is_there(descriptor: int, asked: Range) -> float:
    offset, length = asked
    try:
        return float(os.preadv(descriptor, [bytearray(1)], offset + length // 2, os.RWF_NOWAIT))
    except BlockingIOError:
        return 0.0


def _time_reads(descriptor: int, ranges: Sequence[Range]) -> list[float]:
    """Read a page in the middle of some ranges; each stands for those up to the next one."""
    numbers = list(range(0, len(ranges), max(1, len(ranges) // TIMED_READS)))
    found = []
    for number in numbers:
        offset, length = ranges[number]
        begun = time.perf_counter_ns()
        os.preadv(descriptor, [bytearray(1)], offset + length // 2)
        found.append(float(time.perf_counter_ns() - begun < CACHED_READ_NS))
    return [found[bisect_right(numbers, number) - 1] for number in range(len(ranges))]


def _pages_in(offset: int, length: int) -> int:
    return max(1, (offset + length + PAGE_BYTES - 1) // PAGE_BYTES - offset // PAGE_BYTES)
