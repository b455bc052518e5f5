"""The GPU benchmark takes what it says, and says what it could not take. Here on the CPU: the wiring is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench import gpu_sweep, loaders
from bench.gpu_table import make_table
from remote_agent import devices
from tests.remote_agent.fake_cuda import FakeGpu, FakeRuntime

ROOT = Path(__file__).resolve().parents[2]


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "gpu-load", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(2):
        save_file({f"w{shard}": torch.arange(1 << 18) + shard}, tmp_path / f"{shard}.safetensors")
    return tmp_path


def test_every_load_is_kept_checked_and_tabled(folder: Path, tmp_path: Path) -> None:
    """Two rounds of paths and of a peer; raw records hold each time, the table each kind, no bytes differ."""
    out = tmp_path / "out"

    done = run_bench(
        str(folder), "--device", "cpu", "--quick", "--parts", "warm", "host", "cold-peers", "--peers", "safetensors",
        "--out", str(out),
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert "host: a CPU has nothing to register with" in done.stdout
    records = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    counts: dict[tuple[str, str], int] = {}
    for record in records[1:]:
        counts[record["part"], record["label"]] = counts.get((record["part"], record["label"]), 0) + 1
    assert records[0]["part"] == "machine"
    assert counts["warm", "glowplug path=auto"] == counts["cold-peers", "safetensors"] == 2
    assert counts["cold-peers", "raw read, 128 threads, O_DIRECT"] == 2
    checks = [record for record in records if record["part"] == "check"]
    assert len(checks) == 7
    assert {record["differing"] for record in checks} == {0}
    table = (out / "table.md").read_text()
    assert table in done.stdout
    assert "| glowplug page_cache=bypass | direct | 2 |" in table


def test_a_loader_that_is_not_there_is_named(folder: Path) -> None:
    """A peer that this Python lacks costs its own rows alone; a folder without a model is a usage error."""
    done = run_bench(str(folder), "--device", "cpu", "--quick", "--parts", "peers", "--peers", "instanttensor")

    assert done.returncode == 0
    assert "- instanttensor: ModuleNotFoundError" in done.stdout
    assert run_bench(str(folder / "none")).returncode == 2


def test_a_process_that_keeps_shards_registered_loads_from_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its loads copies what was registered once, and gives every tensor."""
    gpu = FakeGpu(FakeRuntime())
    monkeypatch.setattr(devices, "open_device", lambda name: gpu)
    load = loaders.use_host(folder, sorted(folder.glob("*.safetensors")), "cuda:0")
    for _ in range(2):
        tensors, figures = load({}, ExitStack())

        assert (figures["path"], figures["counters"]["registrations"]) == ("registered", 0)
        assert figures["steps_ns"]["move"]
        assert torch.equal(tensors["w1"], torch.arange(1 << 18) + 1)
    assert gpu.fake_runtime.errors == []


def test_the_table_gives_medians_beside_their_ceiling() -> None:
    """A warm load stands beside the pinned copies, a cold one beside its round's raw read; misfits are told."""
    records = [
        {"part": "warm", "label": "pinned H2D ceiling", "ceiling_bytes_s": 50e9},
        {"part": "check", "label": "ours", "seconds": 1.0, "differing": 1},
        *({"part": "warm", "label": "ours", "seconds": time, "path": "mapped"} for time in (0.2, 0.25, 0.5)),
        *({"part": "cold", "loader": "raw", "label": "raw", "round": n, "seconds": n + 1.0} for n in range(2)),
        *({"part": "cold", "label": "ours", "round": n, "seconds": 2 * (n + 1.0)} for n in range(2)),
        {"part": "cold", "label": "theirs", "error": "exited with -11: no word"},
    ]

    table = make_table(records, size_bytes=10_000_000_000)

    assert "| ours | mapped | 3 | 0.250 | 0.200–0.500 | 40.0 | 0.80 | **1 tensors differ** |" in table
    assert "| ours |  | 2 | 3.000 | 2.000–4.000 | 3.3 | 0.50 (0.50–0.50) |" in table
    assert "- theirs: exited with -11: no word" in table


def test_a_swept_configuration_is_a_line_with_its_steps() -> None:
    """Medians, the quickest first, beside the ceiling of the same run; a load that failed is left out."""
    records = [
        {"part": "sweep", "label": "pinned H2D ceiling", "ceiling_bytes_s": 50e9},
        *(
            {
                "part": "sweep", "label": label, "seconds": seconds, "steps_ns": {"register": 5e6},
                "counters": {"mapped_bytes": 5e9}, "ceiling_bytes_s": 49e9,
            }
            for label, times in (("slow", (0.5, 0.4, 0.6)), ("quick", (0.25, 0.2, 0.3)))
            for seconds in times
        ),
        {"part": "sweep", "label": "slow", "error": "no"},
    ]  # fmt: skip

    quick, steps, slow, _ = gpu_sweep.summarise(records, "sweep", 10_000_000_000).splitlines()

    assert quick == "0.2500 s 0.800 n=3 | quick"
    assert slow == "0.5000 s 0.400 n=3 | slow"
    assert "register 5.0 " in steps
    assert steps.endswith("| mapped 0.50 own ceiling 49.0 GB/s")


@pytest.mark.parametrize("request_", [*gpu_sweep.WARM, *gpu_sweep.COLD])
def test_every_swept_configuration_is_one_that_a_ring_can_have(request_: dict[str, Any]) -> None:
    """What is asked of a loader's process is read there, and takes no large part of a host."""
    limits = loaders.read_limits(request_.get("limits"))

    assert limits is None or limits.ring_bytes <= 512 << 20


def test_a_load_goes_where_it_is_asked_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into memory that can outlive its process, or into torch's, with its threads counted where bytes are checked."""
    runtime = FakeRuntime()

    class Swept(FakeGpu):
        def __init__(self, name: str) -> None:
            super().__init__(runtime, name=name)

        def use_limits(self, limits: object) -> None:
            assert limits is None

    monkeypatch.setattr(loaders, "SweptDevice", Swept)
    load = loaders.use_glowplug(folder, sorted(folder.glob("*.safetensors")), "cuda:0")

    for request in ({"path": "staged", "check": True}, {"path": "auto", "memory": "shared"}):
        tensors, figures = load(request, ExitStack())

        assert torch.equal(tensors["w1"], torch.arange(1 << 18) + 1)
        assert ("threads" in figures) is ("check" in request)
    assert runtime.errors == []
