"""NVML read without trust: what the driver does not tell is None, and one bad GPU hides no other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from remote_agent.devices.nvml import NOT_AVAILABLE_BYTES, Nvml, read_gpus, read_versions
from remote_agent.protocol.messages import Gpu, GpuProcess
from tests.remote_agent.fake_nvml import (
    LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    FakeGpu,
    FakeNvml,
    NvmlCode,
    all_failing,
)


def only_gpu(gpu: FakeGpu) -> Gpu:
    gpus, _ = read_gpus(Nvml(FakeNvml([gpu])))
    return gpus[0]


def test_a_healthy_gpu_is_read_whole() -> None:
    """Every field of the wire's Gpu is filled from the driver."""
    processes = [SimpleNamespace(pid=77, usedGpuMemory=5 << 20), SimpleNamespace(pid=1, usedGpuMemory=None)]

    gpu = only_gpu(FakeGpu(processes=processes, minor=3, mig=1, compute_mode=3, ecc=2, name=b"NVIDIA H200"))

    assert gpu == Gpu(
        uuid="GPU-aaaaaaaa-0000-4000-8000-000000000001",
        index=0,
        name="NVIDIA H200",
        minor=3,
        memory_total_bytes=150_754_820_096,
        memory_used_bytes=4_000_000_000,
        unified=False,
        utilisation=17,
        temperature_c=41,
        power_w=70.12,
        mig=True,
        compute_mode="exclusive_process",
        persistence=True,
        ecc_uncorrected=2,
        compute_capability="9.0",
        processes=(GpuProcess(77, 5 << 20, "python3"), GpuProcess(1, None, None)),
    )
    assert read_versions(Nvml(FakeNvml())) == ("580.159.03", "13.0")


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN, LOST, 1, 4242])
def test_a_field_the_driver_does_not_tell_is_none(code: int) -> None:
    """No code of any call raises, and none becomes a zero."""
    gpu = only_gpu(all_failing(code, uuid="GPU-1"))

    assert gpu.uuid == "GPU-1"
    assert gpu.processes == ()
    told = {gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.utilisation, gpu.temperature_c, gpu.power_w, gpu.mig}
    told |= {gpu.compute_mode, gpu.persistence, gpu.ecc_uncorrected, gpu.compute_capability, gpu.minor}
    assert told == {None}
    assert gpu.unified is (code == NOT_SUPPORTED)


@pytest.mark.parametrize("memory", [NvmlCode(NOT_SUPPORTED), (0, 0), (128 << 30, 3 << 30)])
def test_unified_memory_is_called_that(memory: object) -> None:
    """A GB10 is unified whether its driver refuses the memory call, answers zero, or answers a figure."""
    gpu = only_gpu(FakeGpu(name="NVIDIA GB10", memory=memory))

    assert gpu.unified
    assert gpu.memory_total_bytes in (None, 128 << 30)


def test_what_the_driver_keeps_for_itself_is_read_where_it_tells() -> None:
    """Only a newer call tells it; what is used stays the older one's figure, which includes it."""
    told, silent = only_gpu(FakeGpu(reserved=600)), only_gpu(FakeGpu())

    assert (told.memory_reserved_bytes, silent.memory_reserved_bytes) == (600, None)
    assert told.memory_used_bytes == silent.memory_used_bytes == 4_000_000_000


def test_a_process_without_a_figure_has_none() -> None:
    """NVML's all-ones stand for not available."""
    gpu = only_gpu(FakeGpu(processes=[SimpleNamespace(pid=7, usedGpuMemory=NOT_AVAILABLE_BYTES)]))

    assert gpu.processes[0].memory_bytes is None


def test_a_gpu_that_does_not_answer_hides_no_other() -> None:
    """A GPU without handle, one without UUID and a lost one are findings; the healthy one is read."""
    broken = FakeGpu(handle=NvmlCode(UNKNOWN))
    nameless = FakeGpu(uuid=NvmlCode(UNKNOWN))
    lost = all_failing(LOST, uuid="GPU-lost")

    gpus, findings = read_gpus(Nvml(FakeNvml([broken, nameless, lost, FakeGpu()])))

    assert [gpu.index for gpu in gpus] == [2, 3]
    assert [finding.code for finding in findings] == ["gpu_unreadable", "gpu_unreadable", "gpu_lost"]
    assert "GPU 2 (GPU-lost)" in findings[2].text


def test_an_nvml_without_a_call_does_not_tell_it() -> None:
    """An older or newer pynvml that lacks a function costs that one field."""

    class Old(FakeNvml):
        nvmlDeviceGetMinorNumber = None  # type: ignore[assignment]
        nvmlDeviceGetMigMode = None  # type: ignore[assignment]

    gpus, _ = read_gpus(Nvml(Old([FakeGpu()])))

    assert (gpus[0].minor, gpus[0].mig) == (None, None)
    assert gpus[0].temperature_c == 41
