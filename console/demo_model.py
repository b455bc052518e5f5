"""Writes a small Llama checkpoint with seeded random weights, in plain safetensors, without torch.

The format is https://huggingface.co/docs/safetensors: eight bytes of header length,
a JSON header padded with spaces to eight bytes, then the data.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Shapes = Mapping[str, tuple[int, ...]]

_BF16_ONE = b"\x80\x3f"
_SIGNS = bytes([0x3C, 0xBC] * 128)
"""Sign and upper exponent bits of ±0.0078 to ±0.031: the spread of a trained model's weights."""


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama model; the defaults come to 39 MB."""

    hidden: int = 256
    intermediate: int = 688
    layers: int = 4
    heads: int = 8
    vocabulary: int = 32000


def write_checkpoint(directory: Path, shape: LlamaShape | None = None, seed: int = 7) -> int:
    """Write config, index and three shards into ``directory``; return the bytes of all tensors.

    The same shape and seed give the same bytes. Raises: OSError.
    """
    shape = shape or LlamaShape()
    directory.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    shards = _shards(shape)
    places: dict[str, str] = {}
    total_bytes = 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total_bytes += _write_shard(directory / name, tensors, generator)
        places.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    _write_json(directory / "model.safetensors.index.json", index)
    _write_json(directory / "config.json", _config(shape))
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False})
    return total_bytes


def _shards(shape: LlamaShape) -> tuple[Shapes, ...]:
    hidden, wide = shape.hidden, shape.intermediate
    layers: dict[str, tuple[int, ...]] = {}
    for number in range(shape.layers):
        prefix = f"model.layers.{number}."
        layers |= {f"{prefix}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        layers |= {f"{prefix}mlp.{name}_proj.weight": (wide, hidden) for name in ("gate", "up")}
        layers[f"{prefix}mlp.down_proj.weight"] = (hidden, wide)
        layers |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    first: Shapes = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    last: Shapes = {"model.norm.weight": (hidden,), "lm_head.weight": (shape.vocabulary, hidden)}
    return first, layers, last


def _write_shard(path: Path, tensors: Shapes, generator: random.Random) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dimensions in tensors.items():
        end = at + 2 * math.prod(dimensions)
        header[name] = {"dtype": "BF16", "shape": list(dimensions), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dimensions in tensors.values():
            file.write(_weights(dimensions, generator))
    return at


def _weights(dimensions: tuple[int, ...], generator: random.Random) -> bytes:
    """bfloat16, little-endian: norms are ones, matrices random."""
    count = math.prod(dimensions)
    if len(dimensions) == 1:
        return _BF16_ONE * count
    data = bytearray(2 * count)
    data[0::2] = generator.randbytes(count)
    data[1::2] = generator.randbytes(count).translate(_SIGNS)
    return bytes(data)


def _config(shape: LlamaShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
