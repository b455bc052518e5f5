"""A compile cache's directory: checked before the compile stack is pointed at it, listed, and emptied without loss."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, MutableMapping
from pathlib import Path

MIN_FREE_BYTES = 256 << 20
PROBE_BYTES = 1 << 20

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables of the compile stack and the folder of each below the cache directory."""

NOWHERE = dict.fromkeys(VARIABLES, "/proc/self")
"""Until a job says where its caches are. Importing the compile stack makes its directory, by default in $TMPDIR,
where it would stay; this one exists and takes no files."""

ASIDE = "aside"
"""Folder below the cache directory for entries that made a compile fail."""

ARTEFACTS = frozenset({".so", ".o", ".cubin", ".hsaco"})


def find_cache_problem(directory: Path) -> str | None:
    """Say in one line why ``directory`` can't hold a compile cache; None if it can. Creates it.

    What is found here cost others minutes of a start: directories that can't be written, belong to somebody
    else, lie on a filesystem mounted noexec (compiled code then fails to load), or are full or over quota.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (directory, *(entry for entry in directory.iterdir() if entry.is_dir())):
            problem = _find_stranger(folder)
            if problem is not None:
                return problem
        return _find_lack_of_room(directory) or _probe_by_use(directory)
    except OSError as error:
        return f"{directory}: {_explain(error)}"


def use_cache(directory: Path, environment: MutableMapping[str, str]) -> None:
    """Point the compile stack at ``directory``; must come before its first compile."""
    for variable, folder in VARIABLES.items():
        environment[variable] = str(directory / folder)


def list_artefacts(directory: Path) -> dict[str, int]:
    """Return the compiled objects below ``directory``: relative path and size in bytes; what lies aside is none."""
    found: dict[str, int] = {}
    for folder, folders, names in os.walk(directory):
        if Path(folder) == directory and ASIDE in folders:
            folders.remove(ASIDE)
        for name in names:
            path = Path(folder, name)
            if path.suffix in ARTEFACTS:
                try:
                    found[path.relative_to(directory).as_posix()] = path.stat().st_size
                except FileNotFoundError:
                    pass  # a compile in another process made and removed it
    return found


def set_aside(directory: Path, folders: Iterable[str]) -> tuple[str, ...]:
    """Move ``folders`` of the cache out of the compile stack's sight and return those that were there.

    What lay aside from an earlier time gives way. Raises: OSError.
    """
    aside = directory / ASIDE
    aside.mkdir(mode=0o700, exist_ok=True)
    moved = tuple(folder for folder in folders if (directory / folder).is_dir())
    for folder in moved:
        shutil.rmtree(aside / folder, ignore_errors=True)
        (directory / folder).replace(aside / folder)
    return moved


def put_back(directory: Path, folders: Iterable[str]) -> None:
    """Undo `set_aside`; what was put in their place meanwhile is dropped. Raises: OSError."""
    for folder in folders:
        shutil.rmtree(directory / folder, ignore_errors=True)
        (directory / ASIDE / folder).replace(directory / folder)


def _find_stranger(folder: Path) -> str | None:
    """Say who else could put entries there. Raises: OSError"""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{folder}: belongs to uid {status.st_uid}, not to uid {os.geteuid()}; its entries run as code"
    if status.st_mode & stat.S_IWOTH:
        return f"{folder}: everybody may write there (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _find_lack_of_room(directory: Path) -> str | None:
    """Say what a compile would run out of there. Raises: OSError"""
    space = os.statvfs(directory)
    if space.f_files and not space.f_favail:  # some filesystems count none
        return f"{directory}: 0 of its filesystem's {space.f_files} inodes are free, so no file can be made there"
    free = space.f_bavail * space.f_frsize
    if free < MIN_FREE_BYTES:
        return f"{directory}: {free >> 20} MiB free, under the {MIN_FREE_BYTES >> 20} MiB that a compile may need"
    return None


def _probe_by_use(directory: Path) -> str | None:
    """Write a file and map it executable, as a compiled object would be; a quota shows only here."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".glowplug-probe-") as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        try:
            mmap.mmap(file.fileno(), PROBE_BYTES, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        except PermissionError:
            return f"{directory}: is on a filesystem mounted noexec; compiled code can't be loaded from there"
    return None


def _explain(error: OSError) -> str:
    if error.errno == errno.EDQUOT:
        return "the disk quota is used up"
    if error.errno == errno.EEXIST:  # mkdir's word for it, with nothing that could be used there
        return "is a file, or a link that leads nowhere, not a directory"
    return error.strerror or str(error)
