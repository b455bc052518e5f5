"""Products of the same rows with several weights, done side by side: queries, keys and values; gate and up.

A prompt of some hundred tokens makes fewer tiles of one product than a GPU has processors, so that most of them, and
much of the memory's bandwidth, wait. The kernels are those of the products one by one, and so are the results.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, library
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

MULTIPLY = torch.ops.aten.mm.default
SHAPINGS = frozenset({torch.ops.aten.view.default, torch.ops.aten.reshape.default})
REORDERINGS = frozenset({torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.transpose.int})


@library.custom_op(
    "glowplug::multiply_side_by_side", mutates_args=(), schema="(Tensor rows, Tensor[] weights) -> Tensor[]"
)
def multiply_side_by_side(rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``rows``, [n, in], times each of ``weights``, [in, out]. On a GPU each product has a stream of its own.

    All results belong to the current stream, which the others follow before and which follows them afterwards.
    """
    if rows.device.type != "cuda":
        return [torch.mm(rows, weight) for weight in weights]
    here = torch.cuda.current_stream(rows.device)
    results = [rows.new_empty(rows.shape[0], weight.shape[1]) for weight in weights]
    beside = streams(rows.device, len(weights) - 1)
    for stream, weight, result in zip(beside, weights[1:], results[1:], strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            torch.mm(rows, weight, out=result)
    torch.mm(rows, weights[0], out=results[0])
    for stream in beside:
        here.wait_stream(stream)
    return results


@multiply_side_by_side.register_fake
def _(rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [rows.new_empty(rows.shape[0], weight.shape[1]) for weight in weights]


@functools.cache
def streams(device: torch.device, count: int) -> tuple[Any, ...]:
    """Return ``count`` streams of a device, always the same: a graph that is captured may not make any."""
    return tuple(torch.cuda.Stream(device) for _ in range(count))  # type: ignore[no-untyped-call]


class SideBySide(CustomGraphPass):
    """Puts `multiply_side_by_side` where a compiled graph has several products of the same rows."""

    def __call__(self, graph: fx.Graph) -> None:
        for products in list(find_groups(graph)):
            join_products(graph, products)

    def uuid(self) -> bytes:
        return bytes(get_hash_for_files((__file__,)))


def find_groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the products of the same rows, in their order, whose weights are there from the start."""
    groups: dict[tuple[fx.Node, int], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is MULTIPLY and is_given(node.args[1]):
            groups.setdefault((unshaped(node.args[0]), int(node.args[0].meta["val"].shape[1])), []).append(node)
    yield from (group for group in groups.values() if len(group) > 1)


def unshaped(node: Any) -> fx.Node:
    """Return what a node has in another shape: each product has a view of its own of the rows."""
    while node.op == "call_function" and node.target in SHAPINGS:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def is_given(node: Any) -> bool:
    """Whether a node is an input of its graph, or one seen in another order."""
    if node.op == "call_function" and node.target in REORDERINGS:
        return is_given(node.args[0])
    return node.op in ("placeholder", "get_attr")


def join_products(graph: fx.Graph, products: Sequence[fx.Node]) -> None:
    """Make one call of several products, where the first of them stands."""
    first = products[0]
    before = set(itertools.takewhile(lambda node: node is not first, graph.nodes))
    for product in products[1:]:
        move_before(first, before, product.args[1])
    with graph.inserting_before(first):
        weights = [product.args[1] for product in products]
        target = torch.ops.glowplug.multiply_side_by_side.default
        joined = graph.call_function(target, (first.args[0], weights))
        joined.meta["val"] = [product.meta["val"] for product in products]
        for number, product in enumerate(products):
            result = graph.call_function(operator.getitem, (joined, number))
            result.meta.update(product.meta)
            product.replace_all_uses_with(result)
    for product in products:
        graph.erase_node(product)


def move_before(place: fx.Node, before: set[fx.Node], node: Any) -> None:
    """Move a node that `is_given` before ``place``, with what it is made of; what is ``before`` stays."""
    if node.op == "call_function" and node not in before:
        move_before(place, before, node.args[0])
        place.prepend(node)
        before.add(node)


OPTIONS = {"post_grad_custom_post_pass": SideBySide()}
"""For Inductor."""
