"""Maps files read-only and shared, by address, as DMA and ``mincore`` want them; nothing here touches a page.

Touching a page of a file that was cut short kills the process. The kernel is asked instead: it
answers with an error for what can't be brought in.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from types import TracebackType
from typing import Any

MAP_FAILED = ctypes.c_void_p(-1).value
MADV_POPULATE_READ = 22
"""Linux 5.14; ``mmap`` has no name for it."""

MADV_HUGEPAGE = 14

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class FileMap:
    """``length`` bytes from ``offset``, a multiple of the page size, of an open file; unmapped on exit.

    What is brought in through it is cached in huge pages where kernel and filesystem have them. Raises: OSError.
    """

    def __init__(self, descriptor: int, length: int, offset: int = 0) -> None:
        self.length = length
        address = _libc().mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, offset)
        if address is None or address == MAP_FAILED:
            raise _last_error()
        self.address: int = address
        _libc().madvise(address, length, MADV_HUGEPAGE)  # a kernel without huge pages refuses, and brings in small ones

    def __enter__(self) -> FileMap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def expect_random_reads(self) -> None:
        """Have only what is asked for brought in, and nothing ahead of it."""
        _libc().madvise(self.address, self.length, mmap.MADV_RANDOM)

    def populate(self, offset: int, length: int) -> None:
        """Bring in the pages of a range; ``offset`` is a multiple of the page size. Raises: OSError."""
        populate(self.address + offset, length)

    def lock(self, offset: int, length: int) -> None:
        """Bring in the pages of a range and keep them there until they are unmapped; ``offset`` as for `populate`.

        Raises: OSError, also where the file lost a page.
        """
        if _libc().mlock(self.address + offset, length) != 0:
            raise _last_error()

    def count_cached(self, offset: int, length: int) -> int:
        """Return how many pages of a range are in memory, as ``mincore`` says. Raises: OSError."""
        pages = (ctypes.c_ubyte * ((length + PAGE_BYTES - 1) // PAGE_BYTES))()
        if _libc().mincore(self.address + offset, length, pages) != 0:
            raise _last_error()
        return sum(bytes(pages).translate(_LOWEST_BIT))

    def close(self) -> None:
        """Unmap. Safe to call again."""
        length, self.length = self.length, 0
        if length and _libc().munmap(self.address, length) != 0:
            raise _last_error()


def populate(address: int, length: int) -> None:
    """Bring in pages of a map from ``address`` on, a page's beginning; other threads go on. Raises: OSError."""
    if _libc().madvise(address, length, MADV_POPULATE_READ) != 0:
        raise _last_error()


def address_of(content: mmap.mmap) -> int:
    """Return where a map of the standard library lies; it must be writable, or private."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(content))


_LOWEST_BIT = bytes(value & 1 for value in range(256))
"""``mincore`` leaves the other bits undefined."""


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
