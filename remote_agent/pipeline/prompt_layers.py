"""A model's pass over a prompt whose next token is all that is wanted, as a graph of the device is to have it.

transformers makes a mask while a stream is captured where an ordinary pass leaves it out; attention takes a slower
kernel then, and compiled layers find no function. So each layer gets what it got in an ordinary pass over the same ids.

Where the recipe's layers are compiled, they are compiled once more for this pass alone: for its one shape, and without
a cache.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remote_agent.pipeline import side_by_side
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.compilation import find_repeated_layer
from remote_agent.pipeline.compile_attempt import TOLERANCE, CompileAttempt
from remote_agent.pipeline.compile_cache import CompileCache
from remote_agent.pipeline.compile_key import describe_key, digest_source
from remote_agent.pipeline.forward import last_logits
from remote_agent.pipeline.shared_layer import LayerFunctions, SharedLayer
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import CompilePolicy, Shape

MASK = "attention_mask"

Call = Callable[..., Any]


@dataclass(frozen=True)
class PromptPass:
    """``layers`` are called as ``calls`` say. ``leaves_cache``: the pass leaves one, which nobody needs.

    The first pass is an ordinary one, not captured. ``functions``: what the layers were compiled to for it.
    """

    warm: Warm
    layers: Sequence[nn.Module]
    calls: Sequence[Call]
    leaves_cache: bool
    functions: LayerFunctions | None = None

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return what follows each sequence of int64[batch, tokens]: logits, [batch, vocabulary]."""
        with calling(self.layers, self.calls):
            return last_logits(self.warm, ids, self.leaves_cache)


class AsUnmasked:
    """Calls a layer; without a mask if its first call had none."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_unmasked: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_unmasked is None:
            self._is_unmasked = MASK in kwargs and kwargs[MASK] is None
        return self._call(*args, **{**kwargs, MASK: None} if self._is_unmasked else kwargs)


def plan_pass(warm: Warm, ids: torch.Tensor, policy: CompilePolicy, cache_root: Path, measure: Measure) -> PromptPass:
    """Return the pass over ids of this shape, compiled for it where ``policy`` has compiled layers that are in use.

    The span says whether: ``prompt``. A model that was compiled whole is passed as it is.
    """
    layers = find_repeated_layer(warm.model)
    made: list[Call | None] = [layer._compiled_call_impl for layer in layers]
    is_layered = policy.mode == "layer" and any(made)
    if policy.mode == "model" and warm.model._compiled_call_impl is not None:
        # Compiled code was compared with eager for passes that leave a cache.
        return PromptPass(warm, (), (), leaves_cache=True)
    functions = compile_for(warm, layers, ids, policy, cache_root, measure) if is_layered else None
    if functions is not None:
        made = [SharedLayer(layer, position, functions) for position, layer in enumerate(layers)]
    calls = [AsUnmasked(call or layer._call_impl) for call, layer in zip(made, layers, strict=True)]
    return PromptPass(warm, layers, calls, is_layered and functions is None, functions)


def compile_for(
    warm: Warm, layers: tuple[nn.Module, ...], ids: torch.Tensor, policy: CompilePolicy, root: Path, measure: Measure
) -> LayerFunctions | None:
    """Return the layers' functions for passes over ids of this shape that leave no cache; None if they are not right.

    They are kept and found as other compiled layers are, under a key of their own. Nothing is changed in ``layers``.
    """
    told = Measure(time.monotonic_ns())
    shape = Shape(int(ids.shape[0]), int(ids.shape[1]))
    key = {
        **describe_key(warm, policy, (shape,)),
        "pass": "one shape, no cache",
        "pass code": digest_source(side_by_side.__name__),
    }
    run = partial(run_once, warm, ids)
    make = partial(LayerFunctions, dynamic=False, options=side_by_side.OPTIONS)
    with calling(layers, [None] * len(layers)):
        attempt = CompileAttempt(layers, True, run, run(), TOLERANCE[warm.dtype], told, make)
        problem = attempt.compile_with(CompileCache(root, key))
    measure.extra["prompt"] = (problem or f"compiled: {told.reason}")[:500]
    measure.extra["prompt_ns"] = time.monotonic_ns() - told.start_mono_ns
    for name in ("cache", "compiled_difference", "ahead"):
        if name in told.extra:
            measure.extra[f"prompt_{name}"] = told.extra[name]
    return attempt.functions if problem is None else None


def run_once(warm: Warm, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the logits after ids, as `CompileAttempt` compares them."""
    return [last_logits(warm, ids, leaves_cache=False)]


@contextlib.contextmanager
def calling(layers: Sequence[nn.Module], calls: Sequence[Call | None]) -> Iterator[None]:
    """Have each layer called otherwise, where `nn.Module.compile` would put its own; as before afterwards."""
    before = [layer._compiled_call_impl for layer in layers]
    try:
        for layer, call in zip(layers, calls, strict=True):
            layer._compiled_call_impl = call
        yield
    finally:
        for layer, call in zip(layers, before, strict=True):
            layer._compiled_call_impl = call
