"""What the writer of checkpoints says of their sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import make_llama

SMALL = ("--layers", "1", "--hidden", "64", "--intermediate", "64", "--heads", "2", "--vocabulary", "1000")


def test_a_small_checkpoint_has_a_size_that_says_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole and of each shard; 0.00 GB would not."""
    monkeypatch.setattr(sys, "argv", ["make_llama.py", str(tmp_path), *SMALL])
    assert make_llama.main() == 0
    lines = capsys.readouterr().out.splitlines()

    assert lines[-1].startswith("0.314 MB in 2 shards, ")
    assert lines[0].startswith("model-00001-of-00002.safetensors: 0.1")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(3_650_048, "3.65 MB"), (999_400_000, "999 MB"), (999_600_000, "1.00 GB"), (13_476_839_424, "13.48 GB")],
)
def test_a_size_keeps_three_digits_or_two_decimals(size_bytes: int, text: str) -> None:
    """Around one gigabyte too."""
    assert make_llama.size_text(size_bytes) == text
