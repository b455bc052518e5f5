"""A rehearsal runs the model's own code at the request's shapes, and never costs a run more than its time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from remote_agent.devices.cpu import CpuDevice
from remote_agent.loader.checkpoint import inspect
from remote_agent.pipeline import rehearsal
from remote_agent.pipeline.rehearsal import (
    Rehearsal,
    Rehearsed,
    fill_from_pool,
    on_meta,
    one_layer,
    plan_rehearsal,
    rehearse,
)
from remote_agent.protocol.messages import FirstRequest, Shape
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import CPU, load_with_transformers, recipe_for


def result_of(rehearsal: Rehearsal) -> Rehearsed:
    rehearsal.run()
    assert rehearsal.result is not None
    return rehearsal.result


@pytest.mark.parametrize(
    "write", [checkpoints.write_llama, checkpoints.write_gpt2, checkpoints.write_mixtral, checkpoints.write_bert]
)
def test_every_kind_of_model_is_rehearsed(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every shape of the recipe and at its request's own, through the model's own embedding."""
    seen: list[tuple[int, ...]] = []
    original = torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(ids.shape))
        return original(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", forward)
    folder = write(tmp_path)
    request = FirstRequest(prompt_tokens=6, shapes=(Shape(2, 5),))

    assert rehearse(recipe_for(folder, request=request), folder, on_meta(inspect(folder)), CPU) is None
    assert {(2, 5), (1, 6)} <= set(seen)


def test_its_weights_are_one_pool_as_long_as_the_largest(tmp_path: Path) -> None:
    """So that its memory is that of one weight, whatever the model's size."""
    folder = checkpoints.write_llama(tmp_path)
    model = load_with_transformers(folder)
    largest = max(parameter.numel() for parameter in model.parameters())
    pool = torch.randn(largest)

    fill_from_pool(model, pool)

    assert {parameter.untyped_storage().data_ptr() for parameter in model.parameters()} == {
        pool.untyped_storage().data_ptr()
    }


def test_a_cpu_has_nothing_to_rehearse_and_weights_come_first(tmp_path: Path) -> None:
    """It begins on a GPU alone, and only where memory is left beside the weights."""

    class Gpu(CpuDevice):
        kind = "cuda"  # type: ignore[assignment]
        free = 0

        def memory(self) -> tuple[int, int]:
            return self.free, 1 << 40

    checkpoint = inspect(checkpoints.write_llama(tmp_path))
    recipe, gpu = recipe_for(tmp_path), Gpu()

    assert plan_rehearsal(recipe, checkpoint, CpuDevice()) is None
    gpu.free = checkpoint.bytes + rehearsal.ROOM_BYTES - 1
    assert plan_rehearsal(recipe, checkpoint, gpu) is None
    gpu.free += 1
    planned = plan_rehearsal(recipe, checkpoint, gpu)
    assert planned is not None
    assert result_of(planned).reason is None


def test_one_layer_is_a_copy(tmp_path: Path) -> None:
    """The model that is warmed keeps its layers."""
    config = load_with_transformers(checkpoints.write_llama(tmp_path, num_hidden_layers=3)).config

    assert one_layer(config).num_hidden_layers == 1
    assert config.num_hidden_layers == 3


def test_what_can_t_be_rehearsed_is_a_reason_and_not_a_failure(tmp_path: Path) -> None:
    """The stages meet the same fault and report it as theirs."""
    checkpoint = inspect(checkpoints.write_llama(tmp_path))
    (tmp_path / "config.json").unlink()

    result = result_of(Rehearsal(recipe_for(tmp_path), checkpoint, CPU))

    assert "config.json" in str(result.reason)


def test_a_model_whose_largest_weight_is_too_large_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason has the numbers."""
    folder = checkpoints.write_llama(tmp_path)
    monkeypatch.setattr(rehearsal, "POOL_LIMIT_BYTES", 1000)

    result = result_of(Rehearsal(recipe_for(folder), inspect(folder), CPU))

    assert str(result.reason).startswith("the largest weight has ")
    assert str(result.reason).endswith(" bytes, over 1000")
