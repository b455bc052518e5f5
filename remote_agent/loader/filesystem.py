"""Names the filesystem under a path, for messages and for what it is known to do."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

WITH_OWN_PAGES = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "erofs", "squashfs", "tmpfs", "ramfs")
)
"""Local filesystems whose files' cached pages are their own."""

LOCAL = WITH_OWN_PAGES | {"overlay"}
"""An overlay's files are another filesystem's, and so are their pages."""


def filesystem_of(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the filesystem that holds ``path`` (``ext4``, ``nfs4``, ``fuse.mergerfs``), or ``unknown``."""
    try:
        device = os.stat(path).st_dev  # noqa: PTH116 - a path that can't be resolved is no error here
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        real = os.path.realpath(path)
    except (OSError, ValueError):
        return "unknown"
    wanted = f"{os.major(device)}:{os.minor(device)}"
    longest = (-1, "unknown")
    for line in lines:
        before, _, after = line.partition(" - ")
        words = before.split()
        if len(words) < 5 or not after:
            continue
        if words[2] == wanted:
            return after.split()[0]
        mount = _unescaped(words[4])
        if real == mount or real.startswith(mount.rstrip("/") + "/"):
            longest = max(longest, (len(mount), after.split()[0]))
    return longest[1]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
