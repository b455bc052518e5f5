"""Stage ``first_request``: one real request, timed to its first output on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.compile_attempt import read_counters
from remote_agent.pipeline.failures import one_line
from remote_agent.pipeline.forward import embed, end_tokens, make_draw, prepare_inputs, steps
from remote_agent.pipeline.prompt_graph import PromptGraph, Queued, queue_request
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import FirstRequest

IDS_SHOWN = 32
VALUES_SHOWN = 8
TEXT_LIMIT = 2000


@dataclass(frozen=True)
class Answer:
    """What came back, by a graph's replay or eagerly. ``tokens``: new ids a sequence; ``embedding``: of the first."""

    text: str
    first_output_mono_ns: int
    prompt_tokens: int
    is_replayed: bool = False
    tokens: tuple[tuple[int, ...], ...] = ()
    embedding: tuple[float, ...] = ()


def answer_request(
    warm: Warm,
    request: FirstRequest,
    graph: PromptGraph | None = None,
    queued: Queued | None = None,
    on_first: Callable[[], None] = lambda: None,
) -> Answer:
    """Return the model's answer, by ``graph`` where it fits. The first output counts when it is on the host.

    ``queued``: the very request, where the device was told already. ``on_first`` is called after the first output.
    A generated sequence ends with its end token; the request, when all have ended or have their tokens.
    """
    with torch.inference_mode():
        if queued is None and graph is not None:
            queued = queue_request(warm, request, graph)
        if queued is None and warm.kind == "generate":
            return _generate(warm, request, on_first)
        answer = _encode(warm, request) if queued is None else _replayed(warm, queued)
        on_first()
        return answer


def answer_first_request(
    warm: Warm,
    request: FirstRequest,
    measure: Measure,
    graph: PromptGraph | None = None,
    queued: Queued | None = None,
    on_first: Callable[[], None] = lambda: None,
) -> Answer:
    """Answer the recipe's request and put its figures into the span."""
    graphs = read_counters()["graphs"]
    answer = answer_request(warm, request, graph, queued, on_first)
    extra = measure.extra
    extra["replayed"] = answer.is_replayed
    extra["new_graphs"] = read_counters()["graphs"] - graphs
    extra["kind"] = warm.kind
    extra["first_output_ns"] = answer.first_output_mono_ns - measure.start_mono_ns
    extra["prompt_tokens"] = answer.prompt_tokens
    extra["batch"] = request.batch
    if warm.kind == "generate":
        extra["new_tokens"] = sum(len(row) for row in answer.tokens)
        extra["token_ids"] = _ids(answer.tokens[0][:IDS_SHOWN])
    else:
        extra["dimension"] = len(answer.embedding)
    return answer


def _generate(warm: Warm, request: FirstRequest, on_first: Callable[[], None]) -> Answer:
    inputs = prepare_inputs(warm, request)
    ends = end_tokens(warm)
    rows: list[list[int]] = [[] for _ in range(request.batch)]
    first_ns = 0
    draw = make_draw(request.sampling, warm.device)
    for count, (chosen, _) in enumerate(steps(warm, inputs, draw), start=1):
        tokens = chosen.tolist()  # waits for the device
        if not first_ns:
            first_ns = time.monotonic_ns()
            on_first()
        for row, token in zip(rows, tokens, strict=True):
            if not row or row[-1] not in ends:
                row.append(token)
        if count == request.max_new_tokens or all(row[-1] in ends for row in rows):
            break
    text = _text(warm, rows[0])
    return Answer(text, first_ns, inputs.ids.shape[1], tokens=tuple(tuple(row) for row in rows))


def _replayed(warm: Warm, queued: Queued) -> Answer:
    tokens = queued.tokens()
    first_ns = time.monotonic_ns()
    rows = tuple((token,) for token in tokens)
    return Answer(_text(warm, list(rows[0])), first_ns, queued.prompt_tokens, is_replayed=True, tokens=rows)


def _text(warm: Warm, tokens: list[int]) -> str:
    text = _ids(tokens) if warm.tokenizer is None else warm.tokenizer.decode(tokens, skip_special_tokens=True)
    return text[:TEXT_LIMIT]


def _encode(warm: Warm, request: FirstRequest) -> Answer:
    inputs = prepare_inputs(warm, request)
    vector = embed(warm, inputs)[0].tolist()  # waits for the device
    first_ns = time.monotonic_ns()
    norm = sum(value * value for value in vector) ** 0.5
    shown = " ".join(f"{value:.7f}" for value in vector[:VALUES_SHOWN])
    text = one_line(f"embedding of {len(vector)} values, mean-pooled, norm {norm:.6f}: {shown}")
    return Answer(text, first_ns, inputs.ids.shape[1], embedding=tuple(vector))


def _ids(tokens: tuple[int, ...] | list[int]) -> str:
    return " ".join(str(token) for token in tokens)
