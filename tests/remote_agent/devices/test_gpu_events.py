"""Xids from NVML: each told once, without waiting, and none where the driver has none to tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote_agent.devices.findings import HostPaths
from remote_agent.devices.gpu_events import GpuEvents
from remote_agent.devices.nvml import Nvml
from remote_agent.protocol.internal import GpuXid, SamplerReport, dump, parse
from remote_agent.sampler import Sampler
from tests.remote_agent.fake_nvml import NOT_SUPPORTED, UNKNOWN, FakeGpu, FakeNvml, NvmlCode

FIRST, SECOND = FakeGpu("GPU-11111111"), FakeGpu("GPU-22222222")


def test_each_error_is_told_once_with_its_gpu() -> None:
    """What happened between two looks comes in order with the later one; what was before the first does not."""
    nvml = FakeNvml([FIRST, SECOND])
    events = GpuEvents(Nvml(nvml))
    nvml.fail(FIRST, 13)
    events.start()
    nvml.fail(SECOND, 79)
    nvml.fail(FIRST, 48)

    assert events.read() == (GpuXid("GPU-22222222", 79), GpuXid("GPU-11111111", 48))
    assert events.read() == ()


@pytest.mark.parametrize("types", [0, NvmlCode(NOT_SUPPORTED), NvmlCode(UNKNOWN)])
def test_a_gpu_without_events_keeps_no_other_from_telling_its_own(types: object) -> None:
    """A slice, an old part or a container may have none: that is no error."""
    silent = FakeGpu("GPU-33333333", event_types=types)
    nvml = FakeNvml([silent, SECOND])
    events = GpuEvents(Nvml(nvml))
    events.start()
    nvml.fail(SECOND, 95)

    assert events.read() == (GpuXid("GPU-22222222", 95),)


def test_where_no_gpu_has_events_none_are_asked_for() -> None:
    """Nothing is left at the driver, and reading finds nothing."""
    nvml = FakeNvml([FakeGpu(event_types=0)])
    events = GpuEvents(Nvml(nvml))
    events.start()

    assert nvml.event_sets == []
    assert events.read() == ()


def test_an_nvml_without_events_tells_none() -> None:
    """A library too old for a call is one that does not tell."""
    events = GpuEvents(Nvml(type("Old", (), {"NVMLError": FakeNvml.NVMLError})()))
    events.start()

    assert events.read() == ()


def test_a_storm_is_told_in_pieces() -> None:
    """A report stays small; the rest comes with the next."""
    nvml = FakeNvml([FIRST])
    events = GpuEvents(Nvml(nvml))
    events.start()
    for _ in range(100):
        nvml.fail(FIRST, 31)

    assert [len(events.read()) for _ in range(3)] == [64, 36, 0]


def test_the_sampler_s_report_carries_them_over_the_wire(tmp_path: Path) -> None:
    """They go with the first look after they happened."""
    (tmp_path / "nvidiactl").touch()
    nvml = FakeNvml([FIRST])
    sampler = Sampler(nvml, HostPaths(tmp_path, tmp_path / "version", tmp_path / "maps"))
    sampler.look()
    nvml.fail(FIRST, 79)
    report = parse(dump(sampler.look()).strip())

    assert isinstance(report, SamplerReport)
    assert report.xids == (GpuXid("GPU-11111111", 79),)
    assert sampler.look().xids == ()
