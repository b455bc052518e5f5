"""Stage ``compile``: kernels warmed at the recipe's shapes, and compiled where the recipe asks for it.

Warming always runs real forward passes. A compiled module is used only after its output at every
shape was compared with the eager one; otherwise the model stays eager and the span says why.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from remote_agent import caches
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.compile_attempt import TOLERANCE, CompileAttempt
from remote_agent.pipeline.compile_cache import CompileCache
from remote_agent.pipeline.compile_key import describe_key
from remote_agent.pipeline.failures import one_line
from remote_agent.pipeline.forward import Inputs, embed, make_draw, plain_ids, prepare_inputs, refuse_length, steps
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import CompilePolicy, FirstRequest, Sampling, Shape, StageStatus

REHEARSED = "rehearsed while the weights were on their way"

DECODE_STEPS = 2
"""Passes after the prompt's own: the first with a cache, and one with a cache that has grown."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SETTINGS = frozenset({bool, int, float, str, type(None)})
"""Types of a module's own attributes that choose what it does."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Compiled:
    """Whether compiled code is in use, and why not where the recipe asked for it."""

    used: bool
    fallback: str | None = None


def warm_kernels(
    warm: Warm,
    request: FirstRequest,
    policy: CompilePolicy,
    cache_root: Path,
    measure: Measure,
    progress: Progress,
    *,
    is_rehearsed: bool = False,
) -> Compiled:
    """Run the model at every shape of the request, compiled if ``policy`` says so and it gives the eager result.

    With ``is_rehearsed`` one layer ran at all of them in this process: where the others are like it, and nothing is
    to be compiled, nothing is run again.
    """
    shapes = choose_shapes(warm, request)
    measure.extra["shapes"] = ", ".join(f"{shape.batch}x{shape.tokens}" for shape in shapes)
    if is_rehearsed and policy.mode == "off" and has_like_layers(warm):
        measure.status = StageStatus.REUSED
        measure.reason = REHEARSED
        measure.extra.update(mode=policy.mode, rehearsed=True)
        return Compiled(False)
    start = time.monotonic_ns()
    eager = run_shapes(warm, shapes, request.sampling, progress)
    measure.extra["eager_ns"] = time.monotonic_ns() - start
    measure.extra["mode"] = policy.mode
    if policy.mode == "off":
        return Compiled(False)
    root = Path(policy.cache_directory).expanduser() if policy.cache_directory else cache_root
    problem = caches.find_cache_problem(root)
    if problem is not None:
        return _fall_back(measure, f"cache directory unusable: {problem}; compile.cache_directory names another")
    caches.use_cache(root, os.environ)
    measure.extra["cache_directory"] = str(root)
    parts = find_repeated_layer(warm.model) if policy.mode == "layer" else (warm.model,)
    if not parts:
        return _fall_back(measure, f"{type(warm.model).__name__} has no repeated layer to compile")
    start = time.monotonic_ns()
    cache = CompileCache(root, describe_key(warm, policy, shapes))
    measure.extra["key_ns"] = time.monotonic_ns() - start
    run = functools.partial(run_shapes, warm, shapes, request.sampling, progress)
    attempt = CompileAttempt(parts, policy.mode == "layer", run, eager, TOLERANCE[warm.dtype], measure)
    problem = attempt.compile_with(cache)
    return Compiled(True) if problem is None else _fall_back(measure, problem)


def choose_shapes(warm: Warm, request: FirstRequest) -> tuple[Shape, ...]:
    """Return the shapes to warm, each once: the recipe's and the request's own."""
    own = prepare_inputs(warm, request).ids.shape
    shapes = tuple(dict.fromkeys((*request.shapes, Shape(int(own[0]), int(own[1])))))
    for shape in shapes:
        refuse_length(warm, shape.tokens)
    return shapes


def run_shapes(
    warm: Warm,
    shapes: tuple[Shape, ...],
    sampling: Sampling,
    progress: Progress,
    *,
    decodes: Callable[[], bool] = lambda: True,
) -> list[torch.Tensor]:
    """Run the model once at each shape and return what it gave, on the device: logits a step, or embeddings.

    A pass that goes on from a cache is made only while ``decodes`` says so.
    """
    results: list[torch.Tensor] = []
    draw = make_draw(sampling, warm.device)
    with torch.inference_mode():
        for done, shape in enumerate(shapes, start=1):
            inputs = Inputs(plain_ids(warm, shape.batch, shape.tokens), {})
            if warm.kind == "encode":
                inputs = Inputs(inputs.ids, {"attention_mask": torch.ones_like(inputs.ids)})
                results.append(embed(warm, inputs))
            else:
                # Always goes on with id 0, so that a near tie can't send two runs different ways.
                passes = steps(warm, inputs, lambda logits: draw(logits) * 0)
                results.append(next(passes)[1])
                for _ in range(_decode_steps(warm, shape)):
                    if decodes():
                        results.append(next(passes)[1])
            progress(done, len(shapes))
    return results


def find_repeated_layer(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers of the largest list of like modules, which one compiled layer serves."""
    lists = [
        tuple(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0 and len({type(child) for child in module}) == 1
    ]
    return max(lists, key=lambda layers: sum(p.numel() for layer in layers for p in layer.parameters()), default=())


def has_like_layers(warm: Warm) -> bool:
    """Tell whether every layer runs the kernels that the first one does, whatever their weights are.

    All are alike in modules, shapes and settings, and none routes tokens: how many come to an expert, weights decide.
    """
    kinds = getattr(warm.config.get_text_config(), "layer_types", None) or ()
    if len(set(kinds)) > 1:
        return False
    layers = find_repeated_layer(warm.model)
    if not layers or _has_experts(layers[0]):
        return False
    return all(_is_like(layers[0], layer, number) for number, layer in enumerate(layers))


def _has_experts(layer: nn.Module) -> bool:
    """Whether a layer has weights of several experts: a list of modules, or one tensor for all of them."""
    return any(
        isinstance(module, nn.ModuleList)
        or (not isinstance(module, CONVOLUTIONS) and any(p.dim() > 2 for p in module.parameters(recurse=False)))
        for module in layer.modules()
    )


def _is_like(first: nn.Module, other: nn.Module, number: int) -> bool:
    """Whether two modules differ in nothing but weights, and in what the layer ``number`` has where the first has 0."""
    settings, others = vars(first), vars(other)
    if type(first) is not type(other) or settings.keys() != others.keys():
        return False
    for name, value in settings.items():
        if type(value) in SETTINGS and value is not others[name] and not _is_same(value, others[name], number):
            return False
    if first._modules.keys() != other._modules.keys() or _parameters(first) != _parameters(other):
        return False
    pairs = zip(first._modules.values(), other._modules.values(), strict=True)
    return all(one is two or (one is not None and two is not None and _is_like(one, two, number)) for one, two in pairs)


def _is_same(value: object, found: object, number: int) -> bool:
    if type(value) is not type(found):
        return False
    return value == found or (type(value) is int and (value, found) == (0, number))


def _parameters(module: nn.Module) -> list[tuple[object, ...]]:
    return [(name, p.shape, p.dtype) for name, p in module._parameters.items() if p is not None]


def _decode_steps(warm: Warm, shape: Shape) -> int:
    limit = getattr(warm.config.get_text_config(), "max_position_embeddings", None)
    return DECODE_STEPS if not isinstance(limit, int) else max(0, min(DECODE_STEPS, limit - shape.tokens))


def _fall_back(measure: Measure, reason: str) -> Compiled:
    measure.reason = one_line(f"eager: {reason}")
    measure.extra["compiled"] = False
    return Compiled(False, measure.reason)
