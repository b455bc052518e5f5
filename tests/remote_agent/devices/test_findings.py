"""What an operator is told about GPUs before a run fails on them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remote_agent.devices.findings import HostPaths, explain_failed_start, host_findings, lost_access, visible_finding
from remote_agent.protocol.messages import Gpu, GpuProcess

GPU = Gpu("GPU-1", 0, "NVIDIA H200", persistence=True, compute_mode="default", ecc_uncorrected=0, mig=False)


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    """A host whose module and library are both 580.95.05, with nvidia-uvm in place."""
    library = tmp_path / "lib"
    library.mkdir()
    (library / "libnvidia-ml.so.580.95.05").touch()
    (library / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.95.05")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 13.3.0\n"
    )
    (tmp_path / "maps").write_text(f"7f00-7f01 r-xp 0 00:1 5   {library}/libnvidia-ml.so.580.95.05\n")
    dev = tmp_path / "dev"
    dev.mkdir()
    (dev / "nvidia-uvm").symlink_to("/dev/null")
    return HostPaths(dev, tmp_path / "version", tmp_path / "maps")


def codes(paths: HostPaths, *gpus: Gpu) -> list[str]:
    return [finding.code for finding in host_findings(gpus, paths)]


def test_a_healthy_host_has_no_findings(paths: HostPaths) -> None:
    """Nothing is said where nothing is wrong."""
    assert codes(paths, GPU) == []
    assert codes(HostPaths(Path("/nowhere"), Path("/nowhere"), Path("/nowhere"))) == []


def test_a_driver_upgraded_underneath_is_told_while_it_still_serves(paths: HostPaths) -> None:
    """A library newer than the loaded module means: works now, fails at the next restart."""
    library = paths.dev.parent / "lib"
    (library / "libnvidia-ml.so.1").unlink()
    (library / "libnvidia-ml.so.580.159.03").touch()
    (library / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.159.03")
    paths.maps.write_text(f"7f00-7f01 r-xp 0 00:1 5   {library}/libnvidia-ml.so.580.95.05 (deleted)\n")

    finding = next(host_findings((GPU,), paths))

    assert (finding.code, finding.severity) == ("driver_mismatch", "warning")
    assert "kernel module 580.95.05, library 580.159.03" in finding.text
    assert "a restart will fail until reboot" in finding.text


def test_a_start_that_fails_is_explained(paths: HostPaths) -> None:
    """Mismatch, lost device access and other codes each have their own finding and advice."""
    mismatch = explain_failed_start(18, paths)
    lost = explain_failed_start(999, paths)

    assert (mismatch.code, mismatch.severity) == ("driver_mismatch", "error")
    assert "until reboot" in mismatch.text
    assert lost.code == "container_lost_gpus"
    assert "lost device cgroup access" in lost.text
    assert "recreate it" in lost.text
    assert explain_failed_start(8, paths).text == "NVML does not start: error 8"


def test_a_denied_device_node_is_the_evidence(paths: HostPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the control node can't be opened the finding says so."""

    def deny(*arguments: object) -> int:
        raise OSError(1, os.strerror(1))

    monkeypatch.setattr("remote_agent.devices.findings.os.open", deny)

    assert "/dev/nvidiactl is denied" in lost_access(paths).text


def test_a_missing_uvm_node_is_found_before_cuinit_fails(paths: HostPaths) -> None:
    """Missing or not a device: either way cuInit would fail with 999, and the way out is named."""
    (paths.dev / "nvidia-uvm").unlink()
    assert codes(paths, GPU) == ["uvm_missing"]
    (paths.dev / "nvidia-uvm").touch()

    finding = next(host_findings((GPU,), paths))

    assert finding.code == "uvm_missing"
    assert "nvidia-modprobe -c 0 -u" in finding.text


def test_each_gpu_mode_that_stops_a_run_is_told(paths: HostPaths) -> None:
    """Exclusive mode names the holder; prohibited, ECC, MIG and persistence each have a finding."""
    holder = GpuProcess(4711, None)
    base = {"uuid": "GPU-2", "index": 1, "name": "NVIDIA H100"}

    found = {
        finding.code: finding
        for finding in host_findings(
            (
                Gpu(**base, compute_mode="exclusive_process", processes=(holder,)),
                Gpu(**base, compute_mode="prohibited", ecc_uncorrected=3, mig=True, persistence=False),
            ),
            paths,
        )
    }

    assert "process 4711 has it" in found["exclusive_mode"].text
    assert found["exclusive_mode"].severity == "warning"
    assert found["compute_prohibited"].severity == "error"
    assert "3 uncorrectable ECC errors" in found["ecc_uncorrected"].text
    assert found["mig_on"].severity == "info"
    assert found["persistence_off"].severity == "info"
    assert "nvidia-persistenced" in found["persistence_off"].text
    free = next(host_findings((Gpu(**base, compute_mode="exclusive_process"),), paths))
    assert free.severity == "info"


@pytest.mark.parametrize(
    ("value", "severity", "words"),
    [
        ("1", "info", "leaves GPU 1 (GPU-b) to"),
        ("GPU-b,GPU-a", "info", "leaves GPU 1 (GPU-b), GPU 0 (GPU-a) to"),
        ("0,7", "info", "leaves GPU 0 (GPU-a) to what is started from here; CUDA_VISIBLE_DEVICES: '7' is no GPU"),
        ("", "warning", "leaves no GPU to what is started from here; CUDA_VISIBLE_DEVICES is empty"),
        ("-1", "warning", "leaves no GPU to what is started from here; CUDA_VISIBLE_DEVICES: '-1' is no GPU"),
        ("MIG-1", "info", "names a MIG slice"),
    ],
)
def test_the_gpus_that_the_environment_leaves_are_named(value: str, severity: str, words: str) -> None:
    """By physical index and UUID, in CUDA's order; none at all is a warning."""
    finding = visible_finding(value, (Gpu("GPU-a", 0, "NVIDIA H200"), Gpu("GPU-b", 1, "NVIDIA H200")))

    assert (finding.code, finding.severity) == ("visible_devices", severity)
    assert words in finding.text


def test_a_gpu_that_does_not_answer_keeps_its_number() -> None:
    """The others are not counted anew."""
    assert "leaves GPU 1 (GPU-b) to" in visible_finding("1", (Gpu("GPU-b", 1, "NVIDIA H200"),)).text
