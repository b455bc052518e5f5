"""The staged path against a runtime that is as lazy as a GPU: exact bytes, and nothing left when a call fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_agent.errors import AgentError, DeviceError, LoadError
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.load import Loaded, load
from remote_agent.loader.verify import verify
from remote_agent.loader.views import bytes_of
from remote_agent.protocol.messages import WeightsPolicy
from tests.remote_agent.fake_cuda import FakeGpu, FakeRuntime
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write


def load_on(gpu: FakeGpu, checkpoint: Checkpoint, progress: Callable[[int, int], None] = lambda *_: None) -> Loaded:
    return load(checkpoint, gpu, WeightsPolicy(path="staged"), progress=progress)


def test_every_byte_arrives_through_a_ring_much_smaller_than_the_file(checkpoint: Checkpoint) -> None:
    """Buffers are used over and over and never filled before the copy out of them is done."""
    runtime = FakeRuntime()
    gpu = FakeGpu(runtime)
    gpu.open_context()

    loaded = load_on(gpu, checkpoint)

    assert verify(checkpoint, loaded.tensors).is_equal
    assert runtime.errors == []
    assert loaded.path == "staged"
    assert loaded.reason is None
    assert loaded.bytes == checkpoint.bytes
    assert set(loaded.steps) == {
        "ring",
        "allocate",
        "route",
        "move",
        "wait",
        "read",
        "copy",
        "idle",
        "register",
        "unregister",
        "views",
        "check",
    }
    assert loaded.counters["staged_bytes"] == checkpoint.bytes
    assert runtime.calls["cudaHostRegister"] == 0
    assert loaded.ceiling_bytes_s is not None
    assert loaded.counters["odd_tensors"] == 1
    assert gpu.ring.size_bytes < checkpoint.bytes / 5
    gpu.close()
    assert runtime.leaks() == []
    assert gpu.fake_driver.contexts == 0


def test_tensors_lie_in_the_memory_that_was_given(checkpoint: Checkpoint) -> None:
    """A caller's own device memory is filled at the plan's places, and is what the load gives back."""
    gpu = FakeGpu(FakeRuntime())
    gpu.open_context()
    given = []

    def memory(size_bytes: int) -> torch.Tensor:
        given.append(gpu.allocate(size_bytes + 4096))
        return given[0]

    loaded = load(checkpoint, gpu, WeightsPolicy(path="staged"), progress=lambda *_: None, memory=memory)

    assert loaded.base is given[0]
    assert loaded.plan is not None
    assert verify(checkpoint, loaded.tensors).is_equal
    for placement in loaded.plan.placements:
        assert loaded.tensors[placement.entry.name].data_ptr() == given[0].data_ptr() + placement.target
    gpu.close()


def test_the_ring_is_kept_from_load_to_load(checkpoint: Checkpoint) -> None:
    """Pinning happens once a context, however many loads there are."""
    runtime = FakeRuntime()
    gpu = FakeGpu(runtime)
    gpu.open_context()
    gpu.open_context()

    for _ in range(3):
        assert verify(checkpoint, load_on(gpu, checkpoint).tensors).is_equal

    assert runtime.calls["cudaHostAlloc"] == 1
    gpu.close()
    gpu.close()
    assert runtime.leaks() == []


@pytest.mark.parametrize("offset", range(0, 17, 3))
def test_every_dtype_at_odd_offsets_is_byte_exact(tmp_path: Path, offset: int) -> None:
    """Whatever the dtype and wherever it lies in the file, its bytes arrive, aligned for a view."""
    tensors = [tensor("head", "U8", [offset])]
    for seed, dtype in enumerate(DTYPES, 2):
        tensors += [tensor(dtype, dtype, [3, 4], seed), tensor(f"{dtype}.none", dtype, [0, 7])]
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors, pad=0)))
    gpu = FakeGpu(FakeRuntime())
    gpu.open_context()

    loaded = load_on(gpu, checkpoint)

    for name, dtype, _, content in tensors:
        found = loaded.tensors[name]
        assert bytes(bytes_of(found).tolist()) == content
        assert found.data_ptr() % DTYPES[dtype].item_bytes == 0
    gpu.close()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 9000), max_size=6), buffer_bytes=st.integers(1, 5000), readers=st.integers(1, 4))
def test_any_sizes_through_any_ring_arrive(tmp_path: Path, sizes: list[int], buffer_bytes: int, readers: int) -> None:
    """No combination of tensor sizes, buffer size and readers loses or doubles a byte."""
    tensors = [tensor(str(number), "U8", [size], number + 1) for number, size in enumerate(sizes)]
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors)))
    runtime = FakeRuntime()
    gpu = FakeGpu(runtime)
    gpu.buffer_bytes, gpu.readers = buffer_bytes, readers
    gpu.open_context()

    assert verify(checkpoint, load_on(gpu, checkpoint).tensors).is_equal
    gpu.close()
    assert runtime.errors == []
    assert runtime.leaks() == []


def use_and_close(gpu: FakeGpu, checkpoint: Checkpoint) -> Loaded | AgentError:
    loaded: Loaded | AgentError
    try:
        try:
            gpu.open_context()
            loaded = load_on(gpu, checkpoint)
        finally:
            gpu.close()
    except AgentError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    return loaded


@pytest.mark.parametrize(
    "call",
    [
        "cudaHostAlloc", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags", "cudaSetDevice", "cudaEventRecord",
        "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaEventQuery", "cudaStreamSynchronize", "cudaStreamDestroy",
        "cudaEventDestroy", "cudaFreeHost",
    ],
)  # fmt: skip
def test_a_call_that_always_fails_is_named(checkpoint: Checkpoint, call: str) -> None:
    """A context that is lost for good ends the load with the call's name, and still gives everything back."""
    runtime = FakeRuntime(fail_at=call)
    gpu = FakeGpu(runtime)

    outcome = use_and_close(gpu, checkpoint)

    assert isinstance(outcome, DeviceError)
    assert call in str(outcome)
    assert "illegal_access (700)" in str(outcome)
    assert runtime.leaks() == []


