"""Puts the page cache, and what a filesystem refuses, into the state that a test wants."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remote_agent.loader.filemap import FileMap
from remote_agent.loader.residency import RangeResidency


def drop_from_cache(path: Path, offset: int = 0, length: int = 0) -> None:
    """Have the kernel forget pages of a file, by default all of them; skip the test where it can't."""
    from remote_agent.loader.filesystem import filesystem_of

    if filesystem_of(path) in ("tmpfs", "ramfs"):
        pytest.skip("nothing can be dropped from a filesystem that is the page cache")
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    size = os.fstat(descriptor).st_size
    try:
        with FileMap(descriptor, size) as content:
            for _ in range(100):  # the kernel passes over a page that somebody looks at just now
                os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
                if length or not content.count_cached(0, size):
                    break
    finally:
        os.close(descriptor)


def tell_cached(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Have the kernel count that share of every range of a file in memory, for loads onto the CPU."""
    found = RangeResidency((share,) * 4, "cachestat")
    monkeypatch.setattr("remote_agent.loader.mapped.measure_ranges", lambda header, descriptor: found)


def refuse_direct(monkeypatch: pytest.MonkeyPatch, number: int, at_open: bool = True) -> None:
    """Let files be opened, or read, past the page cache no more, with the error of a filesystem that can't."""
    real_open, real_read = os.open, os.preadv
    direct: set[int] = set()

    def refuse_open(path: object, flags: int, *arguments: object) -> int:
        if flags & os.O_DIRECT and at_open:
            raise OSError(number, os.strerror(number))
        descriptor = real_open(path, flags, *arguments)  # type: ignore[call-overload]
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return int(descriptor)

    def refuse_read(descriptor: int, *arguments: object) -> int:
        if descriptor in direct:
            raise OSError(number, os.strerror(number))
        return real_read(descriptor, *arguments)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr("remote_agent.loader.direct.os.open", refuse_open)
    monkeypatch.setattr("remote_agent.loader.direct.os.preadv", refuse_read)
