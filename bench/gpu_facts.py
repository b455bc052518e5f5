"""What a bench on a GPU host depends on, and the page cache before a run. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

QUERY = (
    "name,uuid,driver_version,memory.total,memory.used,persistence_mode,compute_mode,mig.mode.current,"
    "pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.current,power.limit,temperature.gpu"
)
PACKAGES = (
    "torch", "transformers", "safetensors", "tokenizers", "numpy", "triton", "cuda-bindings", "cuda-core",
    "nvidia-ml-py", "accelerate", "fastsafetensors", "runai-model-streamer", "instanttensor",
)  # fmt: skip


def describe_machine() -> dict[str, object]:
    """Return machine, driver and versions, as far as they can be had."""
    return {
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "python": platform.python_version(),
        "torch_cuda": _torch_cuda(),
        "packages": {name: _version(name) for name in PACKAGES},
        "nvidia_smi": _run("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"),
        "nvidia_smi_columns": QUERY,
        "cuda": _run("nvidia-smi", "--version"),
        "commit": _run("git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--verify", "--quiet", "HEAD"),
    }


def drop_from_page_cache(shards: Sequence[Path]) -> dict[str, bool]:
    """Ask the kernel to forget the shards; preflight's ``tier_from`` says whether it did."""
    for shard in shards:
        fd = os.open(shard, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return {"dropped": True}


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Return the CUDA runtime that torch was built for, without importing it."""
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations if found is not None else None
    try:
        text = (Path(next(iter(folders or ()))) / "version.py").read_text(encoding="utf-8")
    except (OSError, StopIteration):
        return None
    match = re.search(r"^cuda\b.*= *'(.+)'", text, re.MULTILINE)
    return match[1] if match else None


def _run(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout or done.stderr).strip()
