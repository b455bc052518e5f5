"""Whose a GPU's memory is: the driver's, a process's, a warm model's; the rest is said with its number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from remote_agent.agentd.accounting import account
from remote_agent.agentd.capacity import device_memory
from remote_agent.protocol.internal import SamplerReport
from remote_agent.protocol.messages import Gpu, GpuProcess, Resident, Tier
from tests.remote_agent.agentd.agents import Agent, eventually, failure_of

GB = 10**9
UUID = "GPU-aaaaaaaa"


def gpu(used: int | None = 20 * GB, **known: Any) -> Gpu:
    return Gpu(UUID, 0, "H200", memory_total_bytes=140 * GB, memory_used_bytes=used, **known)


def held(size: int, pid: int | None = None, device: str = UUID) -> Resident:
    return Resident("run-1", "llama", "/m", device, Tier.STANDBY if pid else Tier.RESIDENT, size, pid, "ann", 0)


@pytest.mark.parametrize(
    ("seen", "residents", "rest"),
    [
        (gpu(), [], 20 * GB),
        (gpu(memory_reserved_bytes=GB), [held(13 * GB)], 6 * GB),
        (gpu(processes=(GpuProcess(5, 4 * GB, "trainer"),)), [held(13 * GB), held(GB, device="cpu")], 3 * GB),
        (gpu(processes=(GpuProcess(7, 2 * GB),)), [held(13 * GB, pid=7)], 7 * GB),
        (gpu(processes=(GpuProcess(7, 14 * GB),)), [held(13 * GB, pid=7)], 6 * GB),
        (gpu(processes=(GpuProcess(7, 14 * GB),)), [held(13 * GB)], 0),
        (gpu(processes=(GpuProcess(7, None),)), [], None),
        (gpu(unified=True), [], None),
        (gpu(used=None), [], None),
    ],
)
def test_what_is_left_has_nobody_that_shows(seen: Gpu, residents: list[Resident], rest: int | None) -> None:
    """A standby counts as its process or its weights, whichever is more; what nobody can tell is not made up."""
    ((accounted,), findings) = account([seen], residents)

    assert accounted.memory_unexplained_bytes == rest
    assert len(findings) == (1 if rest else 0)


def test_a_spare_is_the_agent_s_own_and_hides_nothing() -> None:
    """Where the driver tells no size of it the rest is told all the same; where it does, a refusal has its name."""
    seen = gpu(processes=(GpuProcess(7, None), GpuProcess(8, GB, "python")))
    ((accounted,), _) = account([seen], [], spares=(7, 8))
    memory = device_memory(UUID, SamplerReport("nvml", 0, gpus=(seen,)), 0, [], {8: f"spare {UUID}"})

    assert accounted.memory_unexplained_bytes == 19 * GB
    assert f"spare {UUID} (1.00 GB, process 8)" in memory.holders


def test_memory_held_without_a_process_is_said_with_its_number() -> None:
    """The finding names the GPU and both figures; what is less than the driver's own ado is not worth one."""
    _, (finding,) = account([gpu(used=14 * GB)], [])
    _, nothing = account([gpu(used=GB)], [])

    assert (finding.code, finding.severity) == ("memory_unexplained", "warning")
    assert f"GPU 0 ({UUID}): 14.00 GB of the 14.00 GB in use belong to no process" in finding.text
    assert nothing == ()


def test_who_waits_for_memory_is_told_of_it_too() -> None:
    """A refusal would otherwise name nobody, as nvidia-smi does."""
    report = SamplerReport("nvml", 0, gpus=(gpu(used=15 * GB),))

    assert device_memory(UUID, report, 0, [held(13 * GB)]).holders == (
        "llama of ann (13.00 GB, descriptors)",
        "nobody known here (2.00 GB, no process)",
    )


def test_an_agent_says_it_in_probe_and_in_a_refusal(make_agent: Callable[..., Agent]) -> None:
    """Five of seven gigabytes are a trainer's; two are nobody's."""
    agent = make_agent(orders={"sampler": "ok 7000000000 0 5000000000"})
    with agent.client("") as client:
        eventually(lambda: client.status().probe.gpus, "the sampler reports")  # type: ignore[union-attr]
        probe = client.status().probe
        refused = client.warm(agent.params("bytes:6000000000", ("cuda:0",)))

    assert probe is not None
    assert [one.memory_unexplained_bytes for one in probe.gpus] == [2 * GB] * 2
    assert [one.code for one in probe.findings].count("memory_unexplained") == 2
    assert failure_of(refused).detail.endswith(
        "trainer (5.00 GB, process 4242), nobody known here (2.00 GB, no process)"
    )
