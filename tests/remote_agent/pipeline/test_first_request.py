"""The first request is real: what comes back is what transformers itself answers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from remote_agent.errors import StageError
from remote_agent.pipeline.first_request import answer_first_request, answer_request
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import FirstRequest, Sampling
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import assign_warm, load_with_transformers

SENTENCE = "A console for cold starts keeps its history."


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_are_those_of_generate(tmp_path: Path, batch: int) -> None:
    """Token by token through the cache, for every sequence of the batch."""
    folder = checkpoints.write_llama(tmp_path, num_key_value_heads=2)
    request = FirstRequest(prompt_tokens=9, batch=batch, max_new_tokens=12)

    answer = answer_request(assign_warm(folder, request=request), request)

    ids = torch.arange(9).repeat(batch, 1)
    expected = load_with_transformers(folder).generate(ids, max_new_tokens=12, do_sample=False)[:, 9:].tolist()
    assert [list(row) for row in answer.tokens] == expected
    assert answer.text == " ".join(str(token) for token in expected[0])


def test_learned_positions_go_on_through_the_cache(tmp_path: Path) -> None:
    """GPT-2 looks positions up, so a wrong one changes its tokens."""
    folder = checkpoints.write_gpt2(tmp_path)
    request = FirstRequest(prompt_tokens=5, max_new_tokens=8)

    answer = answer_request(assign_warm(folder), request)

    expected = load_with_transformers(folder).generate(torch.arange(5)[None], max_new_tokens=8, do_sample=False)
    assert list(answer.tokens[0]) == expected[0, 5:].tolist()


def test_a_sequence_ends_with_its_end_token(tmp_path: Path) -> None:
    """As in generate, the end token is part of the answer and nothing follows it."""
    folder = checkpoints.write_llama(tmp_path / "free")
    request = FirstRequest(prompt_tokens=9, max_new_tokens=12)
    free = answer_request(assign_warm(folder), request).tokens[0]
    end = free[3]

    ending = checkpoints.write_llama(tmp_path / "ending", eos_token_id=end)
    tokens = answer_request(assign_warm(ending), request).tokens[0]

    assert tokens == free[: free.index(end) + 1]


def test_sampling_follows_its_seed(tmp_path: Path) -> None:
    """The same seed draws the same tokens, another seed others."""
    warm = assign_warm(checkpoints.write_llama(tmp_path))

    def draw(seed: int) -> tuple[int, ...]:
        return answer_request(
            warm, FirstRequest(prompt_tokens=4, max_new_tokens=20, sampling=Sampling(5.0, seed))
        ).tokens[0]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_the_first_output_comes_before_the_last(tmp_path: Path) -> None:
    """The span carries when the first token was on the host, and the tokens themselves."""
    warm = assign_warm(checkpoints.write_llama(tmp_path))
    measure = Measure(0)

    answer = answer_first_request(warm, FirstRequest(prompt_tokens=4, max_new_tokens=3), measure)

    assert measure.extra["first_output_ns"] == answer.first_output_mono_ns
    assert measure.extra["token_ids"] == answer.text
    assert measure.extra["new_tokens"] == 3


@pytest.mark.parametrize("kind", ["generate", "encode"])
def test_who_waits_for_the_first_output_is_told_before_the_next(tmp_path: Path, kind: str) -> None:
    """What would slow down a first token is begun then, beside those that follow."""
    write = checkpoints.write_llama if kind == "generate" else checkpoints.write_bert
    warm = assign_warm(write(tmp_path))
    passes: list[int] = []
    warm.model.register_forward_hook(lambda *_: passes.append(len(passes) + 1))
    told: list[int] = []

    answer_request(warm, FirstRequest(max_new_tokens=3, prompt_tokens=4), on_first=lambda: told.append(len(passes)))

    assert told == [1]
    assert len(passes) == (3 if kind == "generate" else 1)


def test_a_published_encoder_gives_the_embedding_of_transformers() -> None:
    """all-MiniLM-L6-v2 through its own tokenizer, to 1e-5 of transformers' mean-pooled states."""
    from transformers import AutoTokenizer

    folder = checkpoints.minilm_folder()
    request = FirstRequest(prompt=SENTENCE)

    answer = answer_request(assign_warm(folder, request=request), request)

    inputs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)(SENTENCE, return_tensors="pt")
    with torch.inference_mode():
        states = load_with_transformers(folder, "encode")(**inputs).last_hidden_state
    expected = states[0].mean(0)
    assert len(answer.embedding) == 384
    assert torch.allclose(torch.tensor(answer.embedding), expected, atol=1e-5, rtol=0)
    assert f"norm {math.sqrt(float((expected**2).sum())):.4f}"[:10] in answer.text


@pytest.mark.parametrize("write", [checkpoints.write_llama, checkpoints.write_bert])
def test_a_request_longer_than_the_model_is_refused(tmp_path: Path, write: object) -> None:
    """On a GPU it would be an assertion in a kernel, and the context lost."""
    assert callable(write)
    warm = assign_warm(write(tmp_path))

    with pytest.raises(StageError, match=f"{checkpoints.POSITIONS}") as refused:
        answer_request(warm, FirstRequest(prompt_tokens=checkpoints.POSITIONS + 1))

    assert refused.value.failure.code == "request_too_long"
