"""``python -m bench folios``: how the way in which a file got into the page cache decides how quick it is read again.

Each way in turn, several rounds: the file is dropped, brought in, read again by one thread, and mapped. Root sees the
size of its folios as well. On a GPU host (``--gpu``) it is also registered, piece by piece, as the loader does.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.gpu_facts import describe_machine
from bench.raw_disk import bring_in
from remote_agent.loader.filemap import PAGE_BYTES, FileMap

FEWEST = 5
READ_BYTES = 8 << 20
REGISTRATION_BYTES = 64 << 20
COMPOUND_TAIL = 16
"""Bit of ``/proc/kpageflags``; see the kernel's ``Documentation/admin-guide/mm/pagemap.rst``."""

PFN_MASK = (1 << 55) - 1


def main(argv: Sequence[str]) -> int:
    """Measure, print medians with their spread, keep the raw figures; return 0."""
    parser = argparse.ArgumentParser(prog="python -m bench folios", description=__doc__)
    parser.add_argument("--size-mib", type=int, default=1024, help="size of the file (default: 1024)")
    parser.add_argument("--rounds", type=int, default=FEWEST, help=f"rounds, {FEWEST} or more (default: {FEWEST})")
    parser.add_argument("--folder", type=Path, help="where to write the file meanwhile (default: a temporary folder)")
    parser.add_argument("--gpu", action="store_true", help="register the file with a GPU's driver as well")
    parser.add_argument("--out", type=Path, help="file for the raw figures as JSON")
    arguments = parser.parse_args(argv)
    if arguments.rounds < FEWEST or arguments.size_mib < 64:
        parser.error(f"at least {FEWEST} rounds and 64 MiB, or the figures mean nothing")
    register = _registering() if arguments.gpu else None
    figures: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="glowplug-folios-", dir=arguments.folder) as folder:
        path = Path(folder) / "file.bin"
        _write(path, arguments.size_mib << 20)
        for _ in range(arguments.rounds):
            for way, bring_in in WAYS.items():
                figures[way].append(_measure(path, bring_in, register))
    _print(figures)
    if arguments.out:
        document = {"machine": describe_machine(), "size_bytes": arguments.size_mib << 20, "rounds": figures}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _write(path: Path, size_bytes: int) -> None:
    block = random.randbytes(READ_BYTES)
    with path.open("wb", buffering=0) as file:
        for _ in range(size_bytes // READ_BYTES):
            file.write(block)
        os.fsync(file.fileno())


def _measure(path: Path, bring_in: Callable[[int, int], None], register: Any) -> dict[str, float]:
    """Return GB a second of each step, and pages a folio where this process may see them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        figures = {"brought_in": _rate(size, lambda: bring_in(descriptor, size))}
        _read(descriptor, size)  # the host may have to give the guest those pages first
        figures["read"] = _rate(size, lambda: _read(descriptor, size))
        with FileMap(descriptor, size) as content:
            figures["mapped"] = _rate(size, lambda: content.populate(0, size))
            pages = _pages_a_folio(content.address, size)
        if pages is not None:
            figures["pages_a_folio"] = pages
        if register is not None:
            with FileMap(descriptor, size) as content:
                figures["registered"] = _rate(size, lambda: register(content.address, size))
        return figures
    finally:
        os.close(descriptor)


def _rate(size_bytes: int, step: Callable[[], None]) -> float:
    begun = time.perf_counter_ns()
    step()
    return size_bytes / (time.perf_counter_ns() - begun)


def _read(descriptor: int, size_bytes: int) -> None:
    with mmap.mmap(-1, READ_BYTES) as memory, memoryview(memory) as view:
        for offset in range(0, size_bytes, READ_BYTES):
            os.preadv(descriptor, [view], offset)


def _in_threads(work: Callable[[int], None], size_bytes: int, block_bytes: int, count: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        for _ in pool.map(work, range(0, size_bytes, block_bytes)):
            pass


def _by_reading(descriptor: int, size_bytes: int) -> None:
    _read(descriptor, size_bytes)


def _by_advice(descriptor: int, size_bytes: int) -> None:
    block_bytes = 3 << 20

    def work(offset: int) -> None:
        length = min(block_bytes, size_bytes - offset)
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)
        with mmap.mmap(-1, length) as memory, memoryview(memory) as view:
            os.preadv(descriptor, [view], offset)

    _in_threads(work, size_bytes, block_bytes, 16)


def _by_read_ahead(descriptor: int, size_bytes: int) -> None:
    bring_in([descriptor], [size_bytes], threads=8)


WAYS: dict[str, Callable[[int, int], None]] = {
    "read in line": _by_reading,
    "advice, 16 threads": _by_advice,
    "huge pages, 8 threads": _by_read_ahead,
}


def _pages_a_folio(address: int, size_bytes: int) -> float | None:
    """Return how many pages a folio of mapped memory has on average; None where only root may see."""
    count = size_bytes // PAGE_BYTES
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(address // PAGE_BYTES * 8)
            entries = memoryview(file.read(count * 8)).cast("Q")
        folios = 0
        with open("/proc/kpageflags", "rb", buffering=0) as file:
            for entry in entries:
                file.seek((entry & PFN_MASK) * 8)
                folios += not int.from_bytes(file.read(8), "little") >> COMPOUND_TAIL & 1
    except (OSError, ValueError):
        return None
    return count / max(folios, 1)


def _registering() -> Callable[[int, int], None]:
    """Return what registers mapped memory piece by piece, and gives it back. Raises: DeviceError"""
    from remote_agent.devices.cuda import CudaDevice
    from remote_agent.loader.registrations import READ_ONLY

    device = CudaDevice("cuda:0")
    device.initialise()
    device.open_context()

    def register(address: int, size_bytes: int) -> None:
        pieces = range(address, address + size_bytes, REGISTRATION_BYTES)
        for piece in pieces:
            length = min(REGISTRATION_BYTES, address + size_bytes - piece)
            device.runtime("cudaHostRegister", piece, length, READ_ONLY)
        for piece in pieces:
            device.runtime("cudaHostUnregister", piece)

    return register


def _print(figures: dict[str, list[dict[str, float]]]) -> None:
    for way, rounds in figures.items():
        print(f"\n{way}")
        for step in rounds[0]:
            values = sorted(one[step] for one in rounds)
            unit = "" if step == "pages_a_folio" else " GB/s"
            print(f"  {step:<14} {statistics.median(values):7.2f}{unit}  ({values[0]:.2f}-{values[-1]:.2f})")
