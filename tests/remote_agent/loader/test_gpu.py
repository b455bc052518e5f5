"""On a real GPU: bytes, ring and errors as the fake promises them. Run with ``-m gpu``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from remote_agent.devices import open_device
from remote_agent.devices.cuda import CudaDevice
from remote_agent.errors import DeviceError, LoadError
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.load import load
from remote_agent.loader.ring import PinnedRing
from remote_agent.loader.verify import verify
from remote_agent.loader.views import bytes_of
from remote_agent.protocol.messages import WeightsPolicy
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaDevice]:
    device = open_device("cuda:0")
    assert isinstance(device, CudaDevice)
    device.initialise()
    device.open_context()
    yield device
    device.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two shards of 192 MiB together, the second behind one odd byte."""
    root = tmp_path_factory.mktemp("large")
    write(root / "a.safetensors", serialise([tensor(f"a{number}", "BF16", [16 << 20], number) for number in range(3)]))
    odd = [tensor("odd", "U8", [1]), *(tensor(f"b{number}", "F32", [8 << 20], number + 5) for number in range(3))]
    write(root / "b.safetensors", serialise(odd))
    return inspect(root)


def test_a_large_checkpoint_arrives_byte_for_byte(gpu: CudaDevice, large: Checkpoint) -> None:
    """Many times the ring goes through it, three loads in a row, each equal to the library's."""
    for _ in range(3):
        seen: list[tuple[int, int]] = []
        loaded = load(large, gpu, WeightsPolicy(), progress=lambda done, total, seen=seen: seen.append((done, total)))

        result = verify(large, loaded.tensors)
        assert result.mismatches == ()
        assert result.verified == large.tensors
        assert loaded.path == "staged"
        assert loaded.rate_bytes_s is not None
        assert loaded.ceiling_bytes_s is not None
        assert loaded.counters["odd_tensors"] == 1
        assert seen[-1] == (large.bytes, large.bytes)
        assert all(one.data_ptr() % 512 == 0 for name, one in loaded.tensors.items() if name != "odd")
        del loaded


@pytest.mark.parametrize("offset", range(0, 17, 4))
def test_every_dtype_arrives_byte_for_byte(gpu: CudaDevice, tmp_path: Path, offset: int) -> None:
    """Each dtype that torch has is on the GPU with its bytes, wherever it lay in the file."""
    tensors = [tensor("head", "U8", [offset])]
    for seed, dtype in enumerate(DTYPES, 2):
        tensors += [tensor(dtype, dtype, [3, 4], seed), tensor(f"{dtype}.none", dtype, [0, 7])]
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors, pad=0)))

    loaded = load(checkpoint, gpu, WeightsPolicy(), progress=lambda *_: None)

    for name, _, _, content in tensors:
        assert loaded.tensors[name].is_cuda
        assert bytes(bytes_of(loaded.tensors[name]).tolist()) == content


def test_memory_in_use_on_torchs_stream_is_not_overwritten_early(gpu: CudaDevice, large: Checkpoint) -> None:
    """Memory that torch hands out while its last user still runs is written only behind that user."""
    for _ in range(5):
        held = torch.zeros(large.bytes + 4096, dtype=torch.uint8, device=gpu.torch_device)
        for _ in range(40):
            held.add_(1)
        del held
        loaded = load(large, gpu, WeightsPolicy(), progress=lambda *_: None)
        assert verify(large, loaded.tensors).is_equal


def test_a_load_given_up_leaves_no_thread_and_no_memory(gpu: CudaDevice, large: Checkpoint) -> None:
    """An error in the middle comes out after the last copy, and the next load is whole."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()

    def give_up(done: int, total: int) -> None:
        raise LoadError("enough")

    with pytest.raises(LoadError, match="enough") as caught:
        load(large, gpu, WeightsPolicy(), progress=give_up)

    caught.value.__traceback__ = None
    del caught
    assert not any(thread.name.startswith("staged") for thread in threading.enumerate())
    loaded = load(large, gpu, WeightsPolicy(), progress=lambda *_: None)
    assert verify(large, loaded.tensors).is_equal
    del loaded
    assert torch.cuda.memory_allocated() - before < 16 << 20


def test_more_than_the_gpu_has_is_refused_with_numbers(gpu: CudaDevice, large: Checkpoint) -> None:
    """Memory that is not there is a LoadError with what is needed and what is free."""
    torch.cuda.empty_cache()  # what earlier tests left with torch would be handed out again
    free, _ = gpu.memory()
    held = torch.empty(free - (64 << 20), dtype=torch.uint8, device=gpu.torch_device)

    with pytest.raises(LoadError, match="bytes are needed") as caught:
        load(large, gpu, WeightsPolicy(), progress=lambda *_: None)

    assert caught.value.code == "out_of_memory"
    del held
    torch.cuda.empty_cache()


def test_the_device_names_itself(gpu: CudaDevice) -> None:
    """Facts and memory are the driver's own, and a call that fails is a DeviceError with name and code."""
    facts = gpu.initialise()

    assert str(facts["gpu_uuid"]).startswith(("GPU-", "MIG-"))
    assert facts["gpu_name"]
    free, total = gpu.memory()
    assert 0 < free <= total
    with pytest.raises(DeviceError, match="cudaSetDevice failed: cudaErrorInvalidDevice"):
        gpu.runtime("cudaSetDevice", 4096)


def test_a_ring_gives_its_pinned_memory_back(gpu: CudaDevice) -> None:
    """Rings can be made and closed over and over."""
    for _ in range(20):
        ring = PinnedRing(gpu.runtime, gpu.ordinal)
        assert ring.size_bytes > 0
        ring.close()
        ring.close()
