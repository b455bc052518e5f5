"""Shared memory, on a CPU and on the fake driver's GPU alike: written once, mapped by anybody, gone with the last."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Union

import pytest
import torch

from remote_agent.devices import open_device
from remote_agent.devices.base import Device
from remote_agent.devices.cpu import CpuDevice
from remote_agent.errors import DeviceError, ResidentLostError
from remote_agent.resident import host_memory
from tests.remote_agent.agentd.agents import REPOSITORY
from tests.remote_agent.fake_cuda import FakeGpu, FakeRuntime
from tests.remote_agent.fake_vmm import GRANULARITY_BYTES
from tests.remote_agent.keeper.keepers import someone_else

AnyDevice = Union[CpuDevice, FakeGpu]
SIZE = 3 * GRANULARITY_BYTES - 100


@pytest.fixture(params=["cpu", "fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    """Return a device whose context is open."""
    device: Device = FakeGpu(FakeRuntime()) if request.param == "fake" else open_device(request.param)
    device.initialise()
    device.open_context()
    return device


def nothing() -> None:
    pass


def pattern(size: int) -> torch.Tensor:
    return (torch.arange(size) % 251).to(torch.uint8)


def write_and_export(device: Device, size: int = SIZE) -> tuple[int, int]:
    """Return a descriptor of sealed memory with the pattern in it, whose maker has gone, and its size."""
    memory = device.share(size)
    memory.tensor.copy_(pattern(memory.size_bytes))
    device.synchronise()
    memory.seal()
    descriptor = memory.export()
    memory.close()
    return descriptor, memory.size_bytes


def open_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:")


def test_memory_outlives_who_made_it_and_is_mapped_by_several(device: Device) -> None:
    """Each sees the bytes that were written; when the last map has gone, nothing is left."""
    descriptor, size = write_and_export(device)
    gc.collect()
    assert open_maps() == 0
    gone: list[int] = []
    first = device.map_shared(descriptor, size, lambda: gone.append(1))
    second = device.map_shared(descriptor, size, lambda: gone.append(2))
    os.close(descriptor)

    assert size >= SIZE
    assert first.device.type == device.torch_device.type
    assert torch.equal(first.cpu(), pattern(size))
    view = second[100:200]
    del second, first
    gc.collect()
    assert gone == [1]
    assert torch.equal(view.cpu(), pattern(size)[100:200])
    del view
    gc.collect()
    assert gone == [1, 2]
    assert open_maps() == 0
    if isinstance(device, FakeGpu):
        assert device.fake_driver.vmm_leaks() == []


def test_what_is_mapped_twice_is_the_same_memory(device: Device) -> None:
    """It is shared, not copied: what the maker writes before it seals is there for who mapped it already."""
    memory = device.share(SIZE)
    descriptor = memory.export()
    memory.seal()

    assert memory.tensor.data_ptr() % 512 == 0
    tensor = device.map_shared(descriptor, memory.size_bytes, nothing)
    assert tensor.data_ptr() != memory.tensor.data_ptr()
    os.close(descriptor)
    memory.close()


def test_no_warning_leaks_out(device: Device) -> None:
    """Torch warns of buffers that can't be written; whoever attaches hears nothing of it."""
    descriptor, size = write_and_export(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.map_shared(descriptor, size, nothing)

    os.close(descriptor)


WRITER = """
import sys
import torch
from tests.remote_agent.resident import test_memory
device = test_memory.device_called(sys.argv[1])
memory = device.share(1 << 16)
descriptor = memory.export()
memory.seal()
tensor = memory.tensor if sys.argv[2] == "own" else device.map_shared(descriptor, memory.size_bytes, lambda: None)
print(int(tensor[0]), flush=True)
tensor[0] = 1
print("written", flush=True)
"""


def device_called(name: str) -> Device:
    device: Device = FakeGpu(FakeRuntime()) if name == "fake" else open_device(name)
    device.initialise()
    device.open_context()
    return device


@pytest.mark.parametrize("name", ["cpu", "fake"])
@pytest.mark.parametrize("whose", ["own", "mapped"])
def test_a_write_after_the_seal_ends_who_writes(name: str, whose: str) -> None:
    """The rail: neither the loader's own map nor an attacher's can change what others read."""
    done = subprocess.run(
        [sys.executable, "-c", WRITER, name, whose], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )

    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stdout == "0\n"


def test_a_descriptor_of_the_cpu_can_be_neither_written_nor_cut_short() -> None:
    """Whoever gets it from the keeper can't spoil it for others, by whichever call."""
    descriptor, size = write_and_export(CpuDevice())
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)

    acts: list[Callable[[], object]] = [
        lambda: os.write(descriptor, b"x"),
        lambda: os.write(again, b"x"),
        lambda: os.ftruncate(again, 0),
        lambda: os.ftruncate(again, 2 * size),
        lambda: __import__("mmap").mmap(again, size),
    ]
    for act in acts:
        with pytest.raises(OSError, match=r"not permitted|Bad file descriptor|denied"):
            act()
    os.close(again)
    os.close(descriptor)


