"""On a real GPU, compiled layers equal eager ones and the next start loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remote_agent import caches
from remote_agent.pipeline.assign import Warm, assign_module
from remote_agent.pipeline.compilation import Compiled, run_shapes, warm_kernels
from remote_agent.pipeline.compile_attempt import forget_compiled_code, read_counters
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import CompilePolicy, FirstRequest, Sampling, Shape
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import recipe_for

pytestmark = pytest.mark.gpu

REQUEST = FirstRequest(prompt_tokens=8)


def assign_on_gpu(folder: Path) -> Warm:
    device = torch.device("cuda", 0)
    tensors = {name: tensor.to(device) for name, tensor in checkpoints.read_tensors(folder).items()}
    return assign_module(recipe_for(folder, dtype="bfloat16"), folder, tensors, device, Measure(0))[0]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports
def test_the_second_start_loads_what_the_first_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Inductor and Triton; two functions, another length served without a trace, the tokens of eager."""
    for name, folder in caches.NOWHERE.items():
        monkeypatch.setenv(name, folder)  # given back after the test; the stage sets it
    folder = checkpoints.write_llama(tmp_path / "model", torch.bfloat16, num_hidden_layers=4, initializer_range=0.02)
    spans = []
    for _ in range(2):
        forget_compiled_code()
        measure = Measure(0)
        warm = assign_on_gpu(folder)
        compiled = warm_kernels(
            warm, REQUEST, CompilePolicy("layer"), tmp_path / "cache", measure, lambda done, total: None
        )
        assert compiled == Compiled(True), measure.reason
        graphs = read_counters()["graphs"]
        run_shapes(warm, (Shape(1, 21),), Sampling(), lambda done, total: None)
        assert read_counters()["graphs"] == graphs
        spans.append(measure)

    cold, kept = spans
    assert cold.extra["ahead"] is True, cold.extra
    assert (cold.extra["cache"], cold.extra["functions_traced"]) == ("miss", 2)
    assert (kept.extra["cache"], kept.extra["functions_loaded"], kept.extra["functions_traced"]) == ("hit", 2, 0)
