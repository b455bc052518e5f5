"""Kernels are warmed by real passes, and compiled code is used only when it is right."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_agent.pipeline import compilation
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.compilation import Compiled, judge_cache, largest_difference, run_shapes, warm_kernels
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import CompilePolicy, FirstRequest, Sampling, Shape
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import assign_warm

REQUEST = FirstRequest(prompt_tokens=6, shapes=(Shape(2, 5), Shape(1, 6)))

NOTHING = dict.fromkeys(compilation.COUNTERS, 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Batch and length of every input that a Llama's embedding sees."""
    seen: list[tuple[int, int]] = []
    original = torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        seen.append((ids.shape[0], ids.shape[1]))
        return original(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", forward)
    return seen


@pytest.fixture
def clean_compiler() -> Iterator[None]:
    """Compiled code of one test does not serve another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(warm: Warm, policy: CompilePolicy, root: Path) -> tuple[Compiled, Measure]:
    measure = Measure(0)
    return warm_kernels(warm, REQUEST, policy, root, measure, lambda done, total: None), measure


def fake_compile(monkeypatch: pytest.MonkeyPatch, forward: Any) -> None:
    """Let `nn.Module.compile` put ``forward`` in place, which is what it does with what it compiled."""

    def compile_in_place(self: torch.nn.Module, **options: Any) -> None:
        self._compiled_call_impl = lambda *args, **kwargs: forward(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_in_place)


def test_every_shape_is_run_with_its_decode_steps(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    """Each shape once, the request's own too, each followed by single tokens through the cache."""
    warm = assign_warm(checkpoints.write_llama(tmp_path))

    compiled, measure = run(warm, CompilePolicy(), tmp_path / "cache")

    assert compiled == Compiled(False)
    assert calls == [(2, 5), (2, 1), (2, 1), (1, 6), (1, 1), (1, 1)]
    assert measure.extra["shapes"] == "2x5, 1x6"
    assert not (tmp_path / "cache").exists()


def test_a_compiled_decoder_equals_eager_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_compiler: None
) -> None:
    """Every layer of a causal model is traced, prefill and decode, also beyond Dynamo's own limit of variants.

    Without Inductor, whose C++ takes half a minute here; the zygote's tests compile with it.
    """
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    monkeypatch.setattr(
        torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    )
    warm = assign_warm(checkpoints.write_llama(tmp_path / "model", num_hidden_layers=2))

    compiled, measure = run(warm, CompilePolicy("layer"), tmp_path / "cache")

    assert compiled == Compiled(True), measure.reason
    assert int(str(measure.extra["graphs"])) >= 4
    before = compilation.read_counters()["graphs"]
    run_shapes(warm, (Shape(1, 6),), Sampling(), lambda done, total: None)
    assert compilation.read_counters()["graphs"] == before


def test_wrong_compiled_output_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is eager again, and the reason has the numbers."""
    warm = assign_warm(checkpoints.write_llama(tmp_path / "model"))
    fake_compile(monkeypatch, lambda layer, *args, **kwargs: layer.forward(*args, **kwargs) * 1.5)

    compiled, measure = run(warm, CompilePolicy("layer"), tmp_path / "cache")

    assert not compiled.used
    assert "differs from eager by" in str(measure.reason)
    assert all(layer._compiled_call_impl is None for layer in warm.model.model.layers)


def test_a_compile_that_fails_leaves_the_model_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, no headers, a broken cache: the run goes on and says why it is eager."""

    def raise_error(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no C++ compiler here\nwith a second line")

    warm = assign_warm(checkpoints.write_llama(tmp_path / "model"))
    fake_compile(monkeypatch, raise_error)

    compiled, measure = run(warm, CompilePolicy("model"), tmp_path / "cache")

    assert compiled.fallback == "eager: compile failed: RuntimeError: no C++ compiler here"
    assert warm.model._compiled_call_impl is None
    assert measure.extra["compiled"] is False


def test_an_unusable_cache_directory_is_named(tmp_path: Path) -> None:
    """Nothing is compiled into a place where it can't be kept."""
    blocked = tmp_path / "file"
    blocked.touch()
    warm = assign_warm(checkpoints.write_llama(tmp_path / "model"))

    compiled, _ = run(warm, CompilePolicy("layer", str(blocked)), tmp_path / "cache")

    assert str(compiled.fallback).startswith(f"eager: cache directory unusable: {blocked}: ")


def test_the_repeated_layer_is_the_largest_list_of_like_modules(tmp_path: Path) -> None:
    """The decoder's layers, not the experts inside one of them."""
    warm = assign_warm(checkpoints.write_mixtral(tmp_path))

    assert compilation.find_repeated_layer(warm.model) == tuple(warm.model.model.layers)
    assert compilation.find_repeated_layer(torch.nn.Linear(2, 2)) == ()


@pytest.mark.parametrize(
    ("counts", "artefacts", "new", "verdict"),
    [
        ({"fxgraph_cache_hit": 2}, 5, 0, "hit"),
        ({"fxgraph_cache_hit": 2}, 5, 1, "partial"),
        ({"fxgraph_cache_hit": 2, "fxgraph_cache_bypass": 1}, 5, 0, "partial"),
        ({"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}, 5, 0, "partial"),
        ({"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}, 0, 3, "miss"),
        ({"fxgraph_cache_miss": 1}, 5, 3, "miss"),
        ({}, 0, 0, "miss"),
    ],
)
def test_a_hit_is_claimed_only_when_nothing_was_built(
    counts: dict[str, int], artefacts: int, new: int, verdict: str
) -> None:
    """Every look-up must have hit, and no new object may have appeared."""
    assert judge_cache({**NOTHING, **counts}, artefacts, new)[0] == verdict


def test_a_difference_is_relative_and_nan_is_never_near() -> None:
    """NaN compares false with everything, so it is caught on its own."""
    one = torch.tensor([1.0, -4.0])

    assert largest_difference(one, torch.tensor([1.0, -4.2])) == pytest.approx(0.05)
    assert largest_difference(one, torch.tensor([1.0, float("nan")])) == float("inf")
    assert largest_difference(torch.tensor([1.0, float("nan")]), one) == float("inf")
    assert largest_difference(one, torch.zeros(3)) == float("inf")
