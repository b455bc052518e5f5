"""Layers of a prompt's pass get what they got in an ordinary one, and are called as before afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from remote_agent.pipeline import shared_layer, side_by_side
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.compilation import find_repeated_layer, warm_kernels
from remote_agent.pipeline.compile_attempt import TOLERANCE, largest_difference
from remote_agent.pipeline.forward import last_logits
from remote_agent.pipeline.prompt_layers import PromptPass, plan_pass
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import CompilePolicy, FirstRequest
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import assign_warm


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


IDS = torch.tensor([[3, 4]])


def plan(model: Model) -> PromptPass:
    warm = Warm(model, None, None, "generate", torch.device("cpu"), torch.float32, 0)
    return plan_pass(warm, IDS, CompilePolicy(), Path(), Measure(0))


def masks_of(model: Model) -> list[list[bool]]:
    prompt = plan(model)
    assert prompt.logits(IDS).tolist() == prompt.logits(IDS).tolist() == [[6.0]]
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
    prompt = plan(model)
    assert prompt.logits(IDS).tolist() == [[5.0]]
    with pytest.raises(IndexError):
        prompt.logits(torch.tensor(3))

    assert calls == ["compiled"]
    assert (first._compiled_call_impl, second._compiled_call_impl) == (before, None)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled code of one test does not serve another, and none waits for a C++ compiler."""
    monkeypatch.setattr(shared_layer, "BACKEND", "aot_eager")
    monkeypatch.setattr(side_by_side, "OPTIONS", {})
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiler")
def test_compiled_layers_are_compiled_once_more_for_this_pass_and_kept(tmp_path: Path) -> None:
    """One function for all of them, which the next start loads; other passes use the recipe's own as before."""
    folder, root = checkpoints.write_llama(tmp_path / "llama"), tmp_path / "cache"
    root.mkdir()
    policy, request, ids = CompilePolicy("layer"), FirstRequest(prompt_tokens=8), torch.arange(8)[None]
    told = []
    for _ in range(2):
        warm, measure = assign_warm(folder), Measure(0)
        eager = last_logits(warm, ids, leaves_cache=False)
        assert warm_kernels(warm, request, policy, root, Measure(0), lambda done, total: None).used
        layers = find_repeated_layer(warm.model)
        before = [layer._compiled_call_impl for layer in layers]
        prompt = plan_pass(warm, ids, policy, root, measure)

        assert largest_difference(eager, prompt.logits(ids)) < 1e-5
        assert prompt.functions is not None
        assert prompt.functions.missed == 0
        assert [layer._compiled_call_impl for layer in layers] == before
        told.append((prompt.functions.traced, prompt.functions.loaded, measure.extra["prompt_cache"]))

    assert told == [(1, 0, "miss"), (0, 1, "hit")]
    assert prompt.logits(ids[:, :5]).shape == (1, 128)
    assert prompt.functions.missed == len(layers)


@pytest.mark.usefixtures("compiler")
def test_a_pass_whose_compiled_layers_are_wrong_uses_the_recipe_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span says how far they were off; nothing of them is kept."""
    policy, request, ids = CompilePolicy("layer"), FirstRequest(prompt_tokens=8), torch.arange(8)[None]
    warm, measure = assign_warm(checkpoints.write_llama(tmp_path / "llama")), Measure(0)
    eager = last_logits(warm, ids, leaves_cache=False)
    assert warm_kernels(warm, request, policy, tmp_path, Measure(0), lambda done, total: None).used
    monkeypatch.setitem(TOLERANCE, torch.float32, -1.0)
    prompt = plan_pass(warm, ids, policy, tmp_path, measure)

    assert "differs from eager" in str(measure.extra["prompt"])
    assert (prompt.functions, prompt.leaves_cache) == (None, True)
    assert largest_difference(eager, prompt.logits(ids)) < 1e-5