def test_another_user_who_is_lent_the_cpu_s_memory_opens_it_to_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before Linux 5.1, where no seal keeps a descriptor opened anew from writing."""
    monkeypatch.setattr(host_memory, "seal_future", lambda descriptor: None)
    descriptor, _ = write_and_export(CpuDevice())

    with someone_else():
        with pytest.raises(PermissionError):
            os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        assert os.pread(descriptor, 4, 0) == bytes(range(4))
    os.close(descriptor)


def test_memory_that_is_not_what_it_should_be_is_lost(device: Device) -> None:
    """Too short, not sealed or no such memory at all: one error, which says which, and the map is not made."""
    descriptor, size = write_and_export(device)
    with pytest.raises(ResidentLostError):
        device.map_shared(descriptor, 2 * size, nothing)
    os.close(descriptor)
    plain = os.memfd_create("plain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(plain, size)
    with pytest.raises(ResidentLostError):
        device.map_shared(plain, size, nothing)
    os.close(plain)

    assert open_maps() == 0


def test_more_than_there_is_is_an_error_and_not_a_death() -> None:
    """What can't be had is refused before a byte is written, on the host by what it says is free."""
    with pytest.raises(DeviceError, match="bytes of shared memory can't be had") as caught:
        CpuDevice().share(1 << 60)
    assert caught.value.code == "out_of_memory"
    gpu = FakeGpu(FakeRuntime())
    gpu.initialise()
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        gpu.share(2 << 30)

    assert gpu.fake_driver.vmm_leaks() == []


@pytest.mark.parametrize(
    "call",
    ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"],
)
def test_a_call_that_fails_leaves_nothing_behind(call: str) -> None:
    """Whatever was done before it is undone, and the call is named."""
    gpu = FakeGpu(FakeRuntime())
    gpu.initialise()
    gpu.fake_driver.fail_at = call

    with pytest.raises(DeviceError, match=f"{call} failed: CUDA_ERROR_INVALID_VALUE"):
        gpu.share(SIZE)
    assert gpu.fake_driver.vmm_leaks() == []


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemSetAccess"])
def test_what_one_process_can_not_map_is_not_lost_to_others(call: str) -> None:
    """A context that is sick, or short of addresses, says nothing of memory that the keeper must go on holding."""
    gpu = FakeGpu(FakeRuntime())
    gpu.initialise()
    descriptor, size = write_and_export(gpu)
    gpu.fake_driver.fail_at = call

    with pytest.raises(DeviceError, match=f"{call} failed"):
        gpu.map_shared(descriptor, size, nothing)
    gpu.fake_driver.fail_at = None
    assert gpu.map_shared(descriptor, size, nothing).numel() == size
    os.close(descriptor)


def test_memory_is_given_back_in_the_driver_s_order() -> None:
    """Unmapped first, then the addresses, then the handle."""
    gpu = FakeGpu(FakeRuntime())
    gpu.initialise()
    memory = gpu.share(SIZE)
    del memory
    gc.collect()

    assert gpu.fake_driver.vmm_calls[-3:] == ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]
    assert gpu.fake_driver.vmm_leaks() == []


def test_a_gpu_without_descriptors_says_so() -> None:
    """An old driver is named as the reason, before anything is tried."""
    gpu = FakeGpu(FakeRuntime())
    gpu.initialise()
    gpu.fake_driver.supports_descriptors = False

    with pytest.raises(DeviceError, match="no memory behind descriptors"):
        gpu.share(SIZE)
    assert gpu.fake_driver.vmm_calls == []
