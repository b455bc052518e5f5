"""One loader in a process of its own, driven by lines of JSON: ``python -m bench.loaders NAME FOLDER DEVICE``.

A line in is a request, ``{"do": "load", "check": true, …}``; a line out its answer. Whatever a library
prints goes to stderr. How peers are called is in `bench.peers`; times are from call to synchronised
device, with the tensors in hand; what a loader gives back after that is not counted.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.peers import PEERS, Load, Tensors
from remote_agent.devices import Device
from remote_agent.devices.cuda import CudaDevice
from remote_agent.loader.limits import Cut, LoaderLimits
from remote_agent.loader.outcome import Loaded, Memory
from remote_agent.loader.ring import PinnedRing

PINNED_BYTES = 1 << 30


class SweptDevice(CudaDevice):
    """A GPU whose pinned ring is made anew with other limits."""

    limits: LoaderLimits | None = None

    def make_ring(self) -> PinnedRing:
        return PinnedRing(self.runtime, self.ordinal, self.limits)

    def use_limits(self, limits: LoaderLimits | None) -> None:
        if limits != self.limits:
            self.ring.close()
            self.limits, self._ring = limits, None
            self._ring = self.make_ring()


def main() -> int:
    """Answer requests until stdin ends."""
    name, folder, device = sys.argv[1:4]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    shards = sorted(Path(folder).glob("*.safetensors"))
    try:
        load = LOADERS[name](Path(folder), shards, device)
        wake(device)
    except Exception as error:
        answers.write(json.dumps({"error": describe(error)}) + "\n")
        return 1
    answers.write(json.dumps({"ready": name}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = measure_ceiling() if request["do"] == "ceiling" else run_load(load, request, shards, device)
        except Exception as error:
            answer = {"error": describe(error)}
        answers.write(json.dumps(answer) + "\n")
    return 0


def run_load(load: Load, request: dict[str, Any], shards: list[Path], device: str) -> dict[str, Any]:
    """Load once and return the seconds it took; with ``check`` also how many tensors differ from safetensors'."""
    synchronise(device)
    with ExitStack() as stack:
        begun = time.perf_counter()
        tensors, figures = load(request, stack)
        synchronise(device)
        seconds = time.perf_counter() - begun
        answer = {"seconds": seconds, "tensors": len(tensors), **figures}
        if request.get("check"):
            answer["differing"] = count_differing(tensors, shards, device)
        del tensors
        gc.collect()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        wake(device)  # what the driver leaves of giving memory back to whoever wants some next is not the next load's
    return answer


def count_differing(tensors: Tensors, shards: list[Path], device: str) -> int:
    """Return how many tensors are missing or differ in a byte from what safetensors reads."""
    from safetensors.torch import load_file

    differing = found = 0
    for shard in shards:
        for name, expected in load_file(shard, device=device).items():
            found += 1
            ours = tensors.get(name)
            if ours is None or ours.dtype is not expected.dtype or ours.shape != expected.shape:
                differing += 1
            else:
                flat = (one.contiguous().reshape(-1).view(torch.uint8) for one in (ours, expected))
                differing += not torch.equal(*flat)
    return differing + abs(len(tensors) - found)


