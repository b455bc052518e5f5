"""Rehearses a model while its weights are on their way: one layer of the same sizes over memory of one value.

A first pass on a GPU pays for loading kernels, for the math library's workspaces and for choosing its
algorithms. None of that depends on the weights' values or on the number of layers, so it is done while
the loader's threads move bytes. What it can't do costs the run nothing but the time saved.

A prompt's own pass comes first, at every shape. Passes that go on from a cache follow only while bytes are still
on their way: the first token does not wait for them, and the request makes them anyway.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from remote_agent.devices import Device
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.views import torch_dtype
from remote_agent.pipeline.assign import Warm, build_model, choose_dtype, choose_kind, read_config
from remote_agent.pipeline.compilation import choose_shapes, run_shapes
from remote_agent.pipeline.failures import one_line
from remote_agent.protocol.messages import Recipe, Sampling

VALUE = 0.02
"""Of every weight: any number will do that stays one."""

POOL_LIMIT_BYTES = 4 << 30
"""Above this the largest weight alone is worth more memory than a rehearsal may take."""

ROOM_BYTES = 2 * POOL_LIMIT_BYTES
"""Device memory that must be free beside the weights: they come first."""


@dataclass(frozen=True)
class Rehearsed:
    """How long it took, and why it was left out or did not come to its end.

    ``is_of_request``: it ran at the shapes that the request will have.
    """

    duration_ns: int
    reason: str | None = None
    is_of_request: bool = False


class Rehearsal:
    """One rehearsal, done by `run` in the thread that has the device; it never raises. ``result`` is None before.

    The loader's threads run beside it; their progress goes through `watch`. ``is_loaded``: by that every byte has
    arrived.
    """

    def __init__(self, recipe: Recipe, checkpoint: Checkpoint, device: torch.device) -> None:
        self._recipe, self._checkpoint, self._device = recipe, checkpoint, device
        self.is_loaded = False
        self.result: Rehearsed | None = None

    @property
    def is_of_request(self) -> bool:
        """Whether it ran whole, at the shapes that the request will have."""
        return self.result is not None and self.result.is_of_request

    def run(self) -> None:
        begun = time.monotonic_ns()
        reason: str | None = None
        try:
            tensors = on_meta(self._checkpoint)
            reason = rehearse(self._recipe, self._checkpoint.root, tensors, self._device, lambda: not self.is_loaded)
        except Exception as error:  # the stages themselves meet the same fault and report it
            reason = one_line(f"{type(error).__name__}: {error}")
        request = self._recipe.request
        # A text's length only a tokenizer knows, and nothing was drawn by chance.
        is_of_request = reason is None and request.prompt is None and request.sampling.temperature == 0
        self.result = Rehearsed(time.monotonic_ns() - begun, reason, is_of_request)

    def watch(self, progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return ``progress``, which from then on tells the rehearsal too when every byte has arrived."""

        def report(done: int, total: int) -> None:
            self.is_loaded = done >= total
            progress(done, total)

        return report


def plan_rehearsal(recipe: Recipe, checkpoint: Checkpoint, device: Device) -> Rehearsal | None:
    """Return a rehearsal to run; None on a CPU, which has no kernels to load, and where memory is short."""
    if device.kind != "cuda" or device.memory()[0] < checkpoint.bytes + ROOM_BYTES:
        return None
    return Rehearsal(recipe, checkpoint, device.torch_device)


def on_meta(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors without their bytes; those of dtypes that torch lacks are left out."""
    found = {entry.name: (entry.shape, torch_dtype(entry)) for _, entry in checkpoint.entries()}
    return {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in found.items()
        if dtype is not None
    }


def rehearse(
    recipe: Recipe,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    has_time: Callable[[], bool] = lambda: True,
) -> str | None:
    """Run one layer of the recipe's model at its request's shapes; return why that was left out, or None.

    ``tensors`` are the checkpoint's on ``meta``: only their names, shapes and dtypes count. Passes that go on from
    a cache are made while it ``has_time``. Raises: whatever the stages would.
    """
    config = one_layer(read_config(folder, recipe.trust_remote_code))
    kind = choose_kind(recipe, config)
    dtype = choose_dtype(recipe.dtype, tensors)
    model = build_model(config, kind, dtype, recipe.trust_remote_code, tensors)
    largest = max((parameter.numel() for parameter in model.parameters()), default=0)
    if largest * dtype.itemsize > POOL_LIMIT_BYTES:
        return f"the largest weight has {largest * dtype.itemsize} bytes, over {POOL_LIMIT_BYTES}"
    fill_from_pool(model, torch.full((largest,), VALUE, dtype=dtype, device=device))
    model.eval()
    warm = Warm(model, config, None, kind, device, dtype, largest * dtype.itemsize)
    request = replace(recipe.request, prompt=None)
    # Always the likeliest id: to draw by chance from what is no number ends a context.
    run_shapes(warm, choose_shapes(warm, request), Sampling(), lambda done, total: None, decodes=has_time)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return None


def one_layer(config: Any) -> Any:
    """Return a copy of a configuration with a single layer."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = 1
    if isinstance(getattr(text, "layer_types", None), list):
        text.layer_types = text.layer_types[:1]
    return config


def fill_from_pool(model: torch.nn.Module, pool: torch.Tensor) -> None:
    """Let every weight of ``model`` be a view of ``pool``, one flat tensor as long as the largest; move its buffers."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                part = pool[: parameter.numel()].view(parameter.shape).to(parameter.dtype)
                module._parameters[name] = torch.nn.Parameter(part, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = (
                    torch.zeros(buffer.shape, dtype=buffer.dtype, device=pool.device)
                    if buffer.is_meta
                    else buffer.to(pool.device)
                )
