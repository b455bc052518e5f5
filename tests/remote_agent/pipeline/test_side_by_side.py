"""Products of the same rows are found in a compiled graph and made by one call; what comes of them is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear, silu

from remote_agent.pipeline.side_by_side import SideBySide, multiply_side_by_side

JOINED = torch.ops.glowplug.multiply_side_by_side.default
ROWS = torch.arange(2.0 * 3 * 4).reshape(2, 3, 4)
WEIGHTS = tuple(torch.arange(5.0 * 4).reshape(5, 4) + number for number in range(3))


def gate_and_up(rows: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    rows = rows * 2
    return silu(linear(rows, gate)) * linear(rows, up) + linear(rows + 1, other)


def one_after_another(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return linear(linear(rows, first), second @ second.T)


def used_before(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    rows, turned = rows[0], second.T
    early = (rows + 1) @ turned
    return early + rows @ first.T + rows @ turned


def scaled(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return linear(rows, first) + linear(rows, second + 1)


@pytest.mark.parametrize(
    ("work", "joined"),
    [(gate_and_up, [2]), (used_before, [2]), (one_after_another, []), (scaled, [])],
    ids=lambda given: str(given)[:24],
)
def test_products_of_the_same_rows_with_given_weights_are_joined(
    work: Callable[..., torch.Tensor], joined: list[int]
) -> None:
    """Wherever they stand; not those of other rows, nor those whose weights must be computed first."""
    graph = make_fx(work)(ROWS, *WEIGHTS)
    SideBySide()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    calls = [node for node in graph.graph.nodes if node.target is JOINED]

    assert [len(call.args[1]) for call in calls] == joined
    assert torch.equal(graph(ROWS, *WEIGHTS), work(ROWS, *WEIGHTS))


@pytest.mark.gpu
def test_on_a_gpu_the_products_are_the_same_also_within_a_captured_graph() -> None:
    """Each has a stream of its own, which begins after what stands before and ends before what comes next."""
    rows = torch.randn(128, 1024, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def work() -> torch.Tensor:
        scaled_rows = rows * 2
        return torch.cat([each + 1 for each in multiply_side_by_side(scaled_rows, weights)])

    expected = torch.cat([rows * 2 @ weight + 1 for weight in weights])
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    for _ in range(20):
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)
