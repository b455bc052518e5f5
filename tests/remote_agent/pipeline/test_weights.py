"""Stage ``weights`` where the weights are to outlive their worker: on a CPU, and on the fake driver's GPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_agent.devices.cpu import CpuDevice
from remote_agent.errors import DeviceError
from remote_agent.loader.checkpoint import inspect
from remote_agent.pipeline.keeping import Backing
from remote_agent.pipeline.timing import Measure
from remote_agent.pipeline.weights import Weights, load_weights
from remote_agent.protocol.messages import ModelSource, Recipe
from remote_agent.resident.gpu_range import GpuPlace
from tests.remote_agent import checkpoints
from tests.remote_agent.fake_cuda import FakeGpu
from tests.remote_agent.loader.gpu_loads import traces_of


def load(folder: Path, device: Any, tier: str) -> tuple[Weights, Measure]:
    measure = Measure(0)
    recipe = Recipe("tiny", ModelSource(str(folder)), devices=(device.name,), target_tier=tier)  # type: ignore[arg-type]
    return load_weights(recipe, device, (), measure, lambda done, total: None), measure


def equal(found: Weights, folder: Path) -> bool:
    expected = checkpoints.read_tensors(folder)
    return found.tensors.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in found.tensors.items()
    )


def test_what_a_load_leaves_behind_is_waited_for_later(llama: Path, gpu: FakeGpu) -> None:
    """Registrations stay until it is said that there is time, and the rehearsal says how long it took."""
    gpu.memory = lambda: (1 << 40, 1 << 40)  # type: ignore[method-assign]
    found, measure = load(llama, gpu, "standby")

    assert measure.extra["mapped_bytes"]
    assert gpu.fake_runtime.registered
    found.settle()
    assert not gpu.fake_runtime.registered
    assert traces_of(inspect(llama)) == []
    assert measure.extra["rehearsal_ns"]


@pytest.mark.parametrize("tier", ["resident", "standby"])
def test_a_gpu_s_weights_lie_in_memory_that_outlives_the_worker(llama: Path, gpu: FakeGpu, tier: str) -> None:
    """Both tiers can leave them with the keeper; all of it is given back with the last tensor."""
    found, measure = load(llama, gpu, tier)

    assert equal(found, llama)
    assert found.backing.keepable is not None
    assert found.backing.size_bytes == found.backing.keepable.memory.size_bytes
    assert measure.reason is None
    del found
    gc.collect()
    assert gpu.fake_driver.vmm_leaks() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"supports_descriptors": False}, "no memory behind descriptors"),
        ({"free_bytes": 0}, "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"),
        ({"fail_at": "cuMemSetAccess"}, "cuMemSetAccess failed: CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_a_gpu_that_cannot_share_loads_as_before_and_says_why(
    llama: Path, gpu: FakeGpu, change: dict[str, Any], words: str
) -> None:
    """MIG, an old driver, no room: ordinary memory, every byte right, and a named reason."""
    for name, value in change.items():
        setattr(gpu.fake_driver, name, value)
    found, measure = load(llama, gpu, "resident")

    assert equal(found, llama)
    assert found.backing.keepable is None
    assert words in (found.backing.problem or "")
    assert (measure.reason or "").startswith("not shared: ")
    assert gpu.fake_driver.vmm_leaks() == []


def test_memory_that_cannot_be_sealed_is_not_handed_on(
    llama: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load stands; nobody else is given what could still be written."""

    def refuse(place: GpuPlace, size_bytes: int) -> None:
        raise DeviceError("cuMemSetAccess failed: CUDA_ERROR_NOT_SUPPORTED (801)")

    monkeypatch.setattr(GpuPlace, "make_read_only", refuse)
    found, _ = load(llama, gpu, "resident")

    assert equal(found, llama)
    problem = "cuMemSetAccess failed: CUDA_ERROR_NOT_SUPPORTED (801)"
    assert found.backing == Backing(problem=problem, range=found.backing.range)


def test_a_cpu_s_standby_stays_with_the_files(llama: Path) -> None:
    """Views of the page cache need no second copy; a resident has one, which nothing can write any more."""
    standby, measure = load(llama, CpuDevice(), "standby")
    resident, _ = load(llama, CpuDevice(), "resident")

    assert (standby.backing.keepable, measure.path) == (None, "mapped")
    assert equal(standby, llama)
    assert equal(resident, llama)
    assert resident.backing.keepable is not None
