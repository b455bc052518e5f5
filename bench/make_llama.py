"""Writes a Llama-shaped checkpoint with random seeded weights; the default is Llama-2-7B's 13.48 GB in bfloat16.

``python bench/make_llama.py OUT``: streamed tensor by tensor, so that host memory holds one at a time;
values are drawn on the GPU where there is one. Needs torch and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

DTYPES = {"bfloat16": (torch.bfloat16, "BF16"), "float16": (torch.float16, "F16"), "float32": (torch.float32, "F32")}
DEVIATION = 0.02
ALIGNMENT_BYTES = 8

Tensors = list[tuple[str, tuple[int, ...]]]


def main() -> int:
    """Write configuration, shards and index; return 0."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    dtype, code = DTYPES[arguments.dtype]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(arguments.seed)
    shards = split(list(list_tensors(arguments)), arguments.shards)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total_bytes += write_shard(arguments.out / name, tensors, dtype, code, generator)
        weight_map.update({tensor: name for tensor, _ in tensors})
        print(f"{name}: {size_text((arguments.out / name).stat().st_size)}", flush=True)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (arguments.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (arguments.out / "config.json").write_text(json.dumps(configuration(arguments), indent=1) + "\n")
    shard_word = "shard" if len(shards) == 1 else "shards"
    spent_s = time.monotonic() - begun
    print(f"{size_text(total_bytes)} in {len(shards)} {shard_word}, {spent_s:.1f} s, drawn on {device}")
    return 0


def size_text(size_bytes: int) -> str:
    """Return a size in GB with two decimals, or below that in MB with three digits that say something."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 999.5e6 else f"{size_bytes / 1e6:.3g} MB"


def parse_arguments() -> argparse.Namespace:
    """Return the sizes; the defaults are Llama-2-7B's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def list_tensors(sizes: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor, in the order of the model."""
    hidden, intermediate, vocabulary = sizes.hidden, sizes.intermediate, sizes.vocabulary
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{name}.weight", (hidden, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", (intermediate, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (intermediate, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, intermediate)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def split(tensors: Tensors, count: int) -> list[Tensors]:
    """Return the tensors in at most ``count`` shards of about one size, order kept."""
    share = sum(elements(shape) for _, shape in tensors) / count
    shards: list[Tensors] = [[]]
    filled = 0
    for name, shape in tensors:
        if filled >= share * len(shards):
            shards.append([])
        shards[-1].append((name, shape))
        filled += elements(shape)
    return shards


def elements(shape: tuple[int, ...]) -> int:
    """Return how many elements a tensor of ``shape`` has."""
    return torch.Size(shape).numel()


def write_shard(path: Path, tensors: Tensors, dtype: torch.dtype, code: str, generator: torch.Generator) -> int:
    """Write one safetensors file and return the bytes of its tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        start, end = end, end + elements(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors:
            file.write(draw(name, shape, dtype, generator).view(torch.uint8).numpy().data)
    return end


def draw(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor's values on the host, flat: norms are ones, the rest is drawn."""
    if name.endswith("norm.weight"):
        return torch.ones(elements(shape), dtype=dtype)
    values = torch.empty(elements(shape), dtype=dtype, device=generator.device)
    return values.normal_(0, DEVIATION, generator=generator).cpu()


def configuration(sizes: argparse.Namespace) -> dict[str, object]:
    """Return ``config.json``; both spellings of the dtype, for transformers before and after 4.56."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "max_position_embeddings": sizes.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": DEVIATION,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": sizes.dtype,
        "dtype": sizes.dtype,
    }


if __name__ == "__main__":
    sys.exit(main())
