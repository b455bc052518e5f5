"""The prompt's pass as one graph of the device: the same kernels at the same addresses, without Python between them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from remote_agent.devices import Device
from remote_agent.devices.base import Replay
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.compile_attempt import largest_difference
from remote_agent.pipeline.failures import brief
from remote_agent.pipeline.forward import make_draw, plain_ids, prepare_inputs, steps
from remote_agent.pipeline.prompt_layers import plan_pass
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import CompilePolicy, FirstRequest


@dataclass(frozen=True)
class PromptGraph:
    """Captured for one shape of ids, int64[batch, tokens]; ``logits``, [batch, vocabulary], are written by each replay.

    ``plain``: the ids of a request of that shape that has no prompt.
    """

    ids: torch.Tensor
    plain: torch.Tensor
    logits: torch.Tensor
    replay: Replay

    def fits(self, ids: torch.Tensor, request: FirstRequest) -> bool:
        """Whether the request's whole answer is what the graph gives: the likeliest id after ids of its shape."""
        return ids.shape == self.ids.shape and request.max_new_tokens == 1 and request.sampling.temperature == 0

    def queue(self, ids: torch.Tensor) -> Queued:
        """Have the device answer, and return before it has."""
        queued_mono_ns = time.monotonic_ns()
        with torch.inference_mode():
            self.ids.copy_(ids, non_blocking=True)
            self.replay()
            return Queued(self.logits.argmax(-1), ids.shape[1], queued_mono_ns)


@dataclass(frozen=True)
class Queued:
    """A replay that the device was told to do. ``chosen``: the likeliest id of each sequence, int64[batch]."""

    chosen: torch.Tensor
    prompt_tokens: int
    mono_ns: int

    def tokens(self) -> list[int]:
        """Return the likeliest next id of each sequence, on the host; waits for the device."""
        tokens: list[int] = self.chosen.tolist()
        return tokens


def capture_prompt(
    warm: Warm, request: FirstRequest, policy: CompilePolicy, cache_root: Path, device: Device, measure: Measure
) -> PromptGraph | None:
    """Return a graph of the request's prompt pass; None, and why in the span, where there is none.

    It was replayed once, with all that belongs to an answer: what a first time costs is paid.
    """
    begun = time.monotonic_ns()
    if not device.has_graphs or warm.kind != "generate":
        why = f"{device.kind} has no graphs" if not device.has_graphs else "an encoder's answer is no token"
        measure.extra["graph"] = f"none: {why}"
        return None
    ids = prepare_inputs(warm, request).ids.clone()
    plain = plain_ids(warm, *ids.shape)
    try:
        prompt = plan_pass(warm, ids, policy, cache_root, measure)
        graph = PromptGraph(ids, plain, *device.capture(lambda: prompt.logits(ids)))
        graph.queue(plain).tokens()
    except Exception as error:  # whatever a model does that can't be captured: it is asked eagerly then
        measure.extra["graph"] = f"none: {brief(error)}"[:500]
        return None
    if prompt.functions is not None and prompt.functions.missed:
        measure.extra["prompt"] = f"not compiled: {prompt.functions.missed} calls of layers found no function"
    measure.extra["graph"] = f"{ids.shape[0]}x{ids.shape[1]}"
    measure.extra["graph_ns"] = time.monotonic_ns() - begun
    return graph


def largest_deviation(warm: Warm, request: FirstRequest, graph: PromptGraph) -> float:
    """Return how far the last replay's logits are from an ordinary pass's, as a share of the largest of those."""
    with torch.inference_mode():
        _, logits = next(steps(warm, prepare_inputs(warm, request), make_draw(request.sampling, warm.device)))
        return largest_difference(logits, graph.logits)


def queue_request(warm: Warm, request: FirstRequest, graph: PromptGraph) -> Queued | None:
    """Queue the request where the graph fits it; None where it does not. Raises: StageError as `prepare_inputs` does"""
    # What was captured was checked against the model.
    is_plain = request.prompt is None and (request.batch, request.prompt_tokens) == tuple(graph.plain.shape)
    ids = graph.plain if is_plain else prepare_inputs(warm, request).ids
    return graph.queue(ids) if graph.fits(ids, request) else None
