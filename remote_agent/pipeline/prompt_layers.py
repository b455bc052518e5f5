"""A model's pass over a prompt whose next token is all that is wanted, as a graph of the device is to have it.

transformers makes a mask while a stream is captured where an ordinary pass leaves it out, and attention takes a slower
kernel then. So each layer gets what it got in an ordinary pass over the same ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.forward import last_logits

MASK = "attention_mask"

Call = Callable[..., Any]


@dataclass(frozen=True)
class PromptPass:
    """``layers`` are called as ``calls`` say. ``leaves_cache``: the pass leaves one, which nobody needs.

    The first pass is an ordinary one, not captured.
    """

    warm: Warm
    layers: Sequence[nn.Module] = ()
    calls: Sequence[Call] = ()
    leaves_cache: bool = False

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


def pass_over(warm: Warm, layers: Sequence[nn.Module], leaves_cache: bool) -> PromptPass:
    """Return the pass of ``layers`` as they are called now."""
    calls = [AsUnmasked(layer._compiled_call_impl or layer._call_impl) for layer in layers]
    return PromptPass(warm, layers, calls, leaves_cache)


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
