"""Which devices a recipe means, what fits on them, and whose turn it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from remote_agent.agentd.capacity import Slots, bytes_on, check_memory, device_memory, process_bytes, resolve_devices
from remote_agent.agentd.room import check_budgets
from remote_agent.errors import StageError
from remote_agent.protocol.budget import parse_budget
from remote_agent.protocol.internal import SamplerReport
from remote_agent.protocol.messages import Gpu, GpuProcess, Resident, Tier

FIRST, SECOND = "GPU-aaaaaaaa", "GPU-bbbbbbbb"


def report(**change: object) -> SamplerReport:
    values: dict[str, object] = {"memory_total_bytes": 100, "memory_used_bytes": 40, **change}
    gpus = (Gpu(SECOND, 1, "H200", **values), Gpu(FIRST, 0, "H200", **values))  # type: ignore[arg-type]
    return SamplerReport("ok", 0, "580", "13.0", gpus)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (("auto",), (FIRST,)),
        (("all",), (FIRST, SECOND)),
        (("cuda:1",), (SECOND,)),
        ((SECOND, "cuda:0"), (SECOND, FIRST)),
        (("cpu",), ("cpu",)),
        (("cpu", "cuda:0"), ("cpu", FIRST)),
    ],
)
def test_a_recipes_devices_become_uuids(wanted: tuple[str, ...], found: tuple[str, ...]) -> None:
    """Whatever way a device is named, it is known by its UUID from then on; indexes are the driver's."""
    assert resolve_devices(wanted, report(), "nvml") == found


@pytest.mark.parametrize(
    ("wanted", "status", "words"),
    [
        (("all",), "absent", "cpu only (no NVIDIA driver)"),
        (("cuda:0",), "absent", "cpu only (no NVIDIA driver)"),
        (("auto",), "hung", "the driver does not answer"),
        (("auto",), "starting", "not known yet"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(wanted: tuple[str, ...], status: str, words: str) -> None:
    """A missing device fails with one stable code; a hung driver is never taken for a host without GPUs."""
    with pytest.raises(StageError, match=r"no such|not known|no GPU") as failed:
        resolve_devices(wanted, None, status)

    assert failed.value.failure.code == "no_such_device"
    assert words in failed.value.failure.detail


def test_auto_means_the_cpu_only_where_there_is_no_driver() -> None:
    """Falling back needs the sampler's word that there is nothing."""
    assert resolve_devices(("auto",), SamplerReport("absent", 0), "absent") == ("cpu",)


def test_a_device_named_twice_is_refused() -> None:
    """Index and UUID of the same GPU are one device."""
    with pytest.raises(StageError, match="named twice"):
        resolve_devices(("cuda:0", FIRST), report(), "nvml")


def resident(device: str) -> Resident:
    return Resident("run-1", "llama", "/m", device, Tier.STANDBY, 30, 77, "ann", 0)


def test_memory_of_a_gpu_is_what_its_driver_says() -> None:
    """Free is total less used; our own holders are named once, as ours."""
    seen = report(processes=(GpuProcess(77, 30, "python"), GpuProcess(9, 10, "trainer")))
    memory = device_memory(FIRST, seen, 999, [resident(FIRST), resident(SECOND)])

    assert memory.free_bytes == 60
    assert memory.holders == ("llama of ann (30 bytes, process 77)", "trainer (10 bytes, process 9)")


@pytest.mark.parametrize("tier", [Tier.CACHED, Tier.HOST])
def test_registered_and_locked_files_are_the_hosts_memory(tier: Tier) -> None:
    """Whichever GPU they are registered with, nobody is told to look for them there."""
    held = replace(resident(FIRST), tier=tier)

    assert device_memory("cpu", None, 999, [held]).holders == ("llama of ann (30 bytes, process 77)",)
    assert device_memory(FIRST, report(), 999, [held]).holders == ()


def test_what_is_parked_is_the_hosts_memory_but_for_weights_at_the_keeper() -> None:
    """Those stay on the GPU, behind descriptors, and count for its budgets; the process takes nothing of it."""
    parked = replace(resident(FIRST), tier=Tier.PARKED, host_bytes=50)
    kept = replace(parked, name="llama@first")

    assert [bytes_on(parked, device) for device in ("cpu", FIRST, SECOND)] == [50, 0, 0]
    assert [bytes_on(kept, device) for device in ("cpu", FIRST, SECOND)] == [50, 30, 0]
    assert device_memory(FIRST, report(), 999, [parked, kept]).holders == ("llama of ann (30 bytes, descriptors)",)
    assert device_memory("cpu", None, 999, [parked]).holders == ("llama of ann (50 bytes, process 77)",)
    check_budgets(FIRST, 80, 100, [parked], [parse_budget("80%")])
    with pytest.raises(StageError, match=r"30 bytes are taken by llama of ann \(30 bytes\)"):
        check_budgets(FIRST, 80, 100, [parked, kept], [parse_budget("80%")])


def test_memory_that_a_gpu_shares_with_its_host_is_the_hosts() -> None:
    """On a unified part, and on the CPU, available host memory counts."""
    assert device_memory(FIRST, report(unified=True), 999, []).free_bytes == 999
    assert device_memory("cpu", None, 999, []).free_bytes == 999


def test_memory_that_nobody_tells_is_not_invented() -> None:
    """Where the driver says nothing the check lets the run go on."""
    memory = device_memory(FIRST, report(memory_used_bytes=None), 999, [])

    assert memory.free_bytes is None
    check_memory(FIRST, 10**15, memory)


def test_exactly_enough_is_enough() -> None:
    """The limit itself fits; one byte more does not, and says both numbers."""
    memory = device_memory(FIRST, report(), 0, [resident(FIRST)])
    check_memory(FIRST, 60, memory)
    with pytest.raises(StageError) as failed:
        check_memory(FIRST, 61, memory)

    assert failed.value.failure.code == "no_memory"
    assert "needs 61 bytes, free are 60 bytes; held by llama of ann" in failed.value.failure.detail


async def test_slots_are_given_in_the_order_they_were_asked_for() -> None:
    """A run on two devices is not overtaken by later ones on either, and others pass."""
    slots = Slots()
    await slots.acquire("a", ("x",))
    both = asyncio.ensure_future(slots.acquire("b", ("x", "y")))
    late = asyncio.ensure_future(slots.acquire("c", ("y",)))
    await slots.acquire("d", ("z",))
    assert (both.done(), late.done()) == (False, False)

    slots.release("a")
    await both
    assert slots.holders(("x", "y")) == ["b", "b"]
    assert not late.done()
    slots.release("b")
    await late


async def test_a_run_that_no_longer_waits_takes_no_slot() -> None:
    """Cancelling in the queue leaves no trace, even when the slot came free at the same moment."""
    slots = Slots()
    await slots.acquire("a", ("x",))
    waiting = asyncio.ensure_future(slots.acquire("b", ("x",)))
    await asyncio.sleep(0)
    slots.release("a")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    await asyncio.wait_for(slots.acquire("c", ("x",)), 5)
    assert slots.holders(("x",)) == ["c"]


def test_what_a_process_takes_is_summed_over_its_gpus() -> None:
    """Nothing is claimed of a process that the driver does not list, or lists without a number."""
    gpus = [
        Gpu(f"GPU-{index}", index, "H200", processes=(GpuProcess(7, 500, "worker"), GpuProcess(8, None, "other")))
        for index in range(2)
    ]
    seen = SamplerReport("ok", 0, gpus=tuple(gpus))

    assert [process_bytes(pid, seen) for pid in (7, 8, 9)] == [1000, 0, 0]
    assert process_bytes(7, None) == 0
