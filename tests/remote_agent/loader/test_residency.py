"""What lies in the page cache is told without reading it, and whoever can't be asked says so."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from remote_agent.loader import residency
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.headers import read_header
from remote_agent.loader.residency import RANGE_BYTES, RangeResidency, measure_ranges, measure_residency
from tests.remote_agent.loader.caches_by_hand import drop_from_cache
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write

SIZE = 8 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.safetensors", serialise([tensor("w", "U8", [SIZE])]))


def refuse(number: int) -> Callable[..., int]:
    def call(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def know_nothing(descriptor: int, ranges: Sequence[tuple[int, int]]) -> list[float]:
    return [0.0] * len(ranges)


@pytest.fixture
def no_cachestat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel older than 6.5."""
    monkeypatch.setattr(residency, "_cachestat", refuse(errno.ENOSYS))


def read_half(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(descriptor, SIZE // 2, 0)
    os.close(descriptor)


@pytest.mark.parametrize("way", ["cachestat", "mincore"])
def test_cached_bytes_follow_the_page_cache(path: Path, request: pytest.FixtureRequest, way: str) -> None:
    """A file just written is cached whole; dropped, it is not; half read, it is about half."""
    if way == "mincore":
        request.getfixturevalue("no_cachestat")
    header = read_header(path)
    written = measure_residency([header])
    drop_from_cache(path)
    dropped = measure_residency([header])
    read_half(path)
    half = measure_residency([header])

    if written.how != way:
        pytest.skip("this kernel has no cachestat")
    assert (written.cached_bytes, half.how) == (SIZE, way)
    assert dropped.cached_bytes is not None
    assert dropped.cached_bytes < SIZE // 8
    assert half.cached_bytes is not None
    assert SIZE // 4 < half.cached_bytes < SIZE


@pytest.mark.parametrize("way", ["cachestat", "mincore", "probes"])
def test_ranges_are_told_apart(
    path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, way: str
) -> None:
    """Of a file whose middle was dropped the ranges before and behind it are cached, and a load is told so."""
    monkeypatch.setattr(residency, "RANGE_BYTES", 1 << 20)
    if way != "cachestat":
        request.getfixturevalue("no_cachestat")
    if way == "probes":
        monkeypatch.setattr(residency, "_sampled_mincore", refuse(errno.ENODEV))
    drop_from_cache(path)
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(descriptor, 2 << 20, 0)
    os.pread(descriptor, 3 << 20, 5 << 20)

    found = measure_ranges(read_header(path), descriptor)
    os.close(descriptor)

    if way == "cachestat" and found.how != way:
        pytest.skip("this kernel has no cachestat")
    assert found.how == way
    assert [share > 0.9 for share in found.shares[:8]] == [True, True, False, False, False, True, True, True]
    assert found.is_cached(0, 2 << 20)
    assert not found.is_cached(1 << 20, (1 << 20) + 1)
    assert found.is_cached((5 << 20) + 7, 100)
    assert not found.is_whole


def test_windows_of_a_large_range_are_summed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range larger than one window is counted in parts, each page once."""
    monkeypatch.setattr(residency, "WINDOW_BYTES", 1 << 16)
    descriptor = os.open(path, os.O_RDONLY)

    assert residency._mincore(descriptor, [(5, SIZE - 5)]) == [1.0]
    os.close(descriptor)


@pytest.mark.usefixtures("no_cachestat")
def test_pages_are_probed_where_maps_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mmap is refused single pages are asked for, and the reason names filesystem and refusal."""
    monkeypatch.setattr(residency, "_mincore", refuse(errno.ENODEV))
    header = read_header(path)

    found = measure_residency([header])

    assert (found.cached_bytes, found.how) == (SIZE, "probes")
    assert f"mmap refused on {filesystem_of(path)}: No such device (errno 19)" in str(found.reason)
    drop_from_cache(path)
    dropped = measure_residency([header])
    assert dropped.cached_bytes is not None
    assert dropped.cached_bytes < SIZE


def test_answers_that_know_nothing_are_not_believed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An overlay's cachestat, or some control groups' mincore, shows no page: where reads find some, they count."""
    monkeypatch.setattr(residency, "filesystem_of", lambda path: "overlay")
    for way in ("_cachestat", "_mincore", "_sampled_mincore"):
        monkeypatch.setattr(residency, way, know_nothing)
    header = read_header(path)

    found = measure_residency([header])
    descriptor = os.open(path, os.O_RDONLY)
    ranges = measure_ranges(header, descriptor)
    os.close(descriptor)

    assert (found.cached_bytes, found.how) == (SIZE, "probes")
    assert found.reason == "cachestat says that nothing is cached; mincore says that nothing is cached"
    assert (set(ranges.shares), ranges.how) == ({1.0}, "probes")


@pytest.mark.usefixtures("no_cachestat")
def test_what_cannot_be_told_is_unknown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be asked the answer is None with every reason, never 0; a load takes it as not cached."""
    monkeypatch.setattr(residency, "_mincore", refuse(errno.EOPNOTSUPP))
    monkeypatch.setattr(residency, "_sampled_mincore", refuse(errno.EOPNOTSUPP))
    monkeypatch.setattr("remote_agent.loader.residency.os.preadv", refuse(errno.EOPNOTSUPP))
    header = read_header(path)

    found = measure_residency([header])
    descriptor = os.open(path, os.O_RDONLY)
    ranges = measure_ranges(header, descriptor)
    os.close(descriptor)

    assert (found.cached_bytes, found.how) == (None, "unknown")
    assert "Function not implemented" in str(found.reason)
    assert "cached pages can't be asked for" in str(found.reason)
    assert (ranges.how, set(ranges.shares)) == ("unknown", {0.0})


@pytest.mark.usefixtures("no_cachestat")
@pytest.mark.parametrize(("taken_ns", "share"), [(2_000, 1.0), (80_000, 0.0)])
def test_a_load_times_reads_where_nothing_else_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, taken_ns: int, share: float
) -> None:
    """On a filesystem without maps and probes a quick read is a cached one; preflight does not read."""
    clock = iter(range(0, 1 << 40, taken_ns))
    real = os.preadv

    def plain_reads_only(descriptor: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(residency, "_sampled_mincore", refuse(errno.ENODEV))
    monkeypatch.setattr(residency, "_mincore", refuse(errno.ENODEV))
    monkeypatch.setattr("remote_agent.loader.residency.os.preadv", plain_reads_only)
    monkeypatch.setattr("remote_agent.loader.residency.time.perf_counter_ns", lambda: next(clock))
    header = read_header(path)
    descriptor = os.open(path, os.O_RDONLY)

    found = measure_ranges(header, descriptor)
    os.close(descriptor)

    assert (found.how, set(found.shares)) == ("timed", {share})
    assert measure_residency([header]).how == "unknown"


@pytest.mark.usefixtures("no_cachestat")
def test_files_of_others_are_probed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel calls every page of a file one neither owns nor may write cached: it is not asked."""
    monkeypatch.setattr("remote_agent.loader.residency.os.geteuid", lambda: 12345)
    monkeypatch.setattr("remote_agent.loader.residency.os.access", lambda *arguments: False)

    assert measure_residency([read_header(path)]).how == "probes"


def test_a_checkpoint_without_bytes_has_none_cached(tmp_path: Path) -> None:
    """No bytes are no division and no map."""
    header = read_header(write(tmp_path / "x.safetensors", serialise([])))

    assert measure_residency([header]).cached_bytes == 0


MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
40 22 0:35 / /mnt/my\\040pool rw - fuse.mergerfs pool rw
41 22 {device} / /somewhere rw shared:9 - xfs /dev/sdb rw
"""


def test_a_filesystem_is_found_by_its_device(tmp_path: Path) -> None:
    """The mount whose device number is the file's names the filesystem; escapes in names are undone."""
    number = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(device=f"{os.major(number)}:{os.minor(number)}"))
    assert filesystem_of(tmp_path, mounts) == "xfs"

    mounts.write_text(MOUNTS.format(device="0:0"))
    assert filesystem_of(tmp_path, mounts) == "ext4"
    mounts.write_text("nonsense\n")
    assert filesystem_of(tmp_path, mounts) == "unknown"
    assert filesystem_of(tmp_path / "gone", mounts) == "unknown"


def test_only_a_count_of_every_page_says_that_every_page_is_there() -> None:
    """Samples, probes and a share that is nearly the whole say no."""
    counted = RangeResidency((1.0, 0.999, 1.0), "cachestat")

    assert counted.has_every_page(0, RANGE_BYTES)
    assert counted.has_every_page(2 * RANGE_BYTES, 1)
    assert not counted.has_every_page(RANGE_BYTES - 1, 2)
    assert not counted.has_every_page(0, 3 * RANGE_BYTES)
    for how in ("mincore", "probes", "timed", "unknown"):
        assert not RangeResidency((1.0,), how).has_every_page(0, 1)
