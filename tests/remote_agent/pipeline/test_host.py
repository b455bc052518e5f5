"""Tier ``host`` in a worker on the fake GPU: registered, found by the next job, refused, changed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_agent.loader import route
from remote_agent.loader.checkpoint import inspect
from remote_agent.pipeline import host, init
from remote_agent.pipeline.runner import Runner
from remote_agent.protocol.internal import (
    InternalMessage,
    ShardIdentity,
    WorkerFailed,
    WorkerFinding,
    WorkerGo,
    WorkerJob,
    WorkerReady,
)
from remote_agent.protocol.messages import FirstRequest, Hold, ModelSource, Recipe, StageStatus, Tier, WeightsPolicy
from tests.remote_agent import checkpoints
from tests.remote_agent.fake_cuda import UUID_TEXT, Code, FakeGpu, FakeRuntime
from tests.remote_agent.loader.gpu_loads import traces_of
from tests.remote_agent.worker_ends import only, stages_over


class Line:
    """A worker's line to an agent that says what the test says."""

    def __init__(self) -> None:
        self.sent: list[InternalMessage] = []
        self.waiting: deque[InternalMessage] = deque()

    def send(self, message: InternalMessage) -> None:
        self.sent.append(message)

    def receive(self) -> InternalMessage:
        return self.waiting.popleft()


class Worker:
    """A worker in this process, on the fake GPU."""

    def __init__(self, folder: Path, gpu: FakeGpu) -> None:
        self.folder, self.gpu, self._line = folder, gpu, Line()
        self._runner = Runner(self._line)

    def job(self, tier: str, shards: tuple[ShardIdentity, ...] | None = None, **recipe: Any) -> list[InternalMessage]:
        """Do one job and return what was said; ``shards``: what a preflight saw, by default what is there."""
        request = FirstRequest(prompt_tokens=4, max_new_tokens=2)
        wanted = Recipe("tiny", ModelSource(str(self.folder)), target_tier=tier, request=request, **recipe)  # type: ignore[arg-type]
        self._line.sent.clear()
        self._line.waiting.append(WorkerGo(inspect(self.folder).identities if shards is None else shards))
        self._runner.run(WorkerJob("run-00000001", wanted, self.gpu.name, time.monotonic_ns(), ""))
        return list(self._line.sent)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoints.write_llama(tmp_path / "llama")


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu(FakeRuntime(), name=UUID_TEXT)


@pytest.fixture
def worker(llama: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    def initialise(job: WorkerJob, measure: object) -> FakeGpu:
        gpu.initialise()
        return gpu

    monkeypatch.setattr(init, "initialise_device", initialise)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID_TEXT)
    yield Worker(llama, gpu)
    assert gpu.fake_runtime.errors == []


def findings(messages: list[InternalMessage]) -> list[str]:
    return [message.finding.code for message in messages if isinstance(message, WorkerFinding)]


def test_shards_are_registered_and_kept(worker: Worker, llama: Path) -> None:
    """No model is built: the stages of one are left out, and every page of the shards is beyond reclaim."""
    messages = worker.job("host")

    ready, stages = only(messages, WorkerReady), stages_over(messages)
    registered = sum(map(len, worker.gpu.fake_runtime.registered.values()))
    assert (ready.tier, ready.bytes, ready.is_held, ready.resident) == (Tier.HOST, registered, True, None)
    assert stages.keys() == {"init", "context", "weights", "hold"}
    assert (stages["weights"].status, stages["weights"].path) == (StageStatus.DONE, "registered")
    assert stages["weights"].extra["registrations"] == len(worker.gpu.fake_runtime.registered)
    assert stages["hold"].bytes == registered >= inspect(llama).bytes
    assert worker.gpu.fake_runtime.copied_bytes == 0