def measure_ceiling() -> dict[str, Any]:
    """Return the seconds and bytes a second of copies from one large pinned buffer."""
    source = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cuda:0")
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return {"times": times[1:], "ceiling_bytes_s": PINNED_BYTES / statistics.median(times[1:])}


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def wake(device: str) -> None:
    if device != "cpu":
        torch.ones(1 << 20, device=device)
        torch.cuda.synchronize()


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def use_glowplug(folder: Path, shards: list[Path], device: str) -> Load:
    """``path``, ``page_cache``, ``memory`` and ``limits`` of a request choose the way.

    Headers are read in the measured time.
    """
    from remote_agent.devices import open_device
    from remote_agent.loader.checkpoint import inspect
    from remote_agent.loader.load import load
    from remote_agent.protocol.messages import WeightsPolicy

    opened = open_device("cpu") if device == "cpu" else SweptDevice(device)
    opened.initialise()
    opened.open_context()

    def call(request: dict[str, Any], stack: ExitStack) -> tuple[Tensors, dict[str, Any]]:
        policy = WeightsPolicy(path=request.get("path", "auto"), page_cache=request.get("page_cache", "keep"))
        threads: list[int] = []
        progress = partial(note_threads, threads) if request.get("check") else (lambda done, total: None)
        memory = memory_of(request, opened)
        loaded = load(inspect(folder), opened, policy, progress=progress, memory=memory, settles_later=True)
        stack.callback(loaded.settle)
        return loaded.tensors, {**figures_of(loaded), **({"threads": max(threads)} if threads else {})}

    def call_with_limits(request: dict[str, Any], stack: ExitStack) -> tuple[Tensors, dict[str, Any]]:
        if isinstance(opened, SweptDevice):
            opened.use_limits(read_limits(request.get("limits")))
        return call(request, stack)

    return call_with_limits


def note_threads(found: list[int], done: int, total: int) -> None:
    """Count the loader's threads while it loads, the calling one that makes every CUDA call among them.

    Asked of checked loads alone, whose time does not count.
    """
    found.append(1 + sum(thread.name.startswith("load-") for thread in threading.enumerate()))


def memory_of(request: dict[str, Any], opened: Device) -> Memory | None:
    """Return what gives the memory that a request names: ``shared`` can outlive a process; None is torch's own."""
    if request.get("memory") != "shared":
        return None
    return lambda size_bytes: opened.share(size_bytes).tensor


def use_host(folder: Path, shards: list[Path], device: str) -> Load:
    """Every shard is registered when this returns; loads copy from there, as a run does that starts from ``host``."""
    from remote_agent.devices import open_device
    from remote_agent.loader.checkpoint import inspect
    from remote_agent.loader.load import load
    from remote_agent.loader.registrations import register_all
    from remote_agent.loader.shards import OpenShards
    from remote_agent.pipeline.imports import import_what_exists
    from remote_agent.protocol.messages import WeightsPolicy

    import_what_exists(("cuda.core",))  # as a zygote does
    opened = open_device(device)
    assert isinstance(opened, CudaDevice)
    opened.initialise()
    opened.open_context()
    headers = inspect(folder).shards
    with OpenShards(headers) as files:
        step_bytes = opened.ring.limits.registration_bytes
        kept = register_all(headers, files, opened.runtime, step_bytes, lambda done, total: None, lambda path: None)
    kept.ceiling_bytes_s = opened.ring.begin_ceiling().finish()

    def call(request: dict[str, Any], stack: ExitStack) -> tuple[Tensors, dict[str, Any]]:
        loaded = load(
            inspect(folder, known=headers), opened, WeightsPolicy(), progress=lambda done, total: None,
            memory=memory_of(request, opened), registered=kept,
        )  # fmt: skip
        return loaded.tensors, figures_of(loaded)

    return call


def figures_of(loaded: Loaded) -> dict[str, Any]:
    return {
        "path": loaded.path, "reason": loaded.reason, "load_s": loaded.duration_ns / 1e9, "bytes": loaded.bytes,
        "ceiling_bytes_s": loaded.ceiling_bytes_s, "steps_ns": loaded.steps, "counters": loaded.counters,
    }  # fmt: skip


def read_limits(given: dict[str, Any] | None) -> LoaderLimits | None:
    """Return limits from JSON: a cut is ``[readers, buffers, buffer_bytes]``; None leaves the loader's own."""
    if given is None:
        return None
    return LoaderLimits(**{name: Cut(*value) if isinstance(value, list) else value for name, value in given.items()})


LOADERS: dict[str, Callable[[Path, list[Path], str], Load]] = {
    "glowplug": use_glowplug,
    "glowplug-host": use_host,
    **PEERS,
}


if __name__ == "__main__":
    sys.exit(main())
