"""What a caller does while others move bytes, and what a load gives back while the caller goes on."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable

import pytest

from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.load import Loaded, load
from remote_agent.loader.verify import verify
from remote_agent.protocol.messages import WeightsPolicy
from tests.remote_agent.fake_cuda import FakeGpu
from tests.remote_agent.loader.gpu_loads import traces_of

DEADLINE_S = 30.0


def bring(gpu: FakeGpu, checkpoint: Checkpoint, meanwhile: Callable[[], None], **options: bool) -> Loaded:
    policy = WeightsPolicy(path="auto")
    return load(checkpoint, gpu, policy, progress=lambda *_: None, meanwhile=meanwhile, **options)


def test_others_move_bytes_while_the_caller_does_something_else(gpu: FakeGpu, checkpoint: Checkpoint) -> None:
    """It is called once, in the thread that called, and what it waits for arrives while it waits."""
    moved = threading.Event()
    copy = gpu.ring.copy

    def copy_and_tell(*arguments: object) -> None:
        copy(*arguments)  # type: ignore[arg-type]
        moved.set()

    gpu.ring.copy = copy_and_tell  # type: ignore[method-assign, assignment]
    seen: list[tuple[threading.Thread, bool]] = []

    loaded = bring(gpu, checkpoint, lambda: seen.append((threading.current_thread(), moved.wait(DEADLINE_S))))

    assert seen == [(threading.current_thread(), True)]
    assert verify(checkpoint, loaded.tensors).is_equal


def test_its_failure_ends_the_load_and_nothing_is_left(gpu: FakeGpu, checkpoint: Checkpoint) -> None:
    """The bytes on their way arrive first."""

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        bring(gpu, checkpoint, fail)

    assert traces_of(checkpoint) == []


def test_registrations_are_given_back_when_the_caller_has_time(gpu: FakeGpu, checkpoint: Checkpoint) -> None:
    """The tensors are right before that; after `settle` nothing is registered, mapped or locked."""
    loaded = bring(gpu, checkpoint, lambda: None, settles_later=True)

    assert loaded.counters["registrations"] > 0
    assert verify(checkpoint, loaded.tensors).is_equal
    assert gpu.fake_runtime.registered
    for shard in checkpoint.shards:  # which others may register already
        with shard.path.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert loaded.settle() > 0
    assert traces_of(checkpoint) == []
    assert gpu.fake_runtime.errors == []