def test_a_file_cut_short_during_the_load_fails_it_by_name(checkpoint: Checkpoint) -> None:
    """A shard that loses bytes under the readers is named; copies are drained and memory is let go."""
    victim = checkpoint.shards[1].path
    runtime = FakeRuntime()
    gpu = FakeGpu(runtime)
    gpu.open_context()
    real_copy = gpu.ring.copy

    def cut_and_copy(*arguments: object) -> None:
        os.truncate(victim, 100)
        real_copy(*arguments)  # type: ignore[arg-type]

    gpu.ring.copy = cut_and_copy  # type: ignore[method-assign, assignment]
    with pytest.raises(LoadError) as caught:
        load_on(gpu, checkpoint)

    assert caught.value.code == "changed"
    assert str(victim) in str(caught.value)
    assert all(stream.done == len(stream.queue) for stream in runtime.streams.values())
    gpu.ring.copy = real_copy  # type: ignore[method-assign]
    gpu.close()
    assert runtime.leaks() == []


def test_a_file_rewritten_during_the_load_fails_it(checkpoint: Checkpoint) -> None:
    """Bytes changed in place, the size kept, are found after the last byte."""
    victim = checkpoint.shards[0].path
    gpu = FakeGpu(FakeRuntime())
    gpu.open_context()
    real_synchronise = gpu.ring.drain

    def rewrite_and_drain() -> None:
        victim.write_bytes(victim.read_bytes())
        real_synchronise()

    gpu.ring.drain = rewrite_and_drain  # type: ignore[method-assign]
    with pytest.raises(LoadError, match=r"a\.safetensors: changed since it was checked"):
        load_on(gpu, checkpoint)
    gpu.ring.drain = real_synchronise  # type: ignore[method-assign]
    gpu.close()


def test_a_read_error_names_file_and_place(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails in the middle ends the load with the file, the byte and the system's words."""

    def fail(descriptor: int, offset: int, view: memoryview) -> int:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr("remote_agent.loader.shards.read_into", fail)
    gpu = FakeGpu(FakeRuntime())
    gpu.open_context()

    with pytest.raises(LoadError, match=r"can't be read at byte \d+: Input/output error \(errno 5\)") as caught:
        load_on(gpu, checkpoint)
    assert caught.value.code == "unreadable"
    gpu.close()


def test_short_reads_are_continued(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that gives a few bytes a call loses none of them."""
    real = os.preadv
    monkeypatch.setattr(
        "remote_agent.loader.files.os.preadv", lambda fd, views, offset: real(fd, [views[0][:701]], offset)
    )
    gpu = FakeGpu(FakeRuntime())
    gpu.open_context()

    assert verify(checkpoint, load_on(gpu, checkpoint).tensors).is_equal
    gpu.close()


def test_memory_that_is_not_there_is_refused_with_the_numbers(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is needed, what is free and what there is stand in the error; nothing was copied."""
    runtime = FakeRuntime()
    gpu = FakeGpu(runtime)
    gpu.open_context()

    def refuse(size_bytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "allocate", refuse)
    with pytest.raises(LoadError, match=f"bytes are needed, {3 << 30} of {8 << 30} are free") as caught:
        load_on(gpu, checkpoint)
    assert caught.value.code == "out_of_memory"
    assert runtime.copied_bytes == 0
    gpu.close()


def test_a_caller_who_gives_up_gets_its_error_after_the_last_copy(checkpoint: Checkpoint) -> None:
    """An error out of ``progress`` comes out once every thread has ended and every copy is done."""

    class Enough(Exception):
        pass

    def give_up(done: int, total: int) -> None:
        raise Enough

    runtime = FakeRuntime()
    gpu = FakeGpu(runtime)
    gpu.open_context()

    with pytest.raises(Enough):
        load_on(gpu, checkpoint, give_up)
    assert all(stream.done == len(stream.queue) for stream in runtime.streams.values())
    assert not any(thread.name.startswith("load-") for thread in threading.enumerate())
    gpu.close()
    assert runtime.leaks() == []
