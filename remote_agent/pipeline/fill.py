"""Puts a checkpoint's tensors into a module on ``meta``, named as transformers itself names them.

Most checkpoints name their tensors as the module does, in its dtype: those are assigned by
torch alone. For the rest transformers 5 renames and converts in ``core_model_loading``,
transformers 4.57 in ``PreTrainedModel._get_key_renaming_mapping``; nothing is renamed here.
Tensors of the right dtype are taken as they lie, without a copy.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Fit:
    """How tensors and module fit. ``mismatched``: name, shape in the file, shape in the module."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


def fill_module(model: Any, tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> Fit:
    """Assign ``tensors`` to ``model``, tie what is tied, move its buffers to ``device``.

    What is missing stays on ``meta`` and is named in the result, as is what the model has no place for.
    """
    if importlib.util.find_spec("transformers.core_model_loading") is None:  # before transformers 5
        missing, unexpected, mismatched = _fill_by_renaming(model, tensors, dtype)
    elif _fits_as_named(model, tensors, dtype):
        missing, unexpected, mismatched = _fill_as_named(model, tensors)
    else:
        missing, unexpected, mismatched = _fill_by_conversion(model, tensors, device, dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
    missing |= {name for name, tensor in named_tensors(model) if tensor.is_meta}
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    known = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    return Fit(_without(missing, ignored), _without(unexpected, known), tuple(sorted(mismatched)))


def named_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer by name, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


Mismatches = set[tuple[str, tuple[int, ...], tuple[int, ...]]]


def _fits_as_named(model: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> bool:
    """Tell whether the tensors are the module's own by name, shape and dtype, with nothing to convert or tie."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    expected = model.state_dict(keep_vars=True)
    # Tied ones of submodels are among these keys too, and an encoder whose configuration ties nothing has none.
    if set(expected) != set(tensors) or getattr(model, "all_tied_weights_keys", True) or _dtype_plan(model, dtype):
        return False
    if any(isinstance(entry, WeightConverter) for entry in get_model_conversion_mapping(model) or ()):
        return False
    return all(
        tensor.shape == expected[name].shape
        and tensor.dtype == (dtype if expected[name].is_floating_point() else expected[name].dtype)
        for name, tensor in tensors.items()
    )


def _dtype_plan(model: Any, dtype: torch.dtype) -> Any:
    """Return which tensors transformers keeps in another dtype; empty for most models."""
    return model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else getattr(model, "dtype_plan", {})


def _fill_as_named(model: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[set[str], set[str], Mismatches]:
    model.load_state_dict(dict(tensors), strict=True, assign=True)
    # Without the mark the next call would fill them anew, persistent buffers (a norm's running mean) among them.
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    # As transformers does after a load: fills the buffers that a model computes only here.
    model.initialize_weights()
    return set(), set(), set()


def _fill_by_conversion(
    model: Any, tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[set[str], set[str], Mismatches]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Its threads gain nothing where nothing is copied.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    plan = _dtype_plan(model, dtype)
    fields = inspect.signature(LoadStateDictConfig).parameters
    config = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        weight_mapping=get_model_conversion_mapping(model),
        **({"dtype_plan": plan} if "dtype_plan" in fields else {}),
    )
    takes = inspect.signature(convert_and_load_state_dict_in_model).parameters
    further = {name: value for name, value in (("tp_plan", None), ("dtype_plan", plan)) if name in takes}
    result = convert_and_load_state_dict_in_model(model=model, state_dict=dict(tensors), load_config=config, **further)
    missing, unexpected, mismatched = (
        result[:3]
        if isinstance(result[0], set)
        else (result[0].missing_keys, result[0].unexpected_keys, result[0].mismatched_keys)
    )
    missing = set(missing)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    # As transformers does after a load: fills the buffers that a model computes only here.
    model.initialize_weights()
    return missing, set(unexpected), {(name, tuple(there), tuple(here)) for name, there, here in mismatched}


def _fill_by_renaming(
    model: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[set[str], set[str], Mismatches]:
    prefix = model.base_model_prefix
    has_prefix = bool(prefix) and any(name.startswith(prefix) for name in tensors)
    expects_prefix = bool(prefix) and hasattr(model, prefix)
    names = model._get_key_renaming_mapping(
        list(tensors),
        key_mapping=getattr(model, "_checkpoint_conversion_mapping", None) or None,
        loading_base_model_from_task_state_dict=has_prefix and not expects_prefix,
        loading_task_model_from_base_state_dict=not has_prefix and expects_prefix,
    )
    expected = model.state_dict(keep_vars=True)
    state: dict[str, torch.Tensor] = {}
    mismatched: Mismatches = set()
    for source, name in names.items():
        target = expected.get(name)
        if target is None:
            continue
        tensor = tensors[source]
        if tensor.shape != target.shape:
            mismatched.add((name, tuple(tensor.shape), tuple(target.shape)))
        else:
            state[name] = tensor.to(target.dtype) if target.is_floating_point() else tensor
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    tied = {id(tensor) for name, tensor in model.state_dict(keep_vars=True).items() if name in state}
    missing = {name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in tied}
    unused = {source for source in tensors if names.get(source) not in expected}
    buffers = {name for name, _ in model.named_buffers()}
    return missing, {name for name in unused if names.get(name, name) not in buffers}, mismatched


def _without(names: Iterable[str], patterns: Iterable[str]) -> tuple[str, ...]:
    compiled = [re.compile(pattern) for pattern in patterns]
    return tuple(sorted(name for name in names if not any(pattern.search(name) for pattern in compiled)))
