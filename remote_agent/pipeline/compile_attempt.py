"""Compiles a model's parts in place, and lets them be used only if they give what eager gave."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import torch
from torch import nn

from remote_agent.pipeline.compile_cache import CompileCache
from remote_agent.pipeline.failures import brief
from remote_agent.pipeline.shared_layer import LayerFunctions, compile_settings, share_layers
from remote_agent.pipeline.timing import Measure

LOG = logging.getLogger(__name__)

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


class CompileAttempt:
    """Puts compiled code into ``parts``, or leaves them eager; never leaves code there that was not compared.

    ``run``: gives the model's results at every shape, for ``eager`` the ones to compare with. ``shares``: all parts
    are layers that one function may serve. ``make_functions``: where these are kept.
    """

    def __init__(
        self,
        parts: tuple[nn.Module, ...],
        shares: bool,
        run: Callable[[], list[torch.Tensor]],
        eager: list[torch.Tensor],
        tolerance: float,
        measure: Measure,
        make_functions: Callable[[], LayerFunctions] = LayerFunctions,
    ) -> None:
        self._parts, self._shares, self._run, self._make_functions = parts, shares, run, make_functions
        self._eager, self._tolerance, self._measure = eager, tolerance, measure
        self._counted: dict[str, int] = {}
        self.functions = make_functions()

    def compile_and_compare(self, load: Callable[[LayerFunctions], None]) -> str | None:
        """Return why the parts are eager again, or None if they are compiled and right.

        ``load``: takes from the cache what serves the layers as it is.
        """
        extra = self._measure.extra
        allow_recompiles(len(self._parts))
        self._counted, self.functions = read_counters(), self._make_functions()
        start = time.monotonic_ns()
        try:
            with compile_settings() if self._shares else contextlib.nullcontext():
                if self._shares:
                    load(self.functions)
                    extra["load_ns"] = time.monotonic_ns() - start
                    share_layers(self._parts, self.functions)
                else:
                    self._parts[0].compile(dynamic=True)
                compiled = self._run()
            extra["compiled_ns"] = time.monotonic_ns() - start
            difference = max(largest_difference(one, other) for one, other in zip(self._eager, compiled, strict=True))
            extra["compiled_difference"] = min(difference, 1e30)
            if difference <= self._tolerance:
                self.functions.seal()
                return None
            text = f"compiled output differs from eager by {difference:.3g} of its largest value"
            reason = f"{text}, over {self._tolerance:g}"
        except Exception as error:  # whatever the compile stack raises, eager still works
            reason = f"compile failed: {brief(error)}"
        for part in self._parts:
            part._compiled_call_impl = None
        return reason

    def count(self) -> dict[str, int]:
        """Return what the last compile counted: look-ups, graphs and layer functions."""
        counts = {name: value - self._counted[name] for name, value in read_counters().items()}
        return {**counts, "functions_loaded": self.functions.loaded, "functions_traced": self.functions.traced}

    def compile_with(self, cache: CompileCache) -> str | None:
        """Compile with what ``cache`` keeps, and keep what came of it; return why the parts are eager, or None.

        Entries that may be to blame for a failure are set aside for a second try, and come back if it fails as well.
        """
        problem = self.compile_and_compare(cache.load_functions)
        if problem is not None and not cache.is_empty:
            problem = self._compile_without(cache, problem)
        if problem is None:
            self._report(cache)
        return problem

    def _compile_without(self, cache: CompileCache, problem: str) -> str | None:
        try:
            cache.set_aside(problem)
        except OSError as error:
            LOG.warning("can't set the compile cache aside: %s", error)
            return problem
        forget_compiled_code()
        again = self.compile_and_compare(lambda functions: None)
        if again is not None:
            cache.put_back()
        return again

    def _report(self, cache: CompileCache) -> None:
        """Say what the cache was worth, and record the warm-up, which is complete and verified now."""
        counts = self.count()
        verdict, reason, new_artefacts = cache.judge(counts)
        extra = self._measure.extra
        extra.update(counts, new_artefacts=new_artefacts, cache=verdict, compiled=True)
        extra["ahead"] = self._shares and self.functions.not_ahead is None
        if self.functions.not_ahead is not None:
            extra["not_ahead"] = self.functions.not_ahead
        start = time.monotonic_ns()
        try:
            cache.keep(self.functions, verdict)
        except Exception as error:  # a full disk, or what torch raises for a function that it can't save after all
            reason = f"{reason}; not recorded: {brief(error)}"
        extra["save_ns"] = time.monotonic_ns() - start
        self._measure.reason = reason


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value of ``one``; infinite where either is not finite."""
    if one.shape != other.shape or not all(bool(torch.isfinite(tensor).all()) for tensor in (one, other)):
        return float("inf")
    scale = float(one.float().abs().max()) or 1.0
    return float((one.float() - other.float()).abs().max()) / scale


def read_counters() -> dict[str, int]:
    """Return torch's own counts of graphs and cache look-ups so far."""
    from torch._dynamo.utils import counters

    return {name: int(counters[group][key]) for name, (group, key) in COUNTERS.items()}


def allow_recompiles(parts: int) -> None:
    """Let Dynamo keep a variant a layer: guards on a layer's own index would hit the default limit of 8."""
    from torch._dynamo import config

    for name, wanted in (("recompile_limit", 4 * parts + 8), ("accumulated_recompile_limit", 16 * parts + 256)):
        if hasattr(config, name):
            setattr(config, name, max(getattr(config, name), wanted))


def forget_compiled_code() -> None:
    """Let nothing that was compiled or looked up in this process serve a later compile."""
    torch.compiler.reset()
    from torch._inductor import utils

    if hasattr(utils, "clear_caches"):
        utils.clear_caches()
