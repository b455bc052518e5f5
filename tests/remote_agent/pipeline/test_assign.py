"""A module around loaded tensors gives what transformers' own load gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_agent.errors import StageError
from remote_agent.pipeline.assign import assign_module
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import FirstRequest
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import CPU, assign, assign_warm, load_with_transformers, recipe_for

IDS = torch.tensor([[1, 5, 3, 9, 2, 2, 7, 100]])

CAUSAL: dict[str, Callable[[Path], Path]] = {
    "llama": checkpoints.write_llama,
    "grouped": lambda folder: checkpoints.write_llama(folder, num_key_value_heads=2),
    "tied": lambda folder: checkpoints.write_llama(folder, tie_word_embeddings=True),
    "bfloat16": lambda folder: checkpoints.write_llama(folder, torch.bfloat16),
    "gpt2": checkpoints.write_gpt2,
    "experts": checkpoints.write_mixtral,
}


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(IDS).logits
    return result


def hidden(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(IDS).last_hidden_state
    return result


def code_of(folder: Path, **fields: Any) -> tuple[str, str]:
    """Return the code and detail that assigning is refused with."""
    with pytest.raises(StageError) as refused:
        assign(folder, **fields)
    return refused.value.failure.code, refused.value.failure.detail


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    """Equal to the bit: same tensors, same buffers, same code."""
    folder = CAUSAL[name](tmp_path)
    assert len(list(folder.glob("*.safetensors"))) > 1

    warm = assign_warm(folder)

    assert warm.kind == "generate"
    assert torch.equal(logits(warm.model), logits(load_with_transformers(folder)))


@pytest.mark.parametrize("head", [False, True])
def test_an_encoder_gives_the_hidden_states_of_transformers(tmp_path: Path, head: bool) -> None:
    """Also from a checkpoint of another task, whose names have a prefix and which has no pooler."""
    folder = checkpoints.write_bert(tmp_path, head)

    warm = assign_warm(folder)

    assert warm.kind == "encode"
    assert torch.equal(hidden(warm.model), hidden(load_with_transformers(folder, "encode")))


def test_legacy_names_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Old checkpoints call a norm's tensors gamma and beta."""
    folder = checkpoints.write_bert(tmp_path)
    expected = hidden(load_with_transformers(folder, "encode"))
    checkpoints.rename_tensors(
        folder,
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
    )

    assert torch.equal(hidden(assign_warm(folder).model), expected)


def test_tensors_are_taken_as_they_lie(tmp_path: Path) -> None:
    """No parameter is a copy: each has the memory that the loader filled."""
    folder = checkpoints.write_llama(tmp_path)
    tensors = checkpoints.read_tensors(folder)

    warm, _ = assign_module(recipe_for(folder), folder, tensors, CPU, Measure(0))

    pointers = {tensor.data_ptr() for tensor in tensors.values()}
    assert {parameter.data_ptr() for parameter in warm.model.parameters()} == pointers


def test_tied_weights_share_memory(tmp_path: Path) -> None:
    """A checkpoint without an output head gives a head that is the embedding."""
    warm = assign_warm(checkpoints.write_llama(tmp_path, tie_word_embeddings=True))

    assert warm.model.lm_head.weight is warm.model.model.embed_tokens.weight


def test_another_dtype_is_cast_to(tmp_path: Path) -> None:
    """The recipe's dtype wins over the file's, and the result is that of transformers."""
    folder = checkpoints.write_llama(tmp_path)

    warm = assign_warm(folder, dtype="bfloat16")

    assert warm.dtype == torch.bfloat16
    assert torch.equal(logits(warm.model), logits(load_with_transformers(folder, dtype=torch.bfloat16)))


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    """Never drawn at random, as a library made for training does."""
    folder = checkpoints.write_llama(tmp_path)
    checkpoints.rename_tensors(folder, lambda name: None if "layers.1.mlp" in name else name)

    code, detail = code_of(folder)

    assert code == "missing_tensors"
    assert "3 tensors" in detail
    assert "model.layers.1.mlp.down_proj.weight" in detail


def test_a_tensor_of_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    """The configuration and the shards are of two different models."""
    folder = checkpoints.write_llama(tmp_path)
    checkpoints.change_config(folder, {"intermediate_size": 64})

    code, detail = code_of(folder)

    assert code == "shape_mismatch"
    assert "[32, 48]" in detail
    assert "[32, 64]" in detail


def test_tensors_without_a_place_are_a_finding(tmp_path: Path) -> None:
    """They stop nothing, and are named and counted."""
    folder = checkpoints.write_bert(tmp_path, head=True)

    (finding,) = assign(folder)[1]

    assert finding.code == "unexpected_tensors"
    assert finding.text.startswith("5 tensors")
    assert "cls.predictions.bias" in finding.text


def test_a_buffer_that_nobody_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left on meta is named, instead of failing in the first request."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaRMSNorm.__init__

    def with_scratch(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_buffer("scratch", torch.empty(2), persistent=False)

    folder = checkpoints.write_llama(tmp_path)
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "__init__", with_scratch)

    code, detail = code_of(folder)

    assert code == "missing_tensors"
    assert "scratch" in detail


def test_weights_without_a_configuration_are_refused(tmp_path: Path) -> None:
    """The line names the file that is not there."""
    folder = checkpoints.write_llama(tmp_path)
    (folder / "config.json").unlink()

    code, detail = code_of(folder)

    assert code == "config_missing"
    assert str(folder / "config.json") in detail


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "never-heard-of"}, "config_unusable"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ],
)
def test_a_model_that_cannot_run_natively_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    """Unknown and quantized models are told apart."""
    folder = checkpoints.write_llama(tmp_path)
    checkpoints.change_config(folder, changes)

    assert code_of(folder)[0] == expected


def test_remote_code_does_not_run_unless_the_recipe_trusts_it(tmp_path: Path) -> None:
    """A checkpoint's own Python is not imported."""
    folder = checkpoints.write_llama(tmp_path / "model")
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass OwnConfig: pass\n")
    checkpoints.change_config(folder, {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}})

    code, detail = code_of(folder)

    assert code == "config_unusable"
    assert "trust_remote_code" in detail
    assert not ran.exists()


def test_an_encoder_asked_to_generate_is_refused(tmp_path: Path) -> None:
    """The recipe's kind wins, and says what can't be built."""
    folder = checkpoints.write_bert(tmp_path)

    code, _ = code_of(folder, request=FirstRequest(kind="generate"))

    assert code in {"model_unsupported", "missing_tensors"}


def test_a_prompt_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The tiny checkpoints have none."""
    folder = checkpoints.write_llama(tmp_path)

    assert code_of(folder, request=FirstRequest(prompt="Hello"))[0] == "tokenizer_missing"
