"""Stage ``assign``: the model's module around tensors that are on the device already."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from remote_agent.pipeline.build import build_on_meta
from remote_agent.pipeline.failures import fail, one_line
from remote_agent.pipeline.fill import Fit, fill_module, named_tensors
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import Finding, Recipe

NAMES_SHOWN = 5

Kind = Literal["generate", "encode"]


@dataclass(frozen=True)
class Warm:
    """A model ready to be asked: module and, where the request is text, its tokenizer."""

    model: Any
    config: Any
    tokenizer: Any
    kind: Kind
    device: torch.device
    dtype: torch.dtype
    bytes: int


def assign_module(
    recipe: Recipe, folder: Path, tensors: Mapping[str, torch.Tensor], device: torch.device, measure: Measure
) -> tuple[Warm, tuple[Finding, ...]]:
    """Return the recipe's model built around ``tensors``, and what an operator should know of the fit.

    Nothing comes from a network: configuration, code and tokenizer are read in ``folder``, beside the weights.

    Raises: StageError if the configuration can't be used or a tensor is missing or of another shape.
    """
    config = read_config(folder, recipe.trust_remote_code)
    kind = choose_kind(recipe, config)
    dtype = choose_dtype(recipe.dtype, tensors)
    clock = time.monotonic_ns
    start = clock()
    model = build_model(config, kind, dtype, recipe.trust_remote_code, tensors)
    built = clock()
    fit = fill_module(model, tensors, device, dtype)
    refuse_misfit(fit, model)
    model.eval()
    model.requires_grad_(False)
    filled = clock()
    tokenizer = read_tokenizer(folder, recipe.trust_remote_code) if recipe.request.prompt is not None else None
    held = held_bytes(model)
    measure.bytes = held
    measure.extra.update(
        module=type(model).__name__,
        kind=kind,
        dtype=str(dtype).removeprefix("torch."),
        tensors=len(tensors),
        build_ns=built - start,
        fill_ns=filled - built,
        tokenizer_ns=clock() - filled,
    )
    return Warm(model, config, tokenizer, kind, device, dtype, held), describe_fit(fit, type(model).__name__)


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """Return the model's configuration. Raises: StageError if it is absent, unreadable or not allowed."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise fail("config_missing", f"{path}: {error.strerror}; the weights alone do not say what they are") from error
    except ValueError as error:
        raise fail("config_unusable", f"{path}: {error}") from error
    if isinstance(content, dict) and content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method", "unknown")
        raise fail("quantized", f"{path}: quantized weights ({method}) can't be run natively; use an engine recipe")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises what it likes for a configuration it can't use
        raise fail("config_unusable", f"{path}: {one_line(str(error))}") from error


def choose_kind(recipe: Recipe, config: Any) -> Kind:
    """Return what the model is asked to do: the recipe's word, or what its architecture is for."""
    if recipe.request.kind != "auto":
        return recipe.request.kind
    architectures = getattr(config, "architectures", None) or ()
    return "generate" if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures) else "encode"


def choose_dtype(wanted: str, tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype to run in: the recipe's, or the one that most bytes of the files have."""
    if wanted != "auto":
        chosen: torch.dtype = getattr(torch, wanted)
        return chosen
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    if not sizes:
        raise fail("no_float_tensors", f"none of the {len(tensors)} tensors is of a floating-point dtype")
    found = max(sizes, key=lambda dtype: sizes[dtype])
    if found not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise fail("quantized", f"most bytes are {found}, which can't be run natively; name a dtype or use an engine")
    return found


def build_model(
    config: Any, kind: Kind, dtype: torch.dtype, trust_remote_code: bool, tensors: Mapping[str, torch.Tensor]
) -> Any:
    """Return the module for ``kind`` with its parameters on ``meta``; without a pooler where the file has none."""
    from transformers import AutoModel, AutoModelForCausalLM

    auto = AutoModelForCausalLM if kind == "generate" else AutoModel
    options: dict[str, object] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    try:
        cls = auto._model_mapping.get(type(config), None)
        cls = cls[0] if isinstance(cls, (tuple, list)) else cls
        has_pooler = any(".pooler." in f".{name}" for name in tensors)
        if cls is not None and not has_pooler and "add_pooling_layer" in inspect.signature(cls.__init__).parameters:
            options["add_pooling_layer"] = False
        return build_on_meta(lambda: auto.from_config(config, **options))
    except (ValueError, OSError, ImportError, AttributeError, TypeError, KeyError) as error:
        kinds = "causal language model" if kind == "generate" else "encoder"
        names = ", ".join(getattr(config, "architectures", None) or ("no architecture named",))
        raise fail("model_unsupported", f"no {kinds} can be built for {names}: {one_line(str(error))}") from error


def read_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """Return the checkpoint's own tokenizer. Raises: StageError if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # as with configurations
        text = one_line(str(error))
        raise fail("tokenizer_missing", f"{folder}: the request has a prompt and no tokenizer loads: {text}") from error


def refuse_misfit(fit: Fit, model: Any) -> None:
    """Raise StageError if a tensor is missing, of another shape, or nowhere but on ``meta``."""
    kind = type(model).__name__
    if fit.mismatched:
        name, there, here = fit.mismatched[0]
        raise fail(
            "shape_mismatch",
            f"{len(fit.mismatched)} tensors do not fit {kind}: {name} is {list(there)} in the file, {list(here)} there",
        )
    if fit.missing:
        raise fail("missing_tensors", f"{len(fit.missing)} tensors of {kind} are in no shard: {_some(fit.missing)}")
    empty = tuple(name for name, tensor in named_tensors(model) if tensor.is_meta)
    if empty:
        raise fail("missing_tensors", f"{len(empty)} tensors of {kind} have no values after assigning: {_some(empty)}")


def describe_fit(fit: Fit, kind: str) -> tuple[Finding, ...]:
    """Return a finding for tensors that the model has no place for."""
    if not fit.unexpected:
        return ()
    text = f"{len(fit.unexpected)} tensors of the checkpoint are not part of {kind}: {_some(fit.unexpected)}"
    return (Finding("unexpected_tensors", "info", text),)


def held_bytes(model: Any) -> int:
    """Return the bytes of memory behind all parameters and buffers, shared storages counted once."""
    storages = {
        (str(storage.device), storage.data_ptr()): storage.nbytes()
        for storage in (tensor.untyped_storage() for _, tensor in named_tensors(model))
    }
    return sum(storages.values())


def _some(names: tuple[str, ...]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
