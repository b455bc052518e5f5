"""A model armed on the fake GPU, in this process: what is captured, what is replayed, what is compared and let go."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_agent.agentd.paths import StateDir
from remote_agent.keeper.client import KeeperAddress, list_residents
from remote_agent.loader.checkpoint import inspect
from remote_agent.pipeline import init
from remote_agent.pipeline.making import Making
from remote_agent.pipeline.runner import Runner
from remote_agent.protocol.internal import (
    InternalMessage,
    WorkerFinding,
    WorkerGo,
    WorkerJob,
    WorkerMap,
    WorkerMapped,
    WorkerReady,
    WorkerUnmap,
    WorkerUnmapped,
)
from remote_agent.protocol.messages import FirstRequest, ModelSource, Recipe, Sampling, Tier
from remote_agent.resident.names import resident_name
from remote_agent.resident.reserved import RangeState
from tests.remote_agent import checkpoints
from tests.remote_agent.fake_cuda import UUID_TEXT, FakeGpu, FakeRuntime
from tests.remote_agent.resident.test_reserved import fails_once
from tests.remote_agent.worker_ends import only, stages_over

REQUEST = FirstRequest(prompt_tokens=8)
ARMING_REPLAYS = 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_llama(tmp_path_factory.mktemp("models") / "llama")


class Line:
    """Agentd's side of a runner in this process."""

    def __init__(self) -> None:
        self.said: list[InternalMessage] = []
        self.waiting: list[InternalMessage] = []

    def send(self, message: InternalMessage) -> None:
        self.said.append(message)

    def receive(self) -> InternalMessage:
        return self.waiting.pop(0)


class Bench:
    """A runner on a fake GPU."""

    def __init__(self, gpu: FakeGpu, folder: Path, state: StateDir) -> None:
        self.gpu, self.folder, self.state, self.line = gpu, folder, state, Line()
        self.runner = Runner(self.line)

    def do(self, request: FirstRequest = REQUEST, *, arm: bool = False) -> list[InternalMessage]:
        """Do one job and return what was said; the weights are resident if the keeper has them."""
        shards = inspect(self.folder).identities
        name = resident_name(str(self.folder), shards, UUID_TEXT)
        is_resident = name in [one.name for one in list_residents(KeeperAddress(self.state))]
        recipe = Recipe("tiny", ModelSource(str(self.folder)), devices=(UUID_TEXT,), request=request)
        job = WorkerJob(
            "run-00000001", recipe, UUID_TEXT, time.monotonic_ns(), "", None, str(self.state.root), "a", arm
        )
        self.line.waiting.append(WorkerGo(shards, name, is_resident))
        self.line.said = []
        assert self.runner.run(job), self.line.said
        return self.line.said

    def move(self, message: WorkerUnmap | WorkerMap) -> list[InternalMessage]:
        """Have the worker let its weights go for a checkpoint, or have them again."""
        self.line.said = []
        self.runner.move(message)
        return self.line.said

    @property
    def held(self) -> Any:
        return self.runner._held


@pytest.fixture
def bench(llama: Path, keeper: int, state: StateDir, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID_TEXT)
    gpu = FakeGpu(FakeRuntime(), name=UUID_TEXT)

    def initialise(job: WorkerJob, measure: object) -> FakeGpu:
        gpu.initialise()
        return gpu

    monkeypatch.setattr(init, "initialise_device", initialise)
    return Bench(gpu, llama, state)


def output(messages: list[InternalMessage]) -> str:
    return only(messages, WorkerReady).output


def codes(messages: list[InternalMessage]) -> list[str]:
    return [one.finding.code for one in messages if isinstance(one, WorkerFinding)]


def test_the_first_answer_is_a_replay_and_compared_afterwards(bench: Bench, llama: Path) -> None:
    """Captured over the stand-in, replayed over the weights, the same token as a pass; later ones are not compared."""
    said = bench.do(arm=True)
    assert stages_over(said)["compile"].extra["graph"] == "1x8"
    assert only(said, WorkerReady).bytes == bench.held.armed.range.stand_in_bytes + bench.gpu.pool_bytes()
    first, second = bench.do(), bench.do()

    assert bench.gpu.replays == ARMING_REPLAYS + 2
    assert stages_over(first)["first_request"].extra["replayed"] is True
    assert stages_over(first)["hold"].extra["graph_equal"] is True
    assert stages_over(first)["hold"].extra["settle_ns"] >= 0
    assert "graph_equal" not in stages_over(second)["hold"].extra
    assert output(first) == output(second)
    assert only(first, WorkerReady).tier is Tier.STANDBY
    assert bench.held.armed.range.stand_in_bytes == 0


