"""What a GPU run says of its host: ceilings of the disk, and what the agent's own processes have loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_daemon import cuda_libraries, daemon_memory
from bench.gpu_facts import describe_machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `nvidia-smi` that lists what the file says."""
    listing = tmp_path / "listing"
    command = tmp_path / "bin" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\nexec cat {listing}\n", encoding="utf-8")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return listing


def test_a_process_that_is_not_listed_and_has_no_cuda_holds_nothing(listing: Path) -> None:
    """Zero is what NVML says of this process, whose libraries have none of CUDA's; who is listed has what it says."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as keeper:
        listing.write_text(f"1, 528\n{keeper.pid}, 77\n")
        told = daemon_memory({"agentd": os.getpid(), "keeper": keeper.pid})

    assert told["agentd_mib"] == 0
    assert told["agentd_libraries"] == []
    assert told["keeper_mib"] == 77


def test_what_can_not_be_asked_is_not_taken_for_nothing(listing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is no amount, a process that is gone, and a host without NVML give no figure."""
    listing.write_text("1, [N/A]\n")

    assert daemon_memory({"agentd": os.getpid()})["agentd_mib"] is None
    listing.write_text("")
    assert daemon_memory({"agentd": None})["agentd_mib"] is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert daemon_memory({"agentd": os.getpid()})["agentd_mib"] is None
    assert cuda_libraries(0) is None


def test_the_disk_is_read_both_ways_in_turn(tmp_path: Path) -> None:
    """Once each even where the time is over, and no figure is made up for a GPU that was not asked."""
    (tmp_path / "a.safetensors").write_bytes(bytes(1 << 20))
    command = [sys.executable, "-m", "bench.gpu_ceilings", str(tmp_path), "--device", "cpu", "--budget-s", "0"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    found = json.loads(done.stdout)
    assert found["bytes"] == 1 << 20
    assert len(found["disk"]["buffered_s"]) == 1
    assert len(found["disk"]["direct_s"]) + ("direct_s" in found["disk"]["refusals"]) == 1
    assert "pinned" not in found


def test_the_machine_tells_the_versions_that_a_figure_depends_on() -> None:
    """Peers that are not installed are there with no version; a torch for CPUs has no CUDA."""
    machine = describe_machine()

    packages = machine["packages"]
    assert isinstance(packages, dict)
    assert packages["torch"]
    assert {"instanttensor", "fastsafetensors", "runai-model-streamer", "accelerate"} <= set(packages)
    assert machine["torch_cuda"] is None or str(machine["torch_cuda"])[0].isdigit()
