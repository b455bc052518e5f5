"""The benchmark measures what it says, and prints no figure without its spread."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.cpu_load import assert_equal

ROOT = Path(__file__).resolve().parents[2]


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_a_small_benchmark_measures_both_sides_and_keeps_the_raw_times(tmp_path: Path) -> None:
    """Five loads of each side, cached and cold; the printed median is the median of the times kept."""
    done = run_bench(
        "--size-mib", "32", "--repetitions", "5", "--folder", str(tmp_path), "--out", str(tmp_path / "raw")
    )
    kept = json.loads((tmp_path / "raw").read_text(encoding="utf-8"))
    times = kept["times"]["cached"]["glowplug"]

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("ratio") == 4
    assert f"{sorted(times['touched_ns'])[2] / 1e6:.1f} ms" in done.stdout
    assert [len(figures["touched_ns"]) for sides in kept["times"].values() for figures in sides.values()] == [5] * 4
    assert all(touched >= returned for touched, returned in zip(times["touched_ns"], times["returned_ns"], strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_too_few_repetitions_are_refused() -> None:
    """A median of three is no figure."""
    assert run_bench("--repetitions", "3").returncode == 2


def test_different_bytes_end_the_benchmark() -> None:
    """Speed counts only for equal tensors."""
    with pytest.raises(AssertionError, match="weight differs"):
        assert_equal({"weight": torch.zeros(2)}, {"weight": torch.ones(2)})
