"""Warms checkpoints in this process, and asks transformers for the same thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from remote_agent.pipeline.assign import Warm, assign_module
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import Finding, FirstRequest, ModelSource, Recipe
from tests.remote_agent.checkpoints import read_tensors

CPU = torch.device("cpu")


def recipe_for(folder: Path, **fields: Any) -> Recipe:
    """Return a CPU recipe whose request fits the tiny models."""
    fields.setdefault("request", FirstRequest(prompt_tokens=8))
    return Recipe("tiny", ModelSource(str(folder)), devices=("cpu",), **fields)


def assign(folder: Path, **fields: Any) -> tuple[Warm, tuple[Finding, ...], Measure]:
    """Assign a checkpoint's tensors as the stage does."""
    measure = Measure(0)
    warm, findings = assign_module(recipe_for(folder, **fields), folder, read_tensors(folder), CPU, measure)
    return warm, findings, measure


def assign_warm(folder: Path, **fields: Any) -> Warm:
    """Return only the model."""
    return assign(folder, **fields)[0]


def load_with_transformers(folder: Path, kind: str = "generate", **options: Any) -> Any:
    """Return the model as transformers loads it by itself."""
    from transformers import AutoModel, AutoModelForCausalLM

    auto = AutoModelForCausalLM if kind == "generate" else AutoModel
    return auto.from_pretrained(str(folder), local_files_only=True, **options).eval()
