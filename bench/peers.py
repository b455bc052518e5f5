"""Other loaders, each called as its own documentation says is best for the case; a name for each such call.

What was looked up in their sources (safetensors 0.8, fastsafetensors 0.5, runai-model-streamer 0.17, InstantTensor
0.2.2, transformers 5) and is used here:

- fastsafetensors reads with O_DIRECT on local disks, which passes by a warm page cache: ``-buffered`` turns that off.
  GDS needs a driver of its own; ``nogds`` is the route that every host has. 16 threads and 16 MiB are its defaults.
- The Run:ai streamer reads buffered, with 16 threads asked for; ``-ring`` bounds its host buffers, which are fresh
  memory otherwise, as large as the model, and ``-direct`` has io_uring read past the page cache, 512 requests deep.
  It yields tensors of their own on a GPU.
- InstantTensor reads with O_DIRECT unless its backend is a buffered one. Its pinned buffers are kept from load to load,
  as Glowplug's ring is; tensors own their memory, its default.
- transformers places tensors on the GPU as it reads them where accelerate is there, and moves the module otherwise.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Load = Callable[[dict[str, Any], ExitStack], tuple[Tensors, dict[str, Any]]]
"""Takes a request, and a stack for what the tensors need while they live; returns them and further figures."""
Use = Callable[[Path, list[Path], str], Load]
"""Takes a folder, its shards and a device; imports the library and returns what loads."""

THREADS = 16
RING_BYTES = 4 << 30


def use_safetensors(folder: Path, shards: list[Path], device: str) -> Load:
    from safetensors.torch import load_file

    def call(request: dict[str, Any], stack: ExitStack) -> tuple[Tensors, dict[str, Any]]:
        return {name: one for shard in shards for name, one in load_file(shard, device=device).items()}, {}

    return call


def use_fastsafetensors(folder: Path, shards: list[Path], device: str) -> Load:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def call(request: dict[str, Any], stack: ExitStack) -> tuple[Tensors, dict[str, Any]]:
        loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True, max_threads=THREADS)
        stack.callback(loader.close)
        loader.add_filenames({0: [str(shard) for shard in shards]})
        buffers = loader.copy_files_to_device()
        stack.callback(buffers.close)
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}, {}

    return call


def use_runai(folder: Path, shards: list[Path], device: str) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    def call(request: dict[str, Any], stack: ExitStack) -> tuple[Tensors, dict[str, Any]]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(shard) for shard in shards], device=device)
            return dict(streamer.get_tensors()), {}

    return call


def use_instanttensor(folder: Path, shards: list[Path], device: str) -> Load:
    import instanttensor

    def call(request: dict[str, Any], stack: ExitStack) -> tuple[Tensors, dict[str, Any]]:
        paths = [str(shard) for shard in shards]
        with instanttensor.safe_open(paths, framework="pt", device=device) as file:
            return dict(file.tensors()), {}

    return call


def use_transformers(folder: Path, shards: list[Path], device: str) -> Load:
    from transformers import AutoModelForCausalLM

    has_accelerate = importlib.util.find_spec("accelerate") is not None
    placing = {"device_map": device} if has_accelerate else {}

    def call(request: dict[str, Any], stack: ExitStack) -> tuple[Tensors, dict[str, Any]]:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto", **placing).to(device)
        return {name: one.detach() for name, one in model.named_parameters()}, {"has_accelerate": has_accelerate}

    return call


def with_environment(variables: Mapping[str, str], use: Use) -> Use:
    """Return ``use`` with environment variables that its library reads; what the caller has set goes before."""

    def used(folder: Path, shards: list[Path], device: str) -> Load:
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        return use(folder, shards, device)

    return used


RUNAI = {"RUNAI_STREAMER_CONCURRENCY": str(THREADS)}
RUNAI_RING = {"RUNAI_STREAMER_MEMORY_LIMIT": str(RING_BYTES)}
RUNAI_DIRECT = {"RUNAI_STREAMER_FS_STRATEGY": "io_uring_direct,sync_buffered"}
INSTANTTENSOR = {"INSTANTTENSOR_CACHE_BUFFER": "1"}

PEERS: dict[str, Use] = {
    "safetensors": use_safetensors,
    "fastsafetensors": use_fastsafetensors,
    "fastsafetensors-buffered": with_environment({"FASTSAFETENSORS_ODIRECT": "0"}, use_fastsafetensors),
    "runai-model-streamer": with_environment(RUNAI, use_runai),
    "runai-model-streamer-ring": with_environment({**RUNAI, **RUNAI_RING}, use_runai),
    "runai-model-streamer-direct": with_environment({**RUNAI_RING, **RUNAI_DIRECT}, use_runai),
    "instanttensor": with_environment(INSTANTTENSOR, use_instanttensor),
    "instanttensor-buffered": with_environment(
        {**INSTANTTENSOR, "INSTANTTENSOR_BACKEND": "URING_BUFFERED"}, use_instanttensor
    ),
    "transformers": with_environment({"HF_HUB_OFFLINE": "1"}, use_transformers),
}
