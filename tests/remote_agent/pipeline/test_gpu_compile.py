"""On a GPU: compiled layers are kept for the next process and give the tokens of eager ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_agent import caches
from remote_agent.pipeline.imports import WORKER_ENVIRONMENT
from tests.remote_agent import checkpoints
from tests.remote_agent.agentd.agents import REPOSITORY

pytestmark = pytest.mark.gpu

START = """
import json, sys
from pathlib import Path
import torch
from remote_agent.pipeline.assign import assign_module
from remote_agent.pipeline.compilation import run_shapes, warm_kernels
from remote_agent.pipeline.compile_attempt import read_counters
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import CompilePolicy, FirstRequest, Sampling, Shape
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import recipe_for

folder, cache = map(Path, sys.argv[1:])
device = torch.device("cuda", 0)
tensors = {name: tensor.to(device) for name, tensor in checkpoints.read_tensors(folder).items()}
warm = assign_module(recipe_for(folder, dtype="bfloat16"), folder, tensors, device, Measure(0))[0]
measure, tell = Measure(0), lambda done, total: None
compiled = warm_kernels(warm, FirstRequest(prompt_tokens=8), CompilePolicy("layer"), cache, measure, tell)
graphs = read_counters()["graphs"]
run_shapes(warm, (Shape(1, 21),), Sampling(), tell)
print(json.dumps({**measure.extra, "used": compiled.used, "reason": measure.reason,
    "traced_later": read_counters()["graphs"] - graphs}))
"""


def start(folder: Path, cache: Path) -> dict[str, Any]:
    """Warm a model up in a process with a worker's environment; return what its span says."""
    environment = {**os.environ, **WORKER_ENVIRONMENT, **caches.NOWHERE}
    command = [sys.executable, "-c", START, str(folder), str(cache)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(600)
def test_the_second_start_loads_what_the_first_compiled(tmp_path: Path) -> None:
    """By Inductor and Triton; two functions, another length served without a trace, the tokens of eager."""
    folder = checkpoints.write_llama(tmp_path / "model", torch.bfloat16, num_hidden_layers=4, initializer_range=0.02)

    cold, kept = (start(folder, tmp_path / "cache") for _ in range(2))

    assert (cold["used"], cold["ahead"], cold["traced_later"]) == (True, True, 0), cold
    assert (cold["cache"], cold["functions_traced"]) == ("miss", 2), cold
    assert (kept["cache"], kept["functions_loaded"], kept["functions_traced"]) == ("hit", 2, 0), kept
    assert kept["traced_later"] == 0
