"""A disk that is full until room is made: a small tmpfs where that may be mounted, else a limit on file sizes."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SmallDisk:
    """``fill()`` leaves no room in ``folder``; ``make_room()`` gives it back."""

    folder: Path
    fill: Callable[[], None]
    make_room: Callable[[], None]


@contextlib.contextmanager
def small_disk(folder: Path, kind: str) -> Iterator[SmallDisk]:
    """Yield a `SmallDisk` of kind ``tmpfs`` or ``limit``; without the right to mount, a ``limit`` either way."""
    folder.mkdir()
    if kind == "tmpfs" and _mount(folder):
        try:
            yield SmallDisk(folder, lambda: _fill_up(folder), (folder / "ballast").unlink)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield SmallDisk(
            folder,
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard)),
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _fill_up(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
