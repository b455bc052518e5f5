"""Ranges are brought into the page cache, in large folios where there are any; where they can't, nobody is harmed."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_agent.errors import LoadError
from remote_agent.loader import read_ahead
from remote_agent.loader.filemap import PAGE_BYTES, FileMap
from remote_agent.loader.headers import read_header
from remote_agent.loader.read_ahead import ReadAhead
from remote_agent.loader.shards import OpenShards
from tests.remote_agent.loader.caches_by_hand import drop_from_cache
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write

SIZE = 12 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.safetensors", serialise([tensor("w", "U8", [SIZE])]))


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.fixture
def ahead(path: Path, descriptor: int) -> Iterator[ReadAhead]:
    reading = ReadAhead([descriptor], [path.stat().st_size])
    yield reading
    reading.close()


def cached_pages(descriptor: int, place: int, length: int) -> int:
    with FileMap(descriptor, os.fstat(descriptor).st_size) as content:
        return content.count_cached(place, length)


def test_a_range_is_cached_once_it_has_been_brought_in(path: Path, descriptor: int, ahead: ReadAhead) -> None:
    """From its first page to its last; a range beyond the end of the file is cut, and one behind it is nothing."""
    drop_from_cache(path)
    assert cached_pages(descriptor, 0, SIZE) == 0

    ahead.bring_in(0, PAGE_BYTES + 1, 5 * PAGE_BYTES)

    assert cached_pages(descriptor, PAGE_BYTES, 6 * PAGE_BYTES) == 6
    ahead.bring_in(0, SIZE - 1, SIZE)
    ahead.bring_in(0, 2 * SIZE, SIZE)
    assert cached_pages(descriptor, SIZE - SIZE % PAGE_BYTES, PAGE_BYTES) == 1


def test_its_maps_want_huge_pages(descriptor: int) -> None:
    """The kernel says so of the map; whether the filesystem has any is another matter."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages (CONFIG_TRANSPARENT_HUGEPAGE)")
    with FileMap(descriptor, SIZE) as content:
        told = Path("/proc/self/smaps").read_text()
        entry = told[told.index(f"{content.address:x}-") :]
    flags = re.search(r"^VmFlags: (.*)$", entry, re.MULTILINE)

    assert flags is not None
    assert "hg" in flags[1].split()


def test_what_is_ahead_of_a_reader_is_asked_for_once(
    path: Path, ahead: ReadAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that moves on asks for what it did not cover before, in blocks, to the end of the file."""
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(ahead, "bring_in", lambda *block: asked.append(block))

    for place in range(0, SIZE, 1 << 20):
        ahead.keep_ahead(0, place, 4 << 20)
    ahead.keep_ahead(0, SIZE, 4 << 20)
    while len(asked) < 13:  # the header makes the file longer than twelve blocks
        threading.Event().wait(0.001)
    ahead.close()

    assert sorted(asked) == sorted(
        (0, place, min(1 << 20, path.stat().st_size - place)) for place in range(0, path.stat().st_size, 1 << 20)
    )


def test_closing_waits_for_what_is_under_way_and_gives_up_the_rest(
    ahead: ReadAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread is left that could use a descriptor which is closed next."""
    begun, goes_on = threading.Semaphore(0), threading.Event()
    ended: list[int] = []

    def bring_in(shard: int, place: int, length: int) -> None:
        begun.release()
        goes_on.wait()
        ended.append(place)

    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", 64 << 10)
    monkeypatch.setattr(ahead, "bring_in", bring_in)
    ahead.keep_ahead(0, 0, SIZE)
    for _ in range(read_ahead.THREADS):
        assert begun.acquire(timeout=10)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    while ahead._blocks.qsize() > read_ahead.THREADS:  # what is left then are words to end
        threading.Event().wait(0.001)
    goes_on.set()
    closing.join(10)

    assert not closing.is_alive()
    assert len(ended) == read_ahead.THREADS
    assert not any(thread.name.startswith("read-ahead") for thread in threading.enumerate())


def test_a_filesystem_without_maps_is_read_ahead_the_ordinary_way(
    path: Path, descriptor: int, ahead: ReadAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is asked to read, which every filesystem can do."""
    asked: list[tuple[int, ...]] = []

    def refuse(*arguments: object) -> FileMap:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(read_ahead, "FileMap", refuse)
    monkeypatch.setattr(read_ahead.os, "posix_fadvise", lambda *arguments: asked.append(arguments))

    ahead.bring_in(0, 4096, 100)

    assert asked == [(descriptor, 4096, 100, os.POSIX_FADV_WILLNEED)]


def test_a_file_that_was_cut_short_ends_nobody_and_its_reader_is_told(path: Path) -> None:
    """Where touching its pages would kill the process, the kernel refuses to bring them in."""
    header = read_header(path)
    with OpenShards([header]) as shards:
        os.truncate(path, header.data_start + PAGE_BYTES)
        shards.ahead.bring_in(0, 0, SIZE)

        with pytest.raises(LoadError, match=r"x\.safetensors: changed since it was checked: size"):
            shards.read(0, 0, memoryview(bytearray(SIZE)))
