"""Tells how much of a checkpoint lies in the page cache, without reading it.

``mincore`` over a read-only map; where that can't be (a filesystem that refuses maps) or can't
be trusted (the kernel answers "all of it" for files one neither owns nor may write), single
pages are asked for with reads that return at once when the page is not there.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from remote_agent.loader.files import describe, open_regular
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.headers import Header

WINDOW_BYTES = 1 << 30
PROBES = 64
"""Pages asked for in one file when ``mincore`` can't be used."""

PROT_READ = 1
MAP_SHARED = 1


@dataclass(frozen=True)
class Residency:
    """``cached_bytes`` of the data sections are in memory; None if nobody can tell.

    ``how``: ``mincore``, ``probes`` or ``unknown``; ``reason`` why it is not ``mincore``.
    """

    cached_bytes: int | None
    how: str = "mincore"
    reason: str | None = None


def measure_residency(headers: Sequence[Header]) -> Residency:
    """Return how much of the headers' data sections is cached. Raises: CheckpointError if a file is gone."""
    found = [_measure_file(header) for header in headers]
    reason = next((one.reason for one in found if one.reason is not None), None)
    known = [one.cached_bytes for one in found if one.cached_bytes is not None]
    if len(known) < len(found):
        return Residency(None, "unknown", reason)
    return Residency(sum(known), "probes" if any(one.how == "probes" for one in found) else "mincore", reason)


def _measure_file(header: Header) -> Residency:
    if not header.data_bytes:
        return Residency(0)
    descriptor = open_regular(header.path)
    try:
        status = os.fstat(descriptor)
        if status.st_size < header.size_bytes:
            return Residency(None, "unknown", f"{header.path.name} became shorter")
        if status.st_uid != os.geteuid() and not os.access(header.path, os.W_OK):
            return _probe(descriptor, header, "mincore is not told about files of others")
        try:
            cached = _mincore(descriptor, header)
        except OSError as error:
            reason = f"mmap refused on {filesystem_of(header.path)}: {describe(error)}"
            return _probe(descriptor, header, reason)
        if cached:
            return Residency(cached)
        # In some control groups mincore knows of no page of a file that is cached whole.
        probed = _probe(descriptor, header, "mincore says that nothing is cached, and reads found pages at once")
        return probed if probed.cached_bytes else Residency(0)
    finally:
        os.close(descriptor)


def _mincore(descriptor: int, header: Header) -> int:
    """Return the cached bytes of a data section. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    page = os.sysconf("SC_PAGE_SIZE")
    first = header.data_start // page * page
    cached = 0
    for start in range(first, header.size_bytes, WINDOW_BYTES):
        length = min(WINDOW_BYTES, header.size_bytes - start)
        address = libc.mmap(None, length, PROT_READ, MAP_SHARED, descriptor, start)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            pages = (ctypes.c_ubyte * ((length + page - 1) // page))()
            if libc.mincore(address, length, pages) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            cached += bytes(pages).count(1) * page
        finally:
            libc.munmap(address, length)
    return min(cached, header.data_bytes)


def _probe(descriptor: int, header: Header, reason: str) -> Residency:
    count = min(PROBES, max(1, header.data_bytes // 4096))
    step = header.data_bytes / count
    buffer = bytearray(1)
    hits = 0
    for number in range(count):
        offset = header.data_start + int(step * (number + 0.5))
        try:
            hits += os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        except OSError as error:
            unsupported = error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
            why = "cached pages can't be asked for" if unsupported else describe(error)
            return Residency(None, "unknown", f"{reason}; {why}")
    return Residency(header.data_bytes * hits // count, "probes", reason)
