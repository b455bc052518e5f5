"""Stage ``compile``: kernels warmed at the recipe's shapes, and compiled where the recipe asks for it.

Warming always runs real forward passes. A compiled module is used only after its output at every
shape was compared with the eager one; otherwise the model stays eager and the span says why.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from remote_agent import caches
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.failures import one_line
from remote_agent.pipeline.forward import Inputs, embed, make_draw, plain_ids, prepare_inputs, refuse_length, steps
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import CompilePolicy, FirstRequest, Sampling, Shape

DECODE_STEPS = 2
"""Passes after the prompt's own: the first with a cache, and one with a cache that has grown."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest difference from eager, as a share of the largest eager value, that rounding in another order explains."""

COUNTERS = {
    "graphs": ("stats", "unique_graphs"),
    "fxgraph_cache_hit": ("inductor", "fxgraph_cache_hit"),
    "fxgraph_cache_miss": ("inductor", "fxgraph_cache_miss"),
    "fxgraph_cache_bypass": ("inductor", "fxgraph_cache_bypass"),
    "aot_cache_hit": ("aot_autograd", "autograd_cache_hit"),
    "aot_cache_miss": ("aot_autograd", "autograd_cache_miss"),
    "aot_cache_bypass": ("aot_autograd", "autograd_cache_bypass"),
}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Compiled:
    """Whether compiled code is in use, and why not where the recipe asked for it."""

    used: bool
    fallback: str | None = None


def warm_kernels(
    warm: Warm, request: FirstRequest, policy: CompilePolicy, cache_root: Path, measure: Measure, progress: Progress
) -> Compiled:
    """Run the model at every shape of the request, compiled if ``policy`` says so and it gives the eager result."""
    shapes = choose_shapes(warm, request)
    measure.extra["shapes"] = ", ".join(f"{shape.batch}x{shape.tokens}" for shape in shapes)
    start = time.monotonic_ns()
    eager = run_shapes(warm, shapes, request.sampling, progress)
    measure.extra["eager_ns"] = time.monotonic_ns() - start
    measure.extra["mode"] = policy.mode
    if policy.mode == "off":
        return Compiled(False)
    root = Path(policy.cache_directory).expanduser() if policy.cache_directory else cache_root
    problem = caches.find_cache_problem(root)
    if problem is not None:
        return _fall_back(measure, f"cache directory unusable: {problem}")
    caches.use_cache(root, os.environ)
    measure.extra["cache_directory"] = str(root)
    parts = find_repeated_layer(warm.model) if policy.mode == "layer" else (warm.model,)
    if not parts:
        return _fall_back(measure, f"{type(warm.model).__name__} has no repeated layer to compile")
    counted, artefacts = read_counters(), caches.count_artefacts(root)
    run = functools.partial(run_shapes, warm, shapes, request.sampling, progress)
    difference = _compile_and_compare(parts, run, eager, TOLERANCE[warm.dtype], measure)
    counts = {name: value - counted[name] for name, value in read_counters().items()}
    new_artefacts = caches.count_artefacts(root) - artefacts
    verdict, measure.reason = judge_cache(counts, artefacts, new_artefacts)
    measure.extra.update(counts, new_artefacts=new_artefacts, cache=verdict, compiled=True)
    return Compiled(True) if difference is None else _fall_back(measure, difference)


def choose_shapes(warm: Warm, request: FirstRequest) -> tuple[Shape, ...]:
    """Return the shapes to warm, each once: the recipe's and the request's own."""
    own = prepare_inputs(warm, request).ids.shape
    shapes = tuple(dict.fromkeys((*request.shapes, Shape(int(own[0]), int(own[1])))))
    for shape in shapes:
        refuse_length(warm, shape.tokens)
    return shapes


def run_shapes(warm: Warm, shapes: tuple[Shape, ...], sampling: Sampling, progress: Progress) -> list[torch.Tensor]:
    """Run the model once at each shape and return what it gave, on the device: logits a step, or embeddings."""
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
                results.extend(next(passes)[1] for _ in range(1 + _decode_steps(warm, shape)))
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


def read_counters() -> dict[str, int]:
    """Return torch's own counts of graphs and cache look-ups so far."""
    from torch._dynamo.utils import counters

    return {name: int(counters[group][key]) for name, (group, key) in COUNTERS.items()}


def judge_cache(counts: Mapping[str, int], artefacts: int, new_artefacts: int) -> tuple[str, str]:
    """Return ``hit``, ``partial`` or ``miss``, and why. A hit: graphs were found and nothing was built.

    ``artefacts``: compiled objects in the cache before. A graph that is found because an earlier layer
    of the same run put it there is no sign of a warm cache.
    """
    found, built = counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
    if built == 0 and new_artefacts == 0 and found > 0:
        return "hit", f"cache hit: {found} graphs found, none compiled"
    text = f"{built} graphs compiled and {found} found, {new_artefacts} new objects"
    if counts["fxgraph_cache_bypass"] > 0:
        text += f"; {counts['fxgraph_cache_bypass']} graphs can't be cached"
    if artefacts == 0:
        return "miss", f"cache miss: {text}; the cache was empty"
    return ("partial" if found > 0 else "miss"), f"cache miss: {text}; the {artefacts} objects there did not serve all"


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value of ``one``; infinite where either is not finite."""
    if one.shape != other.shape or not all(bool(torch.isfinite(tensor).all()) for tensor in (one, other)):
        return float("inf")
    scale = float(one.float().abs().max()) or 1.0
    return float((one.float() - other.float()).abs().max()) / scale


def _compile_and_compare(
    parts: tuple[nn.Module, ...],
    run: Callable[[], list[torch.Tensor]],
    eager: list[torch.Tensor],
    tolerance: float,
    measure: Measure,
) -> str | None:
    """Compile ``parts`` in place; return why they are eager again, or None if they are compiled and right."""
    allow_recompiles(len(parts))
    start = time.monotonic_ns()
    try:
        for part in parts:
            part.compile(dynamic=True)
        compiled = run()
        measure.extra["compiled_ns"] = time.monotonic_ns() - start
        difference = max(largest_difference(one, other) for one, other in zip(eager, compiled, strict=True))
        measure.extra["compiled_difference"] = min(difference, 1e30)
        if difference <= tolerance:
            return None
        reason = f"compiled output differs from eager by {difference:.3g} of its largest value, over {tolerance:g}"
    except Exception as error:  # whatever the compile stack raises, eager still works
        first = next(iter(str(error).splitlines()), "")
        reason = f"compile failed: {type(error).__name__}: {first}"
    for part in parts:
        part._compiled_call_impl = None
    return reason


def allow_recompiles(parts: int) -> None:
    """Let Dynamo keep a variant a layer: guards on a layer's own index would hit the default limit of 8."""
    from torch._dynamo import config

    for name, wanted in (("recompile_limit", 4 * parts + 8), ("accumulated_recompile_limit", 16 * parts + 256)):
        if hasattr(config, name):
            setattr(config, name, max(getattr(config, name), wanted))


def _decode_steps(warm: Warm, shape: Shape) -> int:
    limit = getattr(warm.config.get_text_config(), "max_position_embeddings", None)
    return DECODE_STEPS if not isinstance(limit, int) else max(0, min(DECODE_STEPS, limit - shape.tokens))


def _fall_back(measure: Measure, reason: str) -> Compiled:
    measure.reason = one_line(f"eager: {reason}")
    measure.extra["compiled"] = False
    return Compiled(False, measure.reason)
