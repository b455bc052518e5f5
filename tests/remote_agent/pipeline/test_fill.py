"""Which checkpoints torch assigns alone, and which transformers has to convert; either way gives the file's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import core_model_loading

from remote_agent.pipeline.build import build_on_meta
from remote_agent.pipeline.fill import fill_module
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import CPU, assign_warm


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the classes of the models that transformers converted a checkpoint for."""
    convert = core_model_loading.convert_and_load_state_dict_in_model
    seen: list[str] = []

    def note(*, model: Any, **others: Any) -> Any:
        seen.append(type(model).__name__)
        return convert(model=model, **others)

    monkeypatch.setattr(core_model_loading, "convert_and_load_state_dict_in_model", note)
    return seen


def write_old_bert(folder: Path) -> Path:
    """Write a BERT whose norms have the names of old checkpoints."""
    checkpoints.rename_tensors(checkpoints.write_bert(folder), lambda name: name.replace("Norm.weight", "Norm.gamma"))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_llama_is_assigned_by_torch_alone(tmp_path: Path, conversions: list[str], dtype: torch.dtype) -> None:
    """Its tensors have the module's own names, shapes and dtype, and nothing in it is tied."""
    assign_warm(checkpoints.write_llama(tmp_path, dtype))

    assert conversions == []


def test_a_plain_encoder_is_assigned_by_torch_alone(tmp_path: Path, conversions: list[str]) -> None:
    """BERT's configuration speaks of tied embeddings, and the encoder has nothing that is tied to them."""
    assign_warm(checkpoints.write_bert(tmp_path))

    assert conversions == []


@pytest.mark.parametrize(
    ("write", "fields"),
    [
        (lambda folder: checkpoints.write_llama(folder, tie_word_embeddings=True), {}),
        (checkpoints.write_gpt2, {}),
        (checkpoints.write_mixtral, {}),
        (write_old_bert, {}),
        (lambda folder: checkpoints.write_bert(folder, head=True), {}),
        (checkpoints.write_llama, {"dtype": "bfloat16"}),
    ],
    ids=["tied", "gpt2", "experts", "renamed", "prefixed", "cast"],
)
def test_all_others_are_left_to_transformers(
    tmp_path: Path, conversions: list[str], write: Callable[[Path], Path], fields: Mapping[str, Any]
) -> None:
    """Tied, merged, renamed or in another dtype: only transformers knows how."""
    assign_warm(write(tmp_path), **fields)

    assert len(conversions) == 1


def test_a_tied_llama_with_its_head_in_the_file_is_still_tied(tmp_path: Path, conversions: list[str]) -> None:
    """Every name is there, so that only the tie itself tells it from a plain one."""
    folder = checkpoints.write_llama(tmp_path)
    checkpoints.change_config(folder, {"tie_word_embeddings": True})

    assign_warm(folder)

    assert len(conversions) == 1


def test_integers_for_a_weight_are_not_assigned_as_they_are(tmp_path: Path, conversions: list[str]) -> None:
    """A parameter of integers can't even be made; transformers casts it."""
    from transformers import LlamaForCausalLM

    tensors = checkpoints.read_tensors(checkpoints.write_llama(tmp_path))
    tensors["lm_head.weight"] = (tensors["lm_head.weight"] * 50).to(torch.int8)
    model = build_on_meta(lambda: LlamaForCausalLM(checkpoints.llama_config()))

    fill_module(model, tensors, CPU, torch.float32)

    assert len(conversions) == 1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_buffers_that_the_file_holds_keep_its_values(conversions: list[str]) -> None:
    """A batch norm's statistics are buffers that transformers would begin anew after a load."""
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    model = build_on_meta(lambda: ResNetModel(config))
    expected = {name: make_values(tensor) for name, tensor in model.state_dict().items()}

    fill_module(model, {name: tensor.clone() for name, tensor in expected.items()}, CPU, torch.float32)

    assert conversions == []
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, expected[name])] == []


def make_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return values that no initialisation gives."""
    return torch.full(tensor.shape, 7, dtype=tensor.dtype)
