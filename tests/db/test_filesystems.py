"""Telling the filesystem of a path from the system's own table."""

from __future__ import annotations

from pathlib import Path

import pytest

from db import filesystems
from db.filesystems import filesystem_kind, network_filesystem, parse_macos_mounts

TABLE = r"""
22 28 0:20 / /proc rw,nosuid - proc proc rw
28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 28 0:40 / /home rw,relatime shared:2 master:1 - nfs4 server:/home rw
31 30 8:2 / /home/ada/local rw - xfs /dev/sdb1 rw
32 28 0:41 / /mnt/with\040space rw - cifs //server/share rw
33 28 0:42 / /mnt/covered rw - nfs server:/x rw
34 33 8:3 / /mnt/covered rw - ext4 /dev/sdc1 rw
35 28 0:43 / /sshfs rw - fuse.sshfs ada@host: rw
36 28 0:44 / /windows rw - fuseblk /dev/sdd1 rw
half a line
"""

EXPECTED = {
    "/var/data": "ext4",
    "/home/ada/.local/share": "nfs4",
    "/home/ada/local/share": "xfs",
    "/home/ada/localized": "nfs4",
    "/homes": "ext4",
    "/mnt/with space/x": "cifs",
    "/mnt/covered/x": "ext4",
    "/sshfs": "fuse.sshfs",
    "/windows/x": "fuseblk",
}


@pytest.fixture
def _table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_text(TABLE, encoding="utf-8")
    monkeypatch.setattr(filesystems, "MOUNTINFO", tmp_path / "mountinfo")


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize(("path", "kind"), EXPECTED.items())
def test_a_path_lies_on_the_innermost_and_latest_mount(path: str, kind: str) -> None:
    """Mounts within mounts, mounts over mounts, spaces and names that only look alike are told apart."""
    assert filesystem_kind(Path(path)) == kind
    assert network_filesystem(Path(path)) == (kind if kind in ("nfs4", "cifs", "fuse.sshfs") else None)


def test_the_systems_own_table_is_understood(tmp_path: Path) -> None:
    """On this machine /proc is a proc, and the tests' folder is local."""
    assert filesystem_kind(Path("/proc/self")) == "proc"
    assert network_filesystem(tmp_path) is None


def test_without_a_table_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells nothing, the path counts as local."""
    monkeypatch.setattr(filesystems, "MOUNTINFO", tmp_path / "absent")

    assert network_filesystem(tmp_path) is None


def test_the_listing_of_macos_is_understood() -> None:
    """Local volumes, network shares and names with spaces and brackets come out with their types."""
    listing = """/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
//ada@server/My%20Share on /Volumes/My Share (smbfs, nodev, nosuid, mounted by ada)
server:/export on /Volumes/x (1) (nfs)
map auto_home on /System/Volumes/Data/home (autofs, automounted, nobrowse)
"""

    assert parse_macos_mounts(listing) == [
        (Path("/"), "apfs"),
        (Path("/Volumes/My Share"), "smbfs"),
        (Path("/Volumes/x (1)"), "nfs"),
        (Path("/System/Volumes/Data/home"), "autofs"),
    ]
