"""Finds the processors on a GPU's own NUMA node, as far as this process may use them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SYSFS = Path("/sys")


def processors_near(bus_id: str, sysfs: Path = SYSFS) -> frozenset[int] | None:
    """Return the processors of the node that ``bus_id`` (``0000:1b:00.0``) hangs on.

    None where that is no choice: one node, an unknown one, or one that this process may not use.
    """
    nodes = list((sysfs / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return None
    try:
        number = int((sysfs / "bus/pci/devices" / bus_id.lower() / "numa_node").read_text())
        listed = (sysfs / f"devices/system/node/node{number}/cpulist").read_text()
        near = frozenset(_parse_list(listed)) & frozenset(os.sched_getaffinity(0))
    except (OSError, ValueError):  # the node is -1 where the firmware does not tell
        return None
    return near or None


def bind_thread(processors: frozenset[int] | None) -> None:
    """Let the calling thread run on ``processors`` alone; nothing for None or where the system refuses."""
    if processors is not None:
        with contextlib.suppress(OSError):  # they were taken from this process meanwhile
            os.sched_setaffinity(0, processors)


@contextlib.contextmanager
def bound_thread(processors: frozenset[int] | None) -> Iterator[None]:
    """Bind the calling thread for a while, so that memory it touches first lies on that node."""
    before = os.sched_getaffinity(0)
    bind_thread(processors)
    try:
        yield
    finally:
        if processors is not None:
            bind_thread(frozenset(before))


def _parse_list(text: str) -> Iterator[int]:
    """Yield the numbers of a list like ``0-3,8,10-11``. Raises: ValueError."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
