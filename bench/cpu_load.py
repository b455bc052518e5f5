"""The loader on this CPU against ``safetensors.torch.load_file``, on the same files in turn.

Two figures a load: until it *returned*, and until every page of every tensor had been *touched*. Only the
second compares like with like, since either side may leave pages for later. What the process *worked* is its processor
time until then: what other work on the machine adds is not in it. ``cached`` reads files that lie
in the page cache, ``cold`` has the kernel drop them before each load.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from remote_agent.devices import open_device
from remote_agent.loader.checkpoint import examine
from remote_agent.loader.load import load
from remote_agent.protocol.messages import WeightsPolicy

SHARDS = 3
TENSOR_BYTES = 8 << 20
PAGE_BYTES = 4096

Tensors = dict[str, torch.Tensor]


@dataclass
class Timings:
    """Nanoseconds of each load, in the order they were taken."""

    returned_ns: list[int] = field(default_factory=list)
    touched_ns: list[int] = field(default_factory=list)
    worked_ns: list[int] = field(default_factory=list)


def write_checkpoint(folder: Path, size_bytes: int) -> list[Path]:
    """Write seeded random bfloat16 tensors of about that size in three shards; return the shards."""
    generator = torch.Generator().manual_seed(1)
    per_shard = max(1, size_bytes // SHARDS // TENSOR_BYTES)
    paths = []
    for shard in range(SHARDS):
        tensors = {
            f"shards.{shard}.tensors.{number}": torch.randn(
                (1024, TENSOR_BYTES // 2048), generator=generator
            ).bfloat16()
            for number in range(per_shard)
        }
        paths.append(folder / f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors")
        save_file(tensors, paths[-1])
    _write_index(folder, paths)
    return paths


def measure(folder: Path, shards: list[Path], repetitions: int, is_cold: bool) -> dict[str, Timings]:
    """Return each side's timings; the sides take turns, and which one begins alternates.

    Raises: AssertionError if the sides give different bytes.
    """
    sides: dict[str, Callable[[], Tensors]] = {
        "glowplug": lambda: load_ours(folder),
        "safetensors": lambda: load_theirs(shards),
    }
    assert_equal(sides["glowplug"](), sides["safetensors"]())
    timings = {name: Timings() for name in sides}
    for repetition in range(repetitions):
        order = list(sides) if repetition % 2 == 0 else list(reversed(sides))
        for name in order:
            gc.collect()
            if is_cold:
                drop_from_cache(shards)
            begun, worked = time.perf_counter_ns(), time.process_time_ns()
            tensors = sides[name]()
            timings[name].returned_ns.append(time.perf_counter_ns() - begun)
            touch(tensors)
            timings[name].touched_ns.append(time.perf_counter_ns() - begun)
            timings[name].worked_ns.append(time.process_time_ns() - worked)
            del tensors
    return timings


def load_ours(folder: Path) -> Tensors:
    """Load with Glowplug, headers and checks included."""
    checkpoint = examine(folder).checkpoint
    if checkpoint is None:
        raise RuntimeError(f"{folder} was refused")
    device = open_device("cpu")
    return load(checkpoint, device, WeightsPolicy(), progress=lambda done, total: None).tensors


def load_theirs(shards: list[Path]) -> Tensors:
    """Load shard after shard with the safetensors library."""
    tensors: Tensors = {}
    for path in shards:
        tensors.update(load_file(path))
    return tensors


def touch(tensors: Tensors) -> int:
    """Read one byte of every page of every tensor."""
    return sum(int(tensor.view(torch.uint8).flatten()[::PAGE_BYTES].sum()) for tensor in tensors.values())


def drop_from_cache(paths: list[Path]) -> None:
    """Have the kernel drop the files' clean pages."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def assert_equal(ours: Tensors, theirs: Tensors) -> None:
    """Compare every tensor's bytes."""
    if ours.keys() != theirs.keys():
        raise AssertionError(f"the tensors differ: {sorted(ours.keys() ^ theirs.keys())[:5]}")
    for name, tensor in ours.items():
        if not torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)):
            raise AssertionError(f"{name} differs")


def _write_index(folder: Path, paths: list[Path]) -> None:
    import json

    from safetensors import safe_open

    places = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            places.update(dict.fromkeys(file.keys(), path.name))
    index = {"metadata": {"total_size": sum(path.stat().st_size for path in paths)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
