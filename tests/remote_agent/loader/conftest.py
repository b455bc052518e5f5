"""What tests of loads onto a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_agent.loader import residency
from remote_agent.loader.checkpoint import Checkpoint, inspect
from tests.remote_agent.fake_cuda import FakeGpu, FakeRuntime
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write
from tests.remote_agent.loader.gpu_loads import RANGE


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of kilobytes have several ranges, as real ones have."""
    monkeypatch.setattr(residency, "RANGE_BYTES", RANGE)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Two shards of some hundred kilobytes, with odd places, in many more segments than there are buffers."""
    first = [tensor("odd", "U8", [3]), tensor("w", "F32", [20_000], 2), tensor("b", "BF16", [77, 3], 3)]
    second = [tensor("v", "BF16", [50_000], 4), tensor("tag", "F16", [0]), tensor("scale", "F32", [], 5)]
    write(tmp_path / "a.safetensors", serialise(first))
    write(tmp_path / "b.safetensors", serialise(second, pad=0))
    return inspect(tmp_path)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    """A GPU whose every object must be given back, and whose rules must be kept."""
    device = FakeGpu(FakeRuntime())
    device.open_context()
    assert device.ring
    yield device
    device.close()
    assert device.fake_runtime.leaks() == []
    assert device.fake_runtime.errors == []