@pytest.mark.parametrize("tier", ["standby", "resident"])
def test_the_next_job_copies_from_them_and_goes_on_to_its_own_tier(worker: Worker, llama: Path, tier: str) -> None:
    """Nothing is registered anew, no byte is copied on the host, the answer is right, and the pages are given back."""
    expected = only(worker.job("standby"), WorkerReady).output
    other = Worker(llama, worker.gpu)
    other.job("host")
    before = worker.gpu.fake_runtime.calls["cudaHostRegister"]
    messages = other.job(tier)

    ready, stages = only(messages, WorkerReady), stages_over(messages)
    assert (ready.tier, ready.output) == (Tier.STANDBY, expected)  # no keeper holds a resident here
    assert stages["context"].status is StageStatus.REUSED
    assert (stages["weights"].path, stages["weights"].extra["staged_bytes"]) == ("registered", 0)
    assert stages["weights"].extra["registered_bytes"] == inspect(llama).bytes
    assert worker.gpu.fake_runtime.calls["cudaHostRegister"] == before
    assert worker.gpu.fake_runtime.registered == {}
    assert traces_of(inspect(llama)) == []


def test_a_second_job_for_the_tier_finds_it_reached(worker: Worker) -> None:
    """Its weights are reused, and what is held is the same."""
    first = only(worker.job("host"), WorkerReady)
    messages = worker.job("host", hold=Hold(ttl_s=5.0))

    assert only(messages, WorkerReady) == first
    assert stages_over(messages)["weights"].status is StageStatus.REUSED


def test_a_way_that_is_asked_for_is_taken_though_they_are_registered(worker: Worker) -> None:
    """``weights.path`` is the recipe's word; the registrations go all the same."""
    worker.job("host")
    messages = worker.job("standby", weights=WeightsPolicy(path="staged"))

    assert stages_over(messages)["weights"].path == "staged"
    assert worker.gpu.fake_runtime.registered == {}


def no_attribute(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    gpu.fake_runtime.registers = False


def no_memory(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    gpu.fake_runtime.fail_at, gpu.fake_runtime.fail_with = "cudaHostRegister", Code.memory_allocation


def no_room(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        host, "find_room_problem", lambda needed, registered: f"{needed} bytes would be locked: at most 10 may be"
    )


def old_driver(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(route, "_loaded_driver", lambda: 550)


@pytest.mark.parametrize(
    ("hinder", "words"),
    [
        (no_attribute, "registration refused: this device and driver register no read-only memory"),
        (no_memory, "registration refused: memory_allocation (2) for "),
        (no_room, " bytes would be locked: at most 10 may be"),
        (old_driver, "registration refused: driver 550 marks pages as written"),
    ],
)
def test_what_cannot_be_registered_is_cached_and_the_reason_is_named(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, hinder: Callable[[FakeGpu, pytest.MonkeyPatch], None], words: str
) -> None:
    """The run is ready one tier colder, holds nothing, and its stage and a finding say why."""
    hinder(worker.gpu, monkeypatch)
    messages = worker.job("host")

    ready, weights = only(messages, WorkerReady), stages_over(messages)["weights"]
    assert (ready.tier, ready.is_held) == (Tier.CACHED, False)
    assert (weights.reason or "").startswith("cached instead of host: ")
    assert words in (weights.reason or "")
    assert findings(messages) == ["not_registered"]
    assert weights.extra["stayed_bytes"] == inspect(worker.folder).bytes
    assert "hold" not in stages_over(messages)
    assert worker.gpu.fake_runtime.registered == {}
    assert traces_of(inspect(worker.folder)) == []


def test_files_changed_since_are_loaded_ordinarily_and_named(worker: Worker, llama: Path) -> None:
    """What is registered is of the old ones: it is given back before a byte of the new ones moves."""
    worker.job("host")
    for shard in inspect(llama).shards:
        shard.path.touch()
    messages = worker.job("standby")

    assert findings(messages)[0] == "registrations_dropped"
    assert stages_over(messages)["weights"].path != "registered"
    assert only(messages, WorkerReady).tier is Tier.STANDBY
    assert worker.gpu.fake_runtime.registered == {}


def test_a_file_changed_after_preflight_fails_the_run_and_leaves_nothing(worker: Worker, llama: Path) -> None:
    """Its name and what differs are told; nothing is registered of it."""
    before = inspect(llama).identities
    for shard in inspect(llama).shards:
        shard.path.touch()
    failure = only(worker.job("host", before), WorkerFailed).failure

    assert (failure.code, failure.stage) == ("changed", "weights")
    assert "changed since it was checked: modification time" in failure.detail
    assert traces_of(inspect(llama)) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cache-reader")]
