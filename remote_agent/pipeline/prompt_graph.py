"""The prompt's pass as one graph of the device: the same kernels at the same addresses, without Python between them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from remote_agent.devices import Device
from remote_agent.devices.base import Replay
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.failures import brief
from remote_agent.pipeline.forward import likeliest_next, plain_ids, prepare_inputs
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import FirstRequest


@dataclass(frozen=True)
class PromptGraph:
    """Captured for one shape of ids, int64[batch, tokens]; ``chosen``, int64[batch], is written by each replay."""

    ids: torch.Tensor
    chosen: torch.Tensor
    replay: Replay

    def fits(self, ids: torch.Tensor, request: FirstRequest) -> bool:
        """Whether the request's whole answer is what the graph gives: the likeliest id after ids of its shape."""
        return ids.shape == self.ids.shape and request.max_new_tokens == 1 and request.sampling.temperature == 0

    def answer(self, ids: torch.Tensor) -> list[int]:
        """Return the likeliest next id of each sequence, on the host."""
        self.ids.copy_(ids, non_blocking=True)
        self.replay()
        tokens: list[int] = self.chosen.tolist()  # waits for the device
        return tokens


def capture_prompt(
    warm: Warm, request: FirstRequest, is_compiled: bool, device: Device, measure: Measure
) -> PromptGraph | None:
    """Return a graph of the request's prompt pass; None, and why in the span, where there is none."""
    begun = time.monotonic_ns()
    if warm.kind != "generate":
        measure.extra["graph"] = "none: an encoder's answer is no token"
        return None
    ids = prepare_inputs(warm, request).ids.clone()
    try:
        # Compiled functions were compared with eager for passes that leave a cache, and serve no others.
        captured = device.capture(lambda: likeliest_next(warm, ids, leaves_cache=is_compiled))
    except Exception as error:  # whatever a model does that can't be captured: it is asked eagerly then
        measure.extra["graph"] = f"none: {brief(error)}"[:500]
        return None
    if captured is None:
        measure.extra["graph"] = f"none: {device.kind} has no graphs"
        return None
    measure.extra["graph"] = f"{ids.shape[0]}x{ids.shape[1]}"
    measure.extra["graph_ns"] = time.monotonic_ns() - begun
    return PromptGraph(ids, *captured)


def has_plain_ids(request: FirstRequest, graph: PromptGraph) -> bool:
    """Whether the request's ids are known without looking: no prompt, and the shape that was captured."""
    return request.prompt is None and (request.batch, request.prompt_tokens) == tuple(graph.ids.shape)


def ids_for(warm: Warm, request: FirstRequest, graph: PromptGraph) -> torch.Tensor:
    """Return the request's ids, quickly where their shape is the graph's: that one was checked against the model."""
    if has_plain_ids(request, graph):
        return plain_ids(warm, request.batch, request.prompt_tokens)
    return prepare_inputs(warm, request).ids