def test_what_the_keeper_has_is_mapped_at_the_addresses_that_were_captured(bench: Bench) -> None:
    """A worker that loaded has gone; the armed one maps what it left, without moving a byte."""
    bench.do()
    loaded = output(bench.do())
    bench.runner = Runner(bench.line)
    bench.do(arm=True)
    address, moved = bench.held.armed.range.tensor.data_ptr(), bench.gpu.fake_runtime.copied_bytes
    said = bench.do()

    assert stages_over(said)["weights"].path == "attached"
    assert output(said) == loaded
    assert bench.held.armed.range.tensor.data_ptr() == address
    assert bench.held.armed.range.state is RangeState.WEIGHTS
    assert bench.gpu.fake_runtime.copied_bytes == moved


@pytest.mark.parametrize("where", ["loaded", "attached"])
def test_weights_under_an_armed_process_go_for_a_checkpoint_and_come_back(bench: Bench, where: str) -> None:
    """Nothing is mapped and no handle is open in between, however they came; the graph is right again afterwards."""
    if where == "attached":
        bench.do()
        bench.runner = Runner(bench.line)
        gc.collect()
    bench.do(arm=True)
    first = bench.do()
    address, driver = bench.held.armed.range.tensor.data_ptr(), bench.gpu.fake_driver
    away = only(bench.move(WorkerUnmap(1 << 40)), WorkerUnmapped)
    left = (len(driver.handles), len(driver.maps), len(driver.ranges))
    only(bench.move(WorkerMap()), WorkerMapped)
    second = bench.do()

    assert (stages_over(first)["weights"].path == "attached") is (where == "attached")
    assert (away.problem, left) == (None, (0, 0, 1))
    assert bench.held.armed.range.tensor.data_ptr() == address
    assert output(second) == output(first)
    assert (stages_over(second)["first_request"].extra["replayed"], bench.gpu.replays) == (True, ARMING_REPLAYS + 2)
    assert bench.held.backing.keepable is None


@pytest.mark.parametrize(
    "request_",
    [
        FirstRequest(prompt_tokens=8, max_new_tokens=3),
        FirstRequest(prompt_tokens=8, batch=2),
        FirstRequest(prompt_tokens=9),
        FirstRequest(prompt_tokens=8, sampling=Sampling(temperature=0.7)),
    ],
    ids=["longer answer", "batch", "length", "by chance"],
)
def test_a_request_that_the_graph_is_not_for_runs_eagerly(bench: Bench, request_: FirstRequest) -> None:
    """The answer is an ordinary run's; the graph stays for requests that fit."""
    expected = output(bench.do(request_))
    bench.runner = Runner(bench.line)
    bench.do(arm=True)

    assert output(bench.do(request_)) == expected
    assert (bench.gpu.replays, bench.held.graph is None) == (ARMING_REPLAYS, False)


def test_a_graph_that_differs_is_not_used_and_its_answer_is_not_told(bench: Bench) -> None:
    """The eager pass's token is the run's output; the next request is answered eagerly."""
    expected = output(bench.do())
    bench.runner = Runner(bench.line)
    bench.do(arm=True)
    graph = bench.held.graph
    real = graph.replay

    def replay_wrong() -> None:
        real()
        graph.logits.neg_()

    object.__setattr__(graph, "replay", replay_wrong)
    said = bench.do()

    assert codes(said) == ["graph_differs"]
    text = only(said, WorkerFinding).finding.text
    assert "the graph's logits differ from an ordinary pass's by 2 of the largest, 0.001 is allowed" in text
    assert stages_over(said)["hold"].extra["graph_equal"] is False
    assert output(said) == expected
    assert output(bench.do()) == expected
    assert bench.gpu.replays == ARMING_REPLAYS + 1


