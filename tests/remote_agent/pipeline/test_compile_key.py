"""A key names what compiled code depends on, and nothing that differs between two starts of one thing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remote_agent.compile_keys import list_changes
from remote_agent.pipeline.compile_key import describe_key, read_driver_version
from remote_agent.protocol.messages import CompilePolicy, Shape
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import assign_warm

POLICY = CompilePolicy("layer")
SHAPES = (Shape(1, 6),)


def test_two_folders_of_one_model_have_one_key(tmp_path: Path) -> None:
    """Where a checkpoint lies and where the cache is are no part of it."""
    one = assign_warm(checkpoints.write_llama(tmp_path / "one"))
    other = assign_warm(checkpoints.write_llama(tmp_path / "other"))

    environment = {"TORCHINDUCTOR_CACHE_DIR": "/here", "TRITON_CACHE_DIR": "/there", "HOME": "/root"}
    assert describe_key(one, POLICY, SHAPES, {}) == describe_key(other, POLICY, SHAPES, environment)


def test_each_change_of_a_start_is_a_part_of_its_own(tmp_path: Path) -> None:
    """Model, shapes, mode, threads, precision and the compile stack's variables."""
    warm = assign_warm(checkpoints.write_llama(tmp_path / "one"))
    before = describe_key(warm, POLICY, SHAPES, {})
    other = assign_warm(checkpoints.write_llama(tmp_path / "other", dtype=torch.bfloat16, num_hidden_layers=3))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        now = describe_key(other, CompilePolicy("model"), (Shape(2, 7),), {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    finally:
        torch.set_num_threads(threads)

    assert {name: (old, new) for name, old, new in list_changes(before, now)} == {
        "threads": (str(threads), str(threads + 1)),
        "dtype": ("float32", "bfloat16"),
        "mode": ("layer", "model"),
        "shapes": ("1x6", "2x7"),
        "config.num_hidden_layers": ("2", "3"),
        "TORCHINDUCTOR_MAX_AUTOTUNE": (None, "1"),
    }


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC 12.2.0",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86  Fri\n", "570.86"),
        ("", "unknown"),
    ],
)
def test_the_driver_is_read_from_its_own_file(tmp_path: Path, text: str, version: str) -> None:
    """The first number with dots is the driver's."""
    (tmp_path / "version").write_text(text)

    assert read_driver_version(tmp_path / "version") == version
    assert read_driver_version(tmp_path / "absent") == "unknown"
