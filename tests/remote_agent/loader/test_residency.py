"""What lies in the page cache is told without reading it, and whoever can't be asked says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remote_agent.loader import residency
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.headers import read_header
from remote_agent.loader.residency import measure_residency
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write

SIZE = 8 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.safetensors", serialise([tensor("w", "U8", [SIZE])]))


def drop_from_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def test_cached_bytes_follow_the_page_cache(path: Path) -> None:
    """A file just written is cached whole; dropped, it is not; half read, it is about half."""
    header = read_header(path)
    assert measure_residency([header]).cached_bytes == SIZE

    drop_from_cache(path)
    dropped = measure_residency([header])
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(descriptor, SIZE // 2, 0)
    os.close(descriptor)
    half = measure_residency([header])

    if filesystem_of(path) in ("tmpfs", "ramfs"):
        pytest.skip("nothing can be dropped from a filesystem that is the page cache")
    assert dropped.how == "mincore"
    assert dropped.cached_bytes is not None
    assert dropped.cached_bytes < SIZE // 8
    assert half.cached_bytes is not None
    assert SIZE // 4 < half.cached_bytes < SIZE


def test_windows_of_a_large_file_are_summed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file larger than one window is counted in parts, each page once."""
    monkeypatch.setattr(residency, "WINDOW_BYTES", 1 << 16)

    assert measure_residency([read_header(path)]).cached_bytes == SIZE


def test_pages_are_probed_where_maps_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mmap is refused single pages are asked for, and the reason names filesystem and refusal."""

    def refuse(*arguments: object) -> int:
        raise OSError(19, os.strerror(19))

    monkeypatch.setattr(residency, "_mincore", refuse)
    header = read_header(path)

    found = measure_residency([header])

    assert (found.cached_bytes, found.how) == (SIZE, "probes")
    assert found.reason == f"mmap refused on {filesystem_of(path)}: No such device (errno 19)"
    if filesystem_of(path) not in ("tmpfs", "ramfs"):
        drop_from_cache(path)
        dropped = measure_residency([header])
        assert dropped.cached_bytes is not None
        assert dropped.cached_bytes < SIZE


def test_a_mincore_that_knows_nothing_is_not_believed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some control groups show no page of a file that is cached: where reads find pages at once, they count."""
    monkeypatch.setattr(residency, "_mincore", lambda *arguments: 0)

    found = measure_residency([read_header(path)])

    assert (found.cached_bytes, found.how) == (SIZE, "probes")
    assert "mincore says that nothing is cached" in str(found.reason)


def test_what_cannot_be_told_is_unknown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither map nor probe is possible the answer is None with both reasons, never 0."""

    def refuse(*arguments: object) -> int:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(residency, "_mincore", refuse)
    monkeypatch.setattr("remote_agent.loader.residency.os.preadv", refuse)

    found = measure_residency([read_header(path)])

    assert (found.cached_bytes, found.how) == (None, "unknown")
    assert "cached pages can't be asked for" in str(found.reason)


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
