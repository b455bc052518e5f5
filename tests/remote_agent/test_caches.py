"""A compile cache's directory is tried before it is used."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from remote_agent import caches


def test_a_directory_is_made_and_found_usable(tmp_path: Path) -> None:
    """It is private, and the probe leaves nothing there."""
    directory = tmp_path / "a" / "b"

    assert caches.find_cache_problem(directory) is None
    assert directory.stat().st_mode & 0o077 == 0
    assert list(directory.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """The line has the path and says what it is; so has that of a link that leads nowhere."""
    blocked, dangling = tmp_path / "file", tmp_path / "link"
    blocked.touch()
    dangling.symlink_to(tmp_path / "nowhere")

    assert caches.find_cache_problem(blocked / "cache") == f"{blocked / 'cache'}: Not a directory"
    for path in (blocked, dangling):
        assert caches.find_cache_problem(path) == f"{path}: is a file, or a link that leads nowhere, not a directory"


def test_a_directory_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    """Entries of a compile cache run as code."""
    tmp_path.chmod(0o777)

    assert "everybody may write" in str(caches.find_cache_problem(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """So can its owner, whoever asks."""
    os.chown(tmp_path, 4321, -1)

    assert "belongs to uid 4321" in str(caches.find_cache_problem(tmp_path))


@pytest.mark.parametrize("folder", ["functions", "inductor"])
def test_a_folder_of_the_cache_that_others_may_write_is_refused(tmp_path: Path, folder: str) -> None:
    """A cache that was copied with its owners, or opened to all, is somebody else's code too."""
    below = tmp_path / folder
    below.mkdir()
    assert caches.find_cache_problem(tmp_path) is None

    below.chmod(0o777)
    assert caches.find_cache_problem(tmp_path) == f"{below}: everybody may write there (mode 777)"
    if os.geteuid() == 0:
        below.chmod(0o755)
        os.chown(below, 4321, -1)
        assert f"{below}: belongs to uid 4321" in str(caches.find_cache_problem(tmp_path))


def test_a_full_disk_is_refused_with_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before a compile runs for minutes and then can't be kept."""
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = (17 << 20) // real.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))

    assert "17 MiB free, under the 256 MiB" in str(caches.find_cache_problem(tmp_path))


def test_a_filesystem_without_inodes_is_refused_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are free all the same, and are not said to be missing; where none are counted none are missing."""
    fields = list(os.statvfs(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    fields[5:8] = 4096, 3, 0
    problem = str(caches.find_cache_problem(tmp_path))
    assert problem == f"{tmp_path}: 0 of its filesystem's 4096 inodes are free, so no file can be made there"

    fields[5:8] = 0, 0, 0
    assert caches.find_cache_problem(tmp_path) is None


def test_a_used_up_quota_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows only when something is written."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(caches.tempfile, "NamedTemporaryFile", refuse)

    assert caches.find_cache_problem(tmp_path) == f"{tmp_path}: the disk quota is used up"


def test_a_filesystem_mounted_noexec_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses an executable mapping there with EPERM."""

    def refuse(*args: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(mmap, "mmap", refuse)

    assert "mounted noexec" in str(caches.find_cache_problem(tmp_path))


def test_every_variable_points_below_the_directory(tmp_path: Path) -> None:
    """The compile stack keeps nothing elsewhere."""
    environment: dict[str, str] = {}

    caches.use_cache(tmp_path, environment)

    assert set(environment) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    assert {Path(value).parent for value in environment.values()} == {tmp_path}


def write_file(path: Path, content: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_compiled_objects_are_listed_with_their_sizes(tmp_path: Path) -> None:
    """At any depth, and nothing else; what lies aside is out of use."""
    write_file(tmp_path / "x" / "one.so", b"abc")
    for name in ("x/y/two.cubin", "x/source.cpp", "lock", "aside/x/old.so", "x/aside/three.so"):
        write_file(tmp_path / name)

    assert caches.list_artefacts(tmp_path) == {"x/one.so": 3, "x/y/two.cubin": 0, "x/aside/three.so": 0}
    assert caches.list_artefacts(tmp_path / "absent") == {}


def test_entries_set_aside_are_out_of_sight_and_come_back(tmp_path: Path) -> None:
    """What was put in their place meanwhile gives way, and other folders are left alone."""
    for name in ("inductor/old.so", "records/one.json"):
        write_file(tmp_path / name)

    moved = caches.set_aside(tmp_path, ("inductor", "triton"))

    assert moved == ("inductor",)
    assert caches.list_artefacts(tmp_path) == {}
    write_file(tmp_path / "inductor" / "new.so")
    caches.put_back(tmp_path, moved)
    assert caches.list_artefacts(tmp_path) == {"inductor/old.so": 0}
    assert (tmp_path / "records" / "one.json").exists()


def test_only_the_last_entries_set_aside_are_kept(tmp_path: Path) -> None:
    """A cache that goes bad again and again does not fill the disk."""
    for name in ("first.so", "second.so"):
        write_file(tmp_path / "inductor" / name)
        caches.set_aside(tmp_path, ("inductor",))

    assert [path.name for path in (tmp_path / "aside" / "inductor").iterdir()] == ["second.so"]
