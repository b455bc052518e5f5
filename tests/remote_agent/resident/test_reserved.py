"""Reserved ranges, on a CPU and on the fake driver's GPU alike: the addresses stay, what lies there is exchanged."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from remote_agent.devices.base import Device
from remote_agent.devices.cpu import CpuDevice
from remote_agent.errors import DeviceError, ResidentLostError
from remote_agent.resident import host_range, stand_in
from remote_agent.resident.reserved import RangeState, ReservedRange
from remote_agent.resident.stand_in import choose_chunk_bytes
from tests.remote_agent.fake_cuda import FakeGpu, FakeRuntime
from tests.remote_agent.resident.test_memory import device_called, open_maps, pattern, write_and_export

CHUNK = 2 << 20
"""What a real GPU maps at least. Three of them for the range, the last longer than what is left of it."""

SIZE = (5 << 20) - 100


@pytest.fixture(params=["cpu", "fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Return a device whose context is open and whose stand-ins are small."""
    monkeypatch.setattr(stand_in, "SMALLEST_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(stand_in, "LARGEST_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(host_range, "LARGEST_CHUNK_BYTES", CHUNK)
    return device_called(request.param)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(stand_in, "SMALLEST_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(stand_in, "LARGEST_CHUNK_BYTES", CHUNK)
    fake = FakeGpu(FakeRuntime())
    fake.initialise()
    fake.open_context()
    return fake


def values(tensor: torch.Tensor) -> list[int]:
    found: list[int] = torch.unique(tensor.cpu()).tolist()
    return found


def test_what_is_built_over_a_range_sees_what_is_mapped_there(device: Device) -> None:
    """A view made over the stand-in reads the weights once they are there, and the stand-in again after them."""
    reserved = device.reserve(SIZE)
    address, view = reserved.tensor.data_ptr(), reserved.tensor[100:200]
    reserved.tensor[: reserved.stand_in_bytes].fill_(7)
    descriptor, size = write_and_export(device, SIZE)
    ended: list[int] = []
    assert (reserved.size_bytes, reserved.state) == (size, RangeState.STAND_IN)
    assert values(reserved.tensor) == [7]

    steps = reserved.map(descriptor, size, lambda: ended.append(1))
    os.close(descriptor)
    assert list(steps) == ["import", "unmap", "map"]
    assert reserved.state is RangeState.WEIGHTS
    assert torch.equal(reserved.tensor.cpu(), pattern(size))
    assert torch.equal(view.cpu(), pattern(size)[100:200])
    assert reserved.tensor.data_ptr() == address
    assert ended == []
    reserved.unmap(stand_in=True)
    assert ended == [1]
    assert values(view) == [7]


def test_weights_go_and_come_back_with_nothing_between(device: Device) -> None:
    """Around a driver's checkpoint nothing may be mapped; the same view reads the weights afterwards."""
    reserved = device.reserve(SIZE)
    view = reserved.tensor[100:200]
    descriptor, size = write_and_export(device, SIZE)
    reserved.map(descriptor, size)

    reserved.unmap(stand_in=False)
    assert reserved.state is RangeState.NOTHING
    reserved.drop_stand_in()
    assert reserved.stand_in_bytes == 0
    reserved.map(descriptor, size)
    os.close(descriptor)
    assert torch.equal(view.cpu(), pattern(size)[100:200])
    reserved.unmap(stand_in=True)
    assert reserved.stand_in_bytes > 0
    assert reserved.state is RangeState.STAND_IN


def test_the_last_tensor_gives_everything_back(device: Device) -> None:
    """Neither addresses nor memory nor the lease outlive whoever used them, whatever lay there."""
    ended: list[int] = []
    reserved = device.reserve(SIZE)
    descriptor, size = write_and_export(device, SIZE)
    reserved.map(descriptor, size, lambda: ended.append(1))
    os.close(descriptor)
    view = reserved.tensor[:10]
    del reserved
    gc.collect()
    assert torch.equal(view.cpu(), pattern(size)[:10])

    del view
    gc.collect()
    assert ended == [1]
    assert open_maps() == 0
    if isinstance(device, FakeGpu):
        assert device.fake_driver.vmm_leaks() == []


def test_what_can_t_be_imported_leaves_the_stand_in(device: Device) -> None:
    """Memory of another kind is lost, weights too large for the range are refused: nothing was taken away for them."""
    reserved = device.reserve(SIZE)
    reserved.tensor[: reserved.stand_in_bytes].fill_(7)
    plain = os.memfd_create("plain", os.MFD_CLOEXEC)
    os.truncate(plain, reserved.size_bytes)
    with pytest.raises(ResidentLostError):
        reserved.map(plain, reserved.size_bytes)
    os.close(plain)
    descriptor, size = write_and_export(device, 2 * reserved.size_bytes)
    with pytest.raises(DeviceError, match=f"{size} bytes do not fit a range of {reserved.size_bytes}"):
        reserved.map(descriptor, size)
    os.close(descriptor)

    assert reserved.state is RangeState.STAND_IN
    assert values(reserved.tensor) == [7]


def test_weights_are_not_mapped_over_weights(device: Device) -> None:
    """A second map says what is there and changes nothing."""
    reserved = device.reserve(SIZE)
    descriptor, size = write_and_export(device, SIZE)
    reserved.map(descriptor, size)

    with pytest.raises(DeviceError, match="the range holds weights"):
        reserved.map(descriptor, size)
    assert torch.equal(reserved.tensor.cpu(), pattern(size))
    os.close(descriptor)


@pytest.mark.parametrize(
    ("call", "works_before"),
    [
        ("cuMemGetAllocationGranularity", 0),
        ("cuMemGetAllocationGranularity", 1),
        ("cuMemAddressReserve", 0),
        ("cuMemCreate", 0),
        ("cuMemMap", 0),
        ("cuMemMap", 1),
        ("cuMemSetAccess", 0),
    ],
)
def test_a_range_that_can_t_be_had_leaves_nothing(gpu: FakeGpu, call: str, works_before: int) -> None:
    """At whichever call it ends, what was made before is given back, and the call is named."""
    gpu.fake_driver.fail_at, gpu.fake_driver.works_before = call, works_before

    with pytest.raises(DeviceError, match=f"{call} failed: CUDA_ERROR_INVALID_VALUE"):
        gpu.reserve(SIZE)
    assert gpu.fake_driver.vmm_leaks() == []


def fails_once(gpu: FakeGpu, name: str, works_before: int) -> Callable[[], None]:
    """Let one call fail, the one after ``works_before`` others, and return what ends that."""
    real, count = getattr(gpu.fake_driver, name), iter(range(1000))

    def call(*arguments: object) -> object:
        return (1,) if next(count) == works_before else real(*arguments)

    setattr(gpu.fake_driver, name, call)
    return partial(setattr, gpu.fake_driver, name, real)


@pytest.mark.parametrize(
    ("call", "works_before", "error"),
    [
        ("cuMemImportFromShareableHandle", 0, ResidentLostError),
        ("cuMemUnmap", 0, DeviceError),
        ("cuMemUnmap", 1, DeviceError),
        ("cuMemMap", 0, DeviceError),
        ("cuMemSetAccess", 0, DeviceError),
    ],
)
def test_a_call_that_fails_once_puts_the_stand_in_back(
    gpu: FakeGpu, call: str, works_before: int, error: type[Exception]
) -> None:
    """What was built over the range can still be run, and the next map works."""
    reserved = gpu.reserve(SIZE)
    reserved.tensor[: reserved.stand_in_bytes].fill_(7)
    descriptor, size = write_and_export(gpu, SIZE)
    ended: list[int] = []
    works_again = fails_once(gpu, call, works_before)
    with pytest.raises(error, match=f"{call} failed"):
        reserved.map(descriptor, size, lambda: ended.append(1))
    works_again()

    assert reserved.state is RangeState.STAND_IN
    assert values(reserved.tensor) == [7]
    assert ended == []
    reserved.map(descriptor, size)
    os.close(descriptor)
    assert torch.equal(reserved.tensor, pattern(size))
    del reserved
    gc.collect()
    assert gpu.fake_driver.vmm_leaks() == []


@pytest.mark.parametrize(("call", "left"), [("cuMemMap", RangeState.NOTHING), ("cuMemUnmap", RangeState.BROKEN)])
def test_a_call_that_fails_for_good_is_known_too(gpu: FakeGpu, call: str, left: RangeState) -> None:
    """Where the stand-in does not come back nothing lies there; what can't be taken away is not mapped over."""
    reserved = gpu.reserve(SIZE)
    descriptor, size = write_and_export(gpu, SIZE)
    gpu.fake_driver.fail_at = call
    with pytest.raises(DeviceError, match=f"{call} failed"):
        reserved.map(descriptor, size)
    gpu.fake_driver.fail_at = None

    assert reserved.state is left
    if left is RangeState.BROKEN:
        with pytest.raises(DeviceError, match="the range holds broken"):
            reserved.map(descriptor, size)
        with pytest.raises(DeviceError, match="the range is broken"):
            reserved.unmap(stand_in=False)
    else:
        reserved.map(descriptor, size)
    os.close(descriptor)


def test_a_stand_in_that_can_t_be_had_again_leaves_nothing(gpu: FakeGpu) -> None:
    """Its memory was given back and others took it: said, and the weights can be mapped again all the same."""
    reserved = gpu.reserve(SIZE)
    descriptor, size = write_and_export(gpu, SIZE)
    reserved.map(descriptor, size)
    reserved.drop_stand_in()
    gpu.fake_driver.free_bytes = 0
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        reserved.unmap(stand_in=True)

    assert reserved.state is RangeState.NOTHING
    reserved.map(descriptor, size)
    assert torch.equal(reserved.tensor, pattern(size))
    os.close(descriptor)


def test_a_stand_in_is_small_beside_model_and_free_memory() -> None:
    """At most 2 GiB, an eighth of what is free, the model itself; 512 MiB where less is free."""
    gib = 1 << 30

    assert choose_chunk_bytes(13 * gib, 120 * gib) == 2 * gib
    assert choose_chunk_bytes(13 * gib, 8 * gib) == gib
    assert choose_chunk_bytes(13 * gib, gib) == gib // 2
    assert choose_chunk_bytes(1000, 120 * gib) == 1000


def test_addresses_that_can_t_be_had_are_an_error() -> None:
    """A host that has none left refuses by name."""
    with pytest.raises(DeviceError, match="bytes of addresses can't be had"):
        CpuDevice().reserve(1 << 62)


def fail_within(reserved: ReservedRange, work: Callable[[], object]) -> None:
    with reserved.or_stand_in():
        work()
        raise KeyError


def test_a_block_that_fails_leaves_the_stand_in_there_again(device: Device) -> None:
    """Whatever it had put there or taken away; one that ends well leaves what it did."""
    reserved = device.reserve(SIZE)
    reserved.tensor[: reserved.stand_in_bytes].fill_(7)
    descriptor, size = write_and_export(device, SIZE)
    put = partial(reserved.map, descriptor, size)
    for work in (partial(reserved.unmap, stand_in=False), put, lambda: None):
        with pytest.raises(KeyError):
            fail_within(reserved, work)
        assert (reserved.state, values(reserved.tensor)) == (RangeState.STAND_IN, [7])
    with reserved.or_stand_in():
        put()
    os.close(descriptor)

    assert reserved.state is RangeState.WEIGHTS


def test_a_block_that_fails_where_the_stand_in_can_t_be_had_says_why_it_failed(gpu: FakeGpu) -> None:
    """Nothing lies there then, and the range says so."""
    reserved = gpu.reserve(SIZE)

    def break_maps() -> None:
        reserved.unmap(stand_in=False)
        gpu.fake_driver.fail_at = "cuMemMap"

    with pytest.raises(KeyError):
        fail_within(reserved, break_maps)

    assert reserved.state is RangeState.NOTHING