def test_a_model_that_can_t_be_captured_is_armed_without_a_graph(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named in the stage; the first request runs eagerly over the same memory."""
    expected = output(bench.do())
    bench.runner = Runner(bench.line)

    def refuse(work: Callable[[], torch.Tensor]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(bench.gpu, "capture", refuse)
    armed = bench.do(arm=True)
    said = bench.do()

    assert stages_over(armed)["compile"].extra["graph"] == (
        "none: RuntimeError: operation not permitted when stream is capturing"
    )
    assert output(said) == expected
    assert stages_over(said)["first_request"].extra["replayed"] is False


def test_the_device_answers_while_the_weights_are_looked_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay was queued before the checksum was asked for, and the request's span begins there."""
    bench.do()
    bench.runner = Runner(bench.line)
    bench.do(arm=True)
    samples, order = bench.held.armed.samples, list[object]()
    queue, checksum = samples.queue, samples.checksum
    monkeypatch.setattr(samples, "queue", lambda: (order.append(("queue", bench.gpu.replays)), queue()))
    monkeypatch.setattr(samples, "checksum", lambda: (order.append(("checksum", bench.gpu.replays)), checksum())[1])
    said = bench.do()
    weights, request = stages_over(said)["weights"], stages_over(said)["first_request"]

    assert order == [("queue", ARMING_REPLAYS), ("checksum", ARMING_REPLAYS + 1)]
    assert bench.gpu.replays == ARMING_REPLAYS + 1
    assert weights.start_mono_ns < request.start_mono_ns < (weights.end_mono_ns or 0)


def test_an_answer_over_weights_that_are_not_those_that_were_loaded_is_never_given(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost: the replay that was queued counts for nothing, the weights are loaded and asked anew."""
    expected = output(bench.do())
    bench.runner = Runner(bench.line)
    bench.do(arm=True)
    lying = bench.held.armed.range
    monkeypatch.setattr(bench.held.armed.samples, "checksum", lambda: "another")
    states = list[RangeState]()
    monkeypatch.setattr(Making, "_give_up_resident", lambda *_: states.append(lying.state))
    said = bench.do()
    stages = stages_over(said)

    assert states == [RangeState.STAND_IN]
    assert stages["weights"].path != "attached"
    assert bench.gpu.replays == ARMING_REPLAYS + 2
    assert stages["first_request"].start_mono_ns >= (stages["weights"].end_mono_ns or 0)
    assert output(said) == expected


def test_without_a_range_a_standby_is_made_as_ever(bench: Bench) -> None:
    """A driver that reserves nothing is named; the weights are loaded and kept."""
    fails_once(bench.gpu, "cuMemAddressReserve", 0)
    said = bench.do(arm=True)

    assert codes(said) == ["not_armed"]
    assert "cuMemAddressReserve failed" in (stages_over(said)["assign"].reason or "")
    assert only(said, WorkerReady).tier is Tier.STANDBY
    assert bench.held.armed is None


def test_an_armed_process_that_can_t_map_loads_and_builds_anew(bench: Bench) -> None:
    """Every map at the range fails: named, the range is given back, and the answer is right."""
    expected = output(bench.do())
    bench.runner = Runner(bench.line)
    bench.do(arm=True)
    driver = bench.gpu.fake_driver
    first, size = bench.held.armed.range.tensor.data_ptr(), bench.held.armed.range.size_bytes
    reserved = weakref.ref(bench.held.armed.range.tensor)
    real = driver.cuMemMap

    def refuse_there(address: int, *arguments: Any) -> tuple[Any, ...]:
        return (1,) if first <= address < first + size else real(address, *arguments)

    driver.cuMemMap = refuse_there  # type: ignore[method-assign]
    said = bench.do()

    assert "armed_not_used" in codes(said)
    assert output(said) == expected
    assert bench.held.armed is None
    assert reserved() is None


def test_a_process_armed_for_another_model_is_not_used(bench: Bench, tmp_path: Path) -> None:
    """What is armed goes with everything that it reserved."""
    bench.do(arm=True)
    reserved = weakref.ref(bench.held.armed.range.tensor)
    bench.folder = checkpoints.write_llama(tmp_path / "other")
    said = bench.do()

    assert codes(said) == ["standby_replaced"]
    assert reserved() is None
