"""For the tests of stages: a small checkpoint and a GPU with its context open."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remote_agent import checkpoints
from tests.remote_agent.fake_cuda import FakeGpu, FakeRuntime


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def gpu() -> FakeGpu:
    gpu = FakeGpu(FakeRuntime())
    gpu.initialise()
    gpu.open_context()
    return gpu
