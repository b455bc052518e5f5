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
from remote_agent.protocol.messages import FirstRequest, Sampling, Shape
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


@pytest.mark.parametrize(("has_time", "passes"), [(True, 3), (False, 1)])
def test_what_follows_a_prompt_is_rehearsed_while_there_is_time(
    has_time: bool, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token needs the prompt's own pass alone."""
    lengths: list[int] = []
    original = torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return original(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", forward)
    folder = checkpoints.write_llama(tmp_path)
    recipe = recipe_for(folder, request=FirstRequest(prompt_tokens=6))

    rehearse(recipe, folder, on_meta(inspect(folder)), CPU, lambda: has_time)

    assert lengths == [6, 1, 1][:passes]


def test_a_rehearsal_learns_from_the_load_s_progress_that_it_is_over(tmp_path: Path) -> None:
    """What the caller is told stays the same."""
    told: list[tuple[int, int]] = []
    folder = checkpoints.write_llama(tmp_path)
    rehearsal = Rehearsal(recipe_for(folder), inspect(folder), CPU)
    report = rehearsal.watch(lambda done, total: told.append((done, total)))

    report(0, 8)
    assert not rehearsal.is_loaded
    report(8, 8)
    assert rehearsal.is_loaded
    assert told == [(0, 8), (8, 8)]


@pytest.mark.parametrize(
    ("prompt", "temperature", "is_of_request"), [(None, 0, True), ("how long is this?", 0, False), (None, 0.7, False)]
)
def test_what_a_rehearsal_can_not_know_or_do_is_warmed_once_more(
    prompt: str | None, temperature: float, is_of_request: bool, tmp_path: Path
) -> None:
    """A text has the length that its tokenizer gives, and a draw by chance has kernels of its own."""
    folder = checkpoints.write_llama(tmp_path)
    request = FirstRequest(prompt=prompt, prompt_tokens=6, sampling=Sampling(temperature=temperature))
    recipe = recipe_for(folder, request=request)

    assert result_of(Rehearsal(recipe, inspect(folder), CPU)).is_of_request is is_of_request


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
