"""The benchmark measures what it says, and prints no figure without its spread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.cpu_load import assert_equal
from bench.cpu_memory import anonymous_bytes, judge_memory
from bench.pairs import compare

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
    assert done.stdout.count("ratio") == 6
    assert f"{sorted(times['touched_ns'])[2] / 1e6:.1f} ms" in done.stdout
    assert [len(figures["touched_ns"]) for sides in kept["times"].values() for figures in sides.values()] == [5] * 4
    assert all(touched >= returned for touched, returned in zip(times["touched_ns"], times["returned_ns"], strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
    assert {side: len(loads) for side, loads in kept["memory"].items()} == {"glowplug": 3, "safetensors": 3}
    assert all(load["samples"] > 1 and load["before_bytes"] > 1 << 20 for load in kept["memory"]["glowplug"])
    peak = max(load["peak_extra_bytes"] for load in kept["memory"]["glowplug"])
    assert (
        f"glowplug              {peak / (1 << 20):.1f} MiB, {'under' if peak < 64 << 20 else 'NOT under'} 64 MiB"
        in done.stdout
    )


def test_anonymous_memory_is_what_a_process_really_has() -> None:
    """Memory that is written counts, also at once; what is not told is no zero."""
    before = anonymous_bytes(os.getpid())
    block = bytearray(os.urandom(1 << 20) * 32)
    during = anonymous_bytes(os.getpid())

    assert during - before > 24 << 20
    assert len(block) == 32 << 20
    assert judge_memory([1 << 20, (64 << 20) + 1]) == "64.0 MiB, NOT under 64 MiB"
    assert judge_memory([1 << 20, 3 << 19]) == "1.5 MiB, under 64 MiB"


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([20, 20, 5], "2.00 (0.50–2.00): not slower"),
        ([5, 5, 20], "0.50 (0.50–2.00): not told apart"),
        ([5, 5, 9], "0.50 (0.50–0.90): slower"),
        ([5] * 8 + [100], "0.50 (0.50–10.00): slower"),
        ([10, 10, 10], "1.00 (1.00–1.00): not slower"),
    ],
)
def test_a_verdict_is_of_pairs(theirs: list[int], words: str) -> None:
    """Loads beside each other are compared; one that was held up decides nothing."""
    assert str(compare([10] * len(theirs), theirs)) == words


def test_too_few_repetitions_are_refused() -> None:
    """A median of three is no figure."""
    assert run_bench("--repetitions", "3").returncode == 2


def test_different_bytes_end_the_benchmark() -> None:
    """Speed counts only for equal tensors."""
    with pytest.raises(AssertionError, match="weight differs"):
        assert_equal({"weight": torch.zeros(2)}, {"weight": torch.ones(2)})
