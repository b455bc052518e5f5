"""Builds a module without its parameters: those are on ``meta``, every buffer holds its real values.

Buffers that are in no checkpoint (rotary frequencies, position ids) are computed by the
model's own code. Only what that code leaves uninitialised on purpose goes to ``meta``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_UNINITIALISED = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.rand,
        torch.rand_like,
        torch.randn,
        torch.randn_like,
        torch.normal,
    }
)
"""Factories whose result a checkpoint must replace: no module computes a buffer from their values."""


class MetaFactories(TorchFunctionMode):
    """Sends the factories of uninitialised and random tensors to ``meta``; all others stay real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _UNINITIALISED and not (func is torch.normal and isinstance(args[0], torch.Tensor)):
            kwargs["device"] = "meta"
            kwargs.pop("pin_memory", None)
            kwargs.pop("generator", None)
        return func(*args, **kwargs)


def build_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return ``make()`` with its parameters on ``meta`` and its buffers on the CPU with their real values."""
    with skip_initialisation(), meta_parameters(), MetaFactories():
        return make()


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Move every parameter to ``meta`` as it is registered; parameters that are one object stay one."""
    register = nn.Module.register_parameter
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if id(param) not in moved:
                data = param.detach().to("meta")
                moved[id(param)] = (param, nn.Parameter(data, requires_grad=param.requires_grad))
            param = moved[id(param)][1]
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def skip_initialisation() -> contextlib.AbstractContextManager[None]:
    """Return transformers' own context in which no weight is drawn; its home moved between releases."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from transformers.modeling_utils import no_init_weights
    context: contextlib.AbstractContextManager[None] = no_init_weights()
    return context
