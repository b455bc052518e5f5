"""Asks a warm model: token by token with a cache for causal models, one mean-pooled vector for encoders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.failures import fail
from remote_agent.protocol.messages import FirstRequest, Sampling


@dataclass(frozen=True)
class Inputs:
    """``ids``: int64[batch, tokens] on the device. ``others``: what else the tokenizer gave and the model takes."""

    ids: torch.Tensor
    others: Mapping[str, torch.Tensor]


def prepare_inputs(warm: Warm, request: FirstRequest) -> Inputs:
    """Return the request's input on the device: its prompt through the tokenizer, or `plain_ids`.

    Every sequence of the batch is the same prompt, so nothing is padded.

    Raises: StageError if it is longer than the model's positions.
    """
    if request.prompt is None:
        inputs = Inputs(plain_ids(warm, request.batch, request.prompt_tokens), {})
    else:
        encoded = warm.tokenizer(request.prompt, return_tensors="pt")
        takes = inspect.signature(warm.model.forward).parameters
        rows = {name: rows.repeat(request.batch, 1).to(warm.device) for name, rows in encoded.items() if name in takes}
        inputs = Inputs(rows.pop("input_ids"), {} if warm.kind == "generate" else rows)
    if inputs.ids.shape[1] == 0:
        raise fail("prompt_empty", "the prompt has no tokens")
    refuse_length(warm, inputs.ids.shape[1] + (request.max_new_tokens if warm.kind == "generate" else 0))
    return inputs


def plain_ids(warm: Warm, batch: int, tokens: int) -> torch.Tensor:
    """Return the ids 0, 1, 2, … modulo the vocabulary in every row: the same on each host and each time.

    They are made on the host: each operation that a device has not done yet costs it up to 20 ms.
    """
    ids = torch.arange(tokens) % vocabulary(warm)
    return ids.repeat(batch, 1).to(warm.device)


def vocabulary(warm: Warm) -> int:
    """Return how many ids the model's input embedding knows."""
    embedding = warm.model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def refuse_length(warm: Warm, tokens: int) -> None:
    """Raise StageError if the model has fewer than ``tokens`` positions; a GPU would only say so by an assertion."""
    limit = getattr(warm.config.get_text_config(), "max_position_embeddings", None)
    for name, module in warm.model.named_modules():
        # Encoders of the RoBERTa kind start to count behind their padding index.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit = module.num_embeddings - module.padding_idx - 1
    if isinstance(limit, int) and 0 < limit < tokens:
        raise fail("request_too_long", f"the request needs {tokens} positions and the model has {limit}")


Draw = Callable[[torch.Tensor], torch.Tensor]
"""Chooses the next ids, int64[batch], from logits [batch, vocabulary]."""


def steps(warm: Warm, inputs: Inputs, draw: Draw) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for each new token of every sequence the ids chosen by ``draw`` and the logits behind them.

    The first comes from the whole prompt, each further one from the one before and the cache.
    """
    takes = inspect.signature(warm.model.forward).parameters
    keep = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    name = cache_argument(warm)
    ids, cache = inputs.ids, None
    while True:
        output = _run(warm, input_ids=ids, use_cache=True, **{name: cache}, **keep)
        logits = output.logits[:, -1]
        chosen = draw(logits)
        yield chosen, logits
        ids, cache = chosen[:, None], output[name]


def last_logits(warm: Warm, ids: torch.Tensor, leaves_cache: bool) -> torch.Tensor:
    """Return the logits after each sequence, [batch, vocabulary], as `steps` does at first and nothing after it."""
    takes = inspect.signature(warm.model.forward).parameters
    keep = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    return _run(warm, input_ids=ids, use_cache=leaves_cache, **keep).logits[:, -1]  # type: ignore[no-any-return]


def cache_argument(warm: Warm) -> str:
    """Return what the model calls its cache; transformers is renaming the one to the other."""
    return "cache" if "cache" in inspect.signature(warm.model.forward).parameters else "past_key_values"


def embed(warm: Warm, inputs: Inputs) -> torch.Tensor:
    """Return the mean of each sequence's last hidden states, float32[batch, hidden]; padding does not count."""
    hidden = _run(warm, input_ids=inputs.ids, **inputs.others).last_hidden_state.float()
    mask = inputs.others.get("attention_mask", torch.ones_like(inputs.ids))[:, :, None].float()
    pooled: torch.Tensor = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    return pooled


def _run(warm: Warm, **inputs: Any) -> Any:
    """Run the model without gradients and, whatever the caller's mode, on plain tensors.

    Inference tensors are another kind to a compiled function's guards, which a process that loads it can't make again.
    """
    with torch.inference_mode(False), torch.no_grad():
        plain = {
            name: value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value
            for name, value in inputs.items()
        }
        return warm.model(**plain)


def end_tokens(warm: Warm) -> frozenset[int]:
    """Return the ids after which a sequence is over."""
    generation = getattr(warm.model, "generation_config", None)
    found: Any = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(warm.config.get_text_config(), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, (list, tuple)) else (found,))


def make_draw(sampling: Sampling, device: torch.device) -> Draw:
    """Return the recipe's way to choose: the likeliest id, or drawn by chance from a seeded generator."""
    if sampling.temperature == 0:
        return lambda logits: logits.argmax(-1)
    generator = torch.Generator(device=device).manual_seed(sampling.seed)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        chances = torch.softmax(logits.float() / sampling.temperature, -1)
        return torch.multinomial(chances, 1, generator=generator)[:, 0]

    return draw
