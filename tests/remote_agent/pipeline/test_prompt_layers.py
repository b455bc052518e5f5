"""Layers of a prompt's pass get what they got in an ordinary one, and are called as before afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.prompt_layers import pass_over


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[torch.Tensor | None] = []

    def forward(self, rows: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        self.masks.append(attention_mask)
        return rows + 1


class Model(nn.Module):
    """Makes a mask from its second pass on, as transformers does while a stream is captured."""

    def __init__(self, masks: tuple[bool, bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self._masks, self.passes = masks, 0

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        mask = torch.ones(1) if self._masks[min(self.passes, 1)] else None
        self.passes += 1
        rows = input_ids[:, :, None].float()
        for layer in self.layers:
            rows = layer(rows, attention_mask=mask)
        return SimpleNamespace(logits=rows)


def masks_of(model: Model) -> list[list[bool]]:
    assert len(model.layers) == 2
    pass_ = pass_over(
        Warm(model, None, None, "generate", torch.device("cpu"), torch.float32, 0), list(model.layers), False
    )
    ids = torch.tensor([[3, 4]])
    assert pass_.logits(ids).tolist() == pass_.logits(ids).tolist() == [[6.0]]
    return [[mask is not None for mask in layer.masks] for layer in model.layers if isinstance(layer, Layer)]


def test_a_mask_that_an_ordinary_pass_leaves_out_is_left_out_later() -> None:
    """Each layer goes by its own first call."""
    assert masks_of(Model((False, True))) == [[False, False]] * 2


def test_a_mask_that_an_ordinary_pass_needs_is_given() -> None:
    """It is the one that the model makes then, for it may depend on the ids."""
    assert masks_of(Model((True, True))) == [[True, True]] * 2


def test_layers_are_called_as_before_once_the_pass_is_over() -> None:
    """Also where it failed, and whatever stood in their place before."""
    model = Model((False, True))
    first, second = model.layers
    calls: list[str] = []
    first._compiled_call_impl = lambda rows, **_: (calls.append("compiled"), rows)[1]
    before = first._compiled_call_impl
    pass_ = pass_over(
        Warm(model, None, None, "generate", torch.device("cpu"), torch.float32, 0), [first, second], False
    )
    assert pass_.logits(torch.tensor([[3, 4]])).tolist() == [[5.0]]
    try:
        pass_.logits(torch.tensor(3))
    except IndexError:
        calls.append("failed")

    assert calls == ["compiled", "failed"]
    assert (first._compiled_call_impl, second._compiled_call_impl) == (before, None)
