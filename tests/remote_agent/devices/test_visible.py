"""CUDA_VISIBLE_DEVICES: what CUDA makes of each form, never through int() first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent.devices.visible import HostGpu, visible_devices

GPUS = [
    HostGpu("GPU-11110000-1111-4111-8111-111111111111", ("MIG-aaaa0000-0000-4000-8000-000000000001",)),
    HostGpu("GPU-22220000-2222-4222-8222-222222222222"),
    HostGpu("GPU-22223333-3333-4333-8333-333333333333", ("MIG-bbbb0000-0000-4000-8000-000000000002",)),
]


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("0,-1,1", [0]),
        ("0,9,1", [0]),
        ("1,,2", [1]),
        ("1,x,2", [1]),
        ("0,0", []),
        ("99999999999999999999", []),
        ("٣", []),
        ("GPU-1111", [0]),
        ("GPU-22223", [2]),
        ("GPU-2222", []),
        ("gpu-1111", []),
        ("GPU-11110000-1111-4111-8111-111111111111,GPU-22223333", [0, 2]),
        ("0,GPU-22223333", []),
        ("MIG-aaaa", [0]),
        ("MIG-aaaa,MIG-bbbb", [0]),
        ("none", []),
        ("NoDevFiles", []),
        ("void", []),
        ("all", []),
    ],
)
def test_each_form_shows_the_devices_that_cuda_shows(value: str | None, indices: list[int]) -> None:
    """Order is kept; an entry that names nothing ends the list; whatever hides devices is said."""
    found = visible_devices(value, GPUS)

    assert [device.index for device in found.devices] == indices
    assert all(device.uuid == GPUS[device.index].uuid for device in found.devices)
    assert (found.problem is None) == (value is None or len(indices) == len(value.split(",")))


def test_a_slice_keeps_the_uuid_of_its_gpu() -> None:
    """A MIG slice is reported with the slice's and the GPU's UUID."""
    device = visible_devices("MIG-bbbb", GPUS).devices[0]

    assert (device.index, device.uuid, device.mig) == (2, GPUS[2].uuid, GPUS[2].mig[0])


@given(st.text(max_size=40))
def test_no_value_raises(value: str) -> None:
    """Whatever stands in the variable, there is an answer, and at most each GPU once."""
    found = visible_devices(value, GPUS)

    assert len(set(found.devices)) == len(found.devices)
