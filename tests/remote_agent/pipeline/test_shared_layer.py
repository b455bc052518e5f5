"""One compiled function serves all layers that are alike, and gives what each of them gives by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_agent.pipeline import shared_layer
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.compilation import find_repeated_layer, run_shapes
from remote_agent.pipeline.compile_attempt import allow_recompiles, largest_difference, read_counters
from remote_agent.pipeline.forward import cache_argument
from remote_agent.pipeline.shared_layer import LayerFunctions, SharedLayer, compile_settings, share_layers
from remote_agent.protocol.messages import Sampling, Shape
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import assign_warm

SHAPES = (Shape(1, 8), Shape(1, 5))
"""The first is as long as a head is wide: no length may be fixed for being equal to something else."""


@pytest.fixture(autouse=True)
def clean_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled code of one test does not serve another, and none waits for a C++ compiler."""
    monkeypatch.setattr(shared_layer, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(warm: Warm, *shapes: Shape) -> list[torch.Tensor]:
    return run_shapes(warm, shapes, Sampling(), lambda done, total: None)


def share(warm: Warm, functions: LayerFunctions) -> None:
    share_layers(find_repeated_layer(warm.model), functions)


def unshare(warm: Warm) -> None:
    for layer in find_repeated_layer(warm.model):
        layer._compiled_call_impl = None  # type: ignore[assignment]


def compile_layers(warm: Warm, *shapes: Shape) -> tuple[LayerFunctions, list[torch.Tensor]]:
    """Run the model compiled and return its functions and results."""
    functions = LayerFunctions()
    with compile_settings():
        share(warm, functions)
        return functions, run(warm, *shapes)


def assert_close(ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert max(largest_difference(one, other) for one, other in zip(ones, others, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("write", "layers", "functions"),
    [
        (checkpoints.write_llama, {"num_hidden_layers": 8}, 2),
        (checkpoints.write_gpt2, {"n_layer": 8}, 2),
        (checkpoints.write_mixtral, {"num_hidden_layers": 4}, 2),
        (checkpoints.write_bert, {"num_hidden_layers": 8}, 1),
    ],
)
def test_one_function_for_prompts_and_one_for_tokens_serve_every_layer_and_length(
    tmp_path: Path, write: Callable[..., Path], layers: dict[str, int], functions: int
) -> None:
    """However many layers there are; an encoder needs the first alone."""
    warm = assign_warm(write(tmp_path, **layers))
    eager = run(warm, *SHAPES)
    before = read_counters()["graphs"]

    made, compiled = compile_layers(warm, *SHAPES)

    assert (made.traced, made.not_ahead) == (functions, None)
    assert read_counters()["graphs"] - before == functions
    assert_close(eager, compiled)


def test_layers_that_differ_in_a_number_have_functions_of_their_own(tmp_path: Path) -> None:
    """What one layer computes with is not taken for another's."""
    warm = assign_warm(checkpoints.write_gpt2(tmp_path, n_layer=3, scale_attn_by_inverse_layer_idx=True))
    eager = run(warm, Shape(1, 6))

    made, compiled = compile_layers(warm, Shape(1, 6))

    assert made.traced == 3 * 2
    assert_close(eager, compiled)


def test_saved_functions_serve_another_start_without_a_trace(tmp_path: Path) -> None:
    """Loaded, they give the same for every length; what was never compared with eager runs eagerly."""
    warm = assign_warm(checkpoints.write_llama(tmp_path))
    others = (Shape(1, 3), Shape(1, 13))
    eager, eager_batch = run(warm, *others), run(warm, Shape(2, 5))
    made, _ = compile_layers(warm, Shape(1, 8))
    loaded = LayerFunctions()
    loaded.load(made.save(tmp_path))
    loaded.seal()
    share(warm, loaded)
    before = read_counters()

    assert_close(eager, run(warm, *others))
    assert all(torch.equal(one, other) for one, other in zip(eager_batch, run(warm, Shape(2, 5)), strict=True))

    assert (loaded.loaded, loaded.traced, loaded.not_ahead) == (2, 0, None)
    assert read_counters() == before


def test_a_loaded_function_does_not_serve_another_layer(tmp_path: Path) -> None:
    """Its guards on the layer's numbers and tensors came with it."""
    warm = assign_warm(checkpoints.write_llama(tmp_path / "one"))
    made, _ = compile_layers(warm, Shape(1, 8))
    loaded = LayerFunctions()
    loaded.load(made.save(tmp_path))
    other = assign_warm(checkpoints.write_llama(tmp_path / "other", rms_norm_eps=0.1))
    eager = run(other, Shape(1, 8))

    with compile_settings():
        share(other, loaded)
        compiled = run(other, Shape(1, 8))

    assert loaded.traced == 2
    assert_close(eager, compiled)


def test_a_cache_with_a_window_is_served_beyond_it(tmp_path: Path) -> None:
    """The window's own bookkeeping goes on, and the compiled layers see what it has kept."""
    warm = assign_warm(checkpoints.write_mistral(tmp_path))
    eager = run(warm, Shape(1, 6), Shape(1, 12))

    made, compiled = compile_layers(warm, Shape(1, 6), Shape(1, 12))

    assert made.not_ahead is None
    assert_close(eager, compiled)


def test_a_layer_that_breaks_graphs_is_compiled_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's own guards serve it, still one set for all layers; nothing is saved, and it is said why."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    original = LlamaMLP.forward

    def forward(self: Any, states: torch.Tensor) -> Any:
        torch._dynamo.graph_break()
        return original(self, states)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    warm = assign_warm(checkpoints.write_llama(tmp_path, num_hidden_layers=4))
    eager = run(warm, Shape(1, 8))
    allow_recompiles(4)

    made, compiled = compile_layers(warm, Shape(1, 8))

    assert made.not_ahead is not None
    assert made.not_ahead.startswith("Unsupported: ")
    assert made.save(tmp_path) == ()
    assert_close(eager, compiled)


def test_a_layer_with_a_cache_of_another_kind_is_compiled_in_time(tmp_path: Path) -> None:
    """Only parts whose bookkeeping is known are taken out of a cache; the rest is Dynamo's, as it is."""
    from transformers import StaticCache

    warm = assign_warm(checkpoints.write_llama(tmp_path))

    def answer() -> torch.Tensor:
        cache = StaticCache(config=warm.config, max_cache_len=16)
        with torch.no_grad():
            logits: torch.Tensor = warm.model(input_ids=torch.arange(4)[None], **{cache_argument(warm): cache}).logits
        return logits

    eager, functions = answer(), LayerFunctions()
    with compile_settings():
        share(warm, functions)
        compiled = answer()

    assert_close([eager], [compiled])
    assert (functions.traced, functions.not_ahead) == (0, "a layer's part of StaticCache is of another kind")


def test_a_layer_is_found_in_the_cache_by_the_number_its_modules_know(tmp_path: Path) -> None:
    """Its position counts only where they know none, and two numbers are one too many."""
    layers = find_repeated_layer(assign_warm(checkpoints.write_llama(tmp_path)).model)
    two = torch.nn.ModuleList(layers)

    assert shared_layer.find_number(layers[1], 7) == 1
    assert shared_layer.find_number(torch.nn.Linear(1, 1), 7) == 7
    assert shared_layer.find_number(two, 7) is None


def test_more_functions_than_sharing_could_need_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that brings a new one with every pass would compile forever."""
    monkeypatch.setattr(shared_layer, "MAX_FUNCTIONS", 1)
    warm = assign_warm(checkpoints.write_llama(tmp_path))

    with pytest.raises(RuntimeError, match="need more than 1 compiled functions"):
        compile_layers(warm, Shape(1, 8))


def test_a_layer_called_with_more_than_it_names_runs_by_itself() -> None:
    """No input is ever dropped on the way to the shared function."""

    class Sum(torch.nn.Module):
        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return torch.stack(values).sum(0)

    one = torch.ones(1)

    assert SharedLayer(Sum(), 0, LayerFunctions())(one, one).item() == 2
    assert SharedLayer(Sum(), 0, LayerFunctions())(one).item() == 1
