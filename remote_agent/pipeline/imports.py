"""What a worker needs imported before it starts, and the settings that must stand before that.

Imports only: no tensor operation and no compile may run here, since their thread
pools would hang a process forked afterwards.
"""

from __future__ import annotations

import gc
import getpass
import importlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

QUIET_IMPORTS = {
    **dict.fromkeys(THREAD_VARIABLES, "1"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of a zygote: with these, and within `gpus_counted_in_child`, importing leaves one thread and no file of
the driver open."""

OVERRIDABLE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Set unless the host says otherwise. Waiting threads that spin cost fifty times the work where workers share
processors (two cores, three workers: 5 ms became 240 ms); OpenMP reads this once, when torch is imported."""

WORKER_ENVIRONMENT = {name: value for name, value in QUIET_IMPORTS.items() if name not in THREAD_VARIABLES}

REQUIRED = ("torch", "numpy", "safetensors", "transformers")

OPTIONAL = (
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.cache_utils",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.processing_utils",
    "transformers.tokenization_utils_base",
    "transformers.tokenization_utils_fast",
    "transformers.tokenization_utils_tokenizers",
    "transformers.core_model_loading",
    "transformers.conversion_mapping",
    "torch._dynamo.utils",
    "torch._dynamo.aot_compile",
    "torch._dynamo.package",
    "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch.fx.experimental.validator",
    "torch.utils.cpp_extension",
    "torch._inductor.compile_fx",
    "torch._inductor.codecache",
    "torch._inductor.async_compile",
    "torch._inductor.lowering",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.cpu_vec_isa",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.hooks",
    "torch._inductor.runtime.triton_heuristics",
    "triton",
    "cuda.bindings.driver",
    "cuda.bindings.runtime",
    "cuda.core",
    "remote_agent.devices.cpu",
    "remote_agent.devices.cuda",
    "remote_agent.loader.checkpoint",
    "remote_agent.loader.load",
    "remote_agent.pipeline.assign",
    "remote_agent.pipeline.attached",
    "remote_agent.pipeline.compilation",
    "remote_agent.pipeline.context",
    "remote_agent.pipeline.first_request",
    "remote_agent.pipeline.hold",
    "remote_agent.pipeline.init",
    "remote_agent.pipeline.making",
    "remote_agent.pipeline.parking",
    "remote_agent.pipeline.runner",
    "remote_agent.pipeline.serving",
    "remote_agent.pipeline.weights",
    "remote_agent.resident.host_memory",
)
"""Imported where they exist: their names differ between releases, and a CPU host has no Triton."""

DISTRIBUTIONS = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "triton", "cuda-bindings")

_PREIMPORT = re.compile(r"transformers\.models\.[a-z0-9_]+(\.[a-z0-9_]+)*")


def settle_environment(environment: MutableMapping[str, str], settings: Mapping[str, str]) -> None:
    """Put ``settings`` and what else must stand before torch is imported into ``environment``."""
    environment.update(settings)
    for name, value in OVERRIDABLE.items():
        environment.setdefault(name, value)
    name_the_user(environment)


def import_everything() -> None:
    """Import all that a run uses. Raises: ImportError if torch, transformers or safetensors is not installed."""
    with no_collections():
        for name in REQUIRED:
            importlib.import_module(name)
        import_what_exists(OPTIONAL)
        build_conversions()


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep Python's collector from its rounds: nothing that imports make is garbage, and to see that again and again
    takes a fifth of their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def build_conversions() -> None:
    """Have transformers build its table of renamed tensors, some thousand patterns that it keeps for the process."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # of any model: the table is one
    except ModuleNotFoundError:
        return  # transformers before 5 has no such table
    except Exception as error:  # another release's table is built by the first run that needs it
        print(f"transformers' conversions: {type(error).__name__}: {error}", file=sys.stderr)


def import_what_exists(names: Iterable[str]) -> tuple[str, ...]:
    """Import each module that can be imported and return the names of the others."""
    absent = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a package broken on this host must not take the others with it
            absent.append(name)
            if not isinstance(error, ModuleNotFoundError):
                print(f"import {name}: {type(error).__name__}: {error}", file=sys.stderr)
    return tuple(absent)


def import_model_code(model: Path) -> None:
    """Import transformers' module for the model that ``config.json`` names; what is wrong there is left to `assign`."""
    try:
        content = json.loads((model / "config.json").read_text(encoding="utf-8"))
        kind = str(content["model_type"]).replace("-", "_")
    except (OSError, ValueError, KeyError, TypeError):
        return
    name = f"transformers.models.{kind}.modeling_{kind}"
    if is_preimport_allowed(name):
        import_what_exists((name,))


def is_preimport_allowed(name: str) -> bool:
    """Tell whether ``name`` is one of transformers' own model modules."""
    return _PREIMPORT.fullmatch(name) is not None


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on, where installed."""
    found = {"python": sys.version.split()[0]}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def name_the_user(environment: MutableMapping[str, str]) -> None:
    """Give a user without a passwd entry a name, which parts of the compile stack insist on."""
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):
        environment["USER"] = environment["LOGNAME"] = f"uid{os.getuid()}"
