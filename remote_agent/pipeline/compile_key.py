"""What a warm-up's compiled code depends on: software, device, model, shapes and settings, as the parts of a key."""

from __future__ import annotations

import inspect
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import remote_agent
from remote_agent import caches
from remote_agent.compile_keys import digest_text, flatten_config, shorten
from remote_agent.pipeline import shared_layer
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.imports import installed_versions
from remote_agent.protocol.messages import CompilePolicy, Shape

DRIVER_FILE = Path("/proc/driver/nvidia/version")
CPU_FILE = Path("/proc/cpuinfo")

VARIABLES = re.compile(r"(TORCHINDUCTOR|TORCHDYNAMO|TORCH_COMPILE|TRITON)_\w+|CC|CXX|CUDA_HOME")
WITHOUT = frozenset({*caches.VARIABLES, "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_VEC_ISA_OK"})
"""Variables that say where or how fast to compile, not what."""

CONFIG_WITHOUT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Where the checkpoint lay and who wrote it, and what other parts of the key say."""

UNKNOWN = "unknown"


def describe_key(
    warm: Warm, policy: CompilePolicy, shapes: tuple[Shape, ...], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the key of a warm-up; each part is short text, and no part differs between two starts of one thing."""
    versions = installed_versions()
    return {
        "torch": str(torch.__version__),
        "triton": versions.get("triton", "none"),
        **_describe_device(warm.device),
        "python": versions["python"],
        "transformers": versions.get("transformers", UNKNOWN),
        "glowplug": remote_agent.__version__,
        "glowplug code": digest_source(shared_layer.__name__),
        "model": type(warm.model).__name__,
        "model code": digest_source(type(warm.model).__module__),
        "attention": str(getattr(warm.config, "_attn_implementation", UNKNOWN)),
        "dtype": str(warm.dtype).removeprefix("torch."),
        "request": warm.kind,
        "mode": policy.mode,
        "shapes": shorten(", ".join(f"{shape.batch}x{shape.tokens}" for shape in shapes)),
        **flatten_config(warm.config.to_dict(), CONFIG_WITHOUT),
        "backend": shared_layer.BACKEND,
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "inductor settings": _digest_settings(),
        **{
            name: shorten(value)
            for name, value in sorted(environment.items())
            if VARIABLES.fullmatch(name) and name not in WITHOUT
        },
    }


def read_driver_version(file: Path = DRIVER_FILE) -> str:
    """Return the NVIDIA kernel driver's version, such as ``580.159.04``."""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _read(file))
    return found[0] if found else UNKNOWN


def _describe_device(device: torch.device) -> dict[str, str]:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return {
            "cuda": str(torch.version.cuda),
            "driver": read_driver_version(),
            "gpu": torch.cuda.get_device_name(device),
            "architecture": f"sm_{major}{minor}",
        }
    found = re.search(r"^model name\s*:\s*(.+)$", _read(CPU_FILE), re.MULTILINE)
    return {
        "cpu": shorten(found[1]) if found else platform.processor() or UNKNOWN,
        "architecture": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),  # written into the kernels
    }


def _digest_settings() -> str:
    from torch._inductor import config

    portable: Callable[[], Mapping[str, Any]] | None = getattr(config, "save_config_portable", None)
    if portable is None:
        return UNKNOWN
    return digest_text(json.dumps(portable(), sort_keys=True, default=repr), 12)


def digest_source(module: str) -> str:
    """Return a digest of a module's source, which may be edited without a new version."""
    try:
        return digest_text(inspect.getsource(sys.modules[module]), 12)
    except (OSError, TypeError, KeyError):
        return UNKNOWN


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
