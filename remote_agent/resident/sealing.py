"""Seals of memory behind a descriptor: fcntl(2), "File Sealing"."""

from __future__ import annotations

import errno
import fcntl

F_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1; ``fcntl`` has no name for it. Maps that are writable already stay so."""

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def seal_content(descriptor: int) -> None:
    """Let nobody change it any more; nobody may have it mapped writable. Raises: OSError"""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)


def seal_future(descriptor: int) -> None:
    """Let nobody change its size, or write but through maps that exist. Raises: OSError

    Before Linux 5.1 the size alone is sealed: there a read-only descriptor is all that keeps others from writing.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)


def has_fixed_size(descriptor: int) -> bool:
    """Whether it can't be cut short under whoever has it mapped. Raises: OSError if it can't be sealed at all"""
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SIZE_SEALS == SIZE_SEALS
