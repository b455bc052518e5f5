"""On a real GPU, in forked workers: what was captured over the stand-in answers over weights that a dead one left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from remote_agent.agentd.paths import StateDir
from remote_agent.devices.calls import Calls
from remote_agent.devices.cuda import DRIVER, visible_uuids
from remote_agent.loader.checkpoint import inspect
from remote_agent.protocol.internal import InternalMessage, WorkerFinding, WorkerGo, WorkerJob, WorkerReady
from remote_agent.protocol.messages import CompilePolicy, FirstRequest, ModelSource, Recipe, StageStatus, Tier
from remote_agent.resident.names import resident_name
from tests.remote_agent import checkpoints
from tests.remote_agent.worker_ends import Forked, Zygote, do_job, only, running_zygote, stages_over

pytestmark = pytest.mark.gpu

REQUEST = FirstRequest(prompt_tokens=64)


@pytest.fixture(scope="module")
def uuid() -> str:
    torch.cuda.init()
    return visible_uuids(Calls(DRIVER))[0]


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with running_zygote(tmp_path_factory.mktemp("zygote") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of some 100 MB, whose likeliest tokens are no near ties."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
    folder = tmp_path_factory.mktemp("models") / "llama"
    return checkpoints.write_llama(
        folder, torch.bfloat16, vocab_size=8192, num_hidden_layers=3, max_position_embeddings=512, **sizes
    )


def ask(worker: Forked, state: StateDir, recipe: Recipe, uuid: str, resident: bool, arm: bool) -> list[InternalMessage]:
    shards = inspect(Path(recipe.model.path)).identities
    go = WorkerGo(shards, resident_name(recipe.model.path, shards, uuid), resident)
    job = WorkerJob("run-00000001", recipe, uuid, time.monotonic_ns(), str(state.cache), None, str(state.root), "ann")
    messages = do_job(worker.end, replace(job, arm=arm), go)
    assert isinstance(messages[-1], WorkerReady), messages[-1]
    return messages


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "request_"),
    [
        ("off", REQUEST),
        ("layer", REQUEST),
        ("off", replace(REQUEST, prompt_tokens=33)),
        ("off", replace(REQUEST, max_new_tokens=5)),
        ("off", replace(REQUEST, batch=2)),
    ],
    ids=["as armed", "compiled", "length", "longer answer", "batch"],
)
def test_weights_of_a_dead_loader_are_mapped_and_answer_the_same(
    zygote: Zygote, keeper: int, state: StateDir, model: Path, uuid: str, mode: str, request_: FirstRequest
) -> None:
    """A replay where the request is the one that was armed, else eager; the tokens are an ordinary worker's."""
    recipe = Recipe("tiny", ModelSource(str(model)), devices=(uuid,), request=request_, compile=CompilePolicy(mode))
    with zygote.worker(state.root / "log") as worker:
        expected = only(ask(worker, state, recipe, uuid, False, False), WorkerReady)
        assert worker.release() == 0
    with zygote.worker(state.root / "log") as worker:
        armed = ask(worker, state, replace(recipe, request=REQUEST), uuid, False, True)
        said = ask(worker, state, recipe, uuid, True, False)
        again = ask(worker, state, recipe, uuid, True, False)
        assert worker.release() == 0

    assert only(armed, WorkerReady).tier is Tier.ARMED
    assert stages_over(armed)["compile"].extra["graph"] == "1x64"
    assert str(stages_over(armed)["compile"].extra.get("prompt")).startswith("compiled: ") is (mode == "layer")
    stages, ready = stages_over(said), only(said, WorkerReady)
    assert [one.finding for one in said if isinstance(one, WorkerFinding)] == []
    assert (stages["weights"].path, stages["assign"].status) == ("attached", StageStatus.REUSED)
    assert stages["first_request"].extra["replayed"] is (request_ == REQUEST)
    assert stages["hold"].extra.get("graph_equal", True) is True
    assert (ready.tier, ready.output) == (Tier.STANDBY, expected.output)
    assert only(again, WorkerReady).output == expected.output
