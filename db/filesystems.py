"""Tells which filesystem a path lies on, and whether SQLite's write-ahead log may be kept there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

NETWORK = re.compile(
    r"""
    nfs\d* | cifs | smb\w* | afpfs | webdav | ncpfs | afs | 9p | ceph | lustre | beegfs(_nodev)? | gpfs | ocfs2 | gfs2
    | glusterfs | davfs\d? | macfuse | osxfuse
    | fuse\.(sshfs|s3fs|s3ql|rclone|glusterfs|ceph(-fuse)?|davfs\d?|gcsfuse|juicefs|mount-s3|goofys)
    """,
    re.VERBOSE,
)


def network_filesystem(path: Path) -> str | None:
    """Return the name of the network filesystem that ``path`` lies on; None when it is local or can't be told.

    ``path`` need not exist; its nearest existing folder counts.
    """
    kind = filesystem_kind(path)
    return kind if kind is not None and NETWORK.fullmatch(kind) else None


def filesystem_kind(path: Path) -> str | None:
    """Return the type of the filesystem that ``path`` lies on, as the system names it."""
    mounts = _mounts_macos() if sys.platform == "darwin" else _mounts_linux()
    resolved = path.resolve()
    best: tuple[int, str] | None = None
    for mount_point, kind in mounts:
        length = len(mount_point.parts)
        if (best is None or length >= best[0]) and resolved.is_relative_to(mount_point):
            best = (length, kind)
    return best[1] if best else None


def _mounts_linux() -> list[tuple[Path, str]]:
    """Read mount points and types in mount order (the later one covers). Format: proc(5), mountinfo."""
    try:
        text = MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if separator and len(fields) > 4 and after:
            mounts.append((Path(_unescape(fields[4])), after.split(" ")[0]))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _mounts_macos() -> list[tuple[Path, str]]:
    try:
        listing = subprocess.run(["/sbin/mount"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_macos_mounts(listing)


def parse_macos_mounts(listing: str) -> list[tuple[Path, str]]:
    """Return mount points and types from lines like ``//u@h/share on /Volumes/share (smbfs, nodev)``."""
    found = re.findall(r"^.*? on (/.*) \((\w+)[^()]*\)$", listing, re.MULTILINE)
    return [(Path(mount_point), kind) for mount_point, kind in found]
