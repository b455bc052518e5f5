"""Modules are built without memory for their parameters and with real buffers."""

from __future__ import annotations

import torch
from torch import nn

from remote_agent.pipeline.build import build_on_meta


class Sample(nn.Module):
    """Holds each kind of tensor that models make in their constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.twin = nn.Linear(4, 8)
        self.twin.weight = self.linear.weight
        self.norm = nn.Parameter(torch.ones(4))
        self.embedding = nn.Embedding(10, 4, padding_idx=0)
        self.register_buffer("positions", torch.arange(6)[None], persistent=False)
        self.register_buffer("mask", torch.ones(3, 3).tril(), persistent=False)
        self.register_buffer("frequencies", 1.0 / (10.0 ** (torch.arange(0, 4, 2).float() / 4)), persistent=False)


class Careless(nn.Module):
    """Makes a buffer from memory that nobody wrote to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.empty(3))


def test_parameters_are_on_meta_and_buffers_are_computed() -> None:
    """No parameter has memory; what no checkpoint holds has the values that the model's code gave it."""
    built, real = build_on_meta(Sample), Sample()

    assert all(parameter.is_meta for parameter in built.parameters())
    for (name, buffer), (_, expected) in zip(built.named_buffers(), real.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name


def test_parameters_tied_in_the_constructor_stay_one() -> None:
    """A parameter registered under two names is one object on meta too."""
    built = build_on_meta(Sample)

    assert isinstance(built, Sample)
    assert built.twin.weight is built.linear.weight


def test_uninitialised_buffers_are_left_on_meta() -> None:
    """They can be told from computed ones, instead of passing as whatever was in memory."""
    built = build_on_meta(Careless)

    assert [name for name, buffer in built.named_buffers() if buffer.is_meta] == ["scratch"]


def test_building_leaves_torch_as_it_was() -> None:
    """Modules built afterwards have their memory again."""
    build_on_meta(Sample)

    assert not any(parameter.is_meta for parameter in Sample().parameters())
    assert not torch.empty(2).is_meta
