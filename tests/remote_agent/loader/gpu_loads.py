"""Loads onto a fake GPU, told what is cached, and what such a load left behind."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.loader import route
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.headers import Header
from remote_agent.loader.load import Loaded, load
from remote_agent.loader.residency import RangeResidency
from remote_agent.protocol.messages import WeightsPolicy
from tests.remote_agent.fake_cuda import FakeGpu

PATHS = ("auto", "mapped", "staged", "direct")
RANGE = 16384


def load_by(
    gpu: FakeGpu,
    checkpoint: Checkpoint,
    path: str = "auto",
    page_cache: str = "keep",
    progress: Callable[[int, int], None] = lambda done, total: None,
    announce: Callable[[Path], None] = lambda path: None,
) -> Loaded:
    policy = WeightsPolicy(path=path, page_cache=page_cache)  # type: ignore[arg-type]
    return load(checkpoint, gpu, policy, progress=progress, announce=announce)


def tell(monkeypatch: pytest.MonkeyPatch, is_cached: Callable[[int], bool]) -> None:
    """Let a load believe that ranges of each file are cached or not, by their number."""

    def measure(header: Header, descriptor: int) -> RangeResidency:
        count = -(-header.size_bytes // RANGE)
        return RangeResidency(tuple(float(is_cached(number)) for number in range(count)), "told")

    monkeypatch.setattr(route, "measure_ranges", measure)


def traces_of(checkpoint: Checkpoint) -> list[str]:
    """Return what a load left: threads, maps, descriptors and locks of the shards."""
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("load-")]
    names = {str(header.path) for header in checkpoint.shards}
    left += [line for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[-1] in names]
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and str(entry.readlink()) in names:
            left.append(str(entry.readlink()))
    for name in names:
        with open(name, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return left
