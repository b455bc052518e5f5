"""Whatever fails in the middle of a load: named, and nothing of the load is left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.errors import AgentError, DeviceError, LoadError
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.load import Loaded
from remote_agent.loader.verify import verify
from tests.remote_agent.fake_cuda import Code, FakeGpu, FakeRuntime
from tests.remote_agent.loader.caches_by_hand import refuse_direct
from tests.remote_agent.loader.files_by_hand import failure_of, serialise, tensor, write
from tests.remote_agent.loader.gpu_loads import load_by, tell, traces_of

pytestmark = pytest.mark.usefixtures("small_ranges")


def test_a_disk_error_past_the_cache_names_file_and_place(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no refusal ends the load."""
    refuse_direct(monkeypatch, errno.EIO, at_open=False)

    with pytest.raises(LoadError, match=r"safetensors: can't be read at byte \d+: Input/output error") as caught:
        load_by(gpu, checkpoint, "direct")
    assert caught.value.code == "unreadable"


def outcome_of(gpu: FakeGpu, checkpoint: Checkpoint, path: str, page_cache: str) -> Loaded | AgentError:
    """Return what came of a context, a load and a close, without the traceback that holds on to their frames."""
    loaded: Loaded | AgentError
    try:
        try:
            gpu.open_context()
            loaded = load_by(gpu, checkpoint, path, page_cache)
        finally:
            gpu.close()
    except AgentError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    return loaded


def count_calls(checkpoint: Checkpoint, path: str, page_cache: str) -> int:
    runtime = FakeRuntime()
    assert isinstance(outcome_of(FakeGpu(runtime), checkpoint, path, page_cache), Loaded)
    return runtime.calls.total()


TOLERATED = ("cudaDeviceGetAttribute", "cudaDriverGetVersion", "cudaGetLastError")
"""Calls whose failure is a reason to read instead."""


@pytest.mark.parametrize("code", [Code.illegal_access, Code.memory_allocation])
@pytest.mark.parametrize(("path", "page_cache"), [("auto", "keep"), ("mapped", "keep"), ("auto", "bypass")])
def test_nothing_is_left_whichever_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, page_cache: str, code: Code
) -> None:
    """For every single call of a whole load: named or made good for, and no memory, map, lock, thread or file stays."""
    write(tmp_path / "x.safetensors", serialise([tensor("w", "F32", [9000]), tensor("v", "BF16", [11])]))
    checkpoint = inspect(tmp_path)
    if page_cache == "bypass":
        tell(monkeypatch, lambda number: number % 2 == 0)
    failures = 0
    for number in range(count_calls(checkpoint, path, page_cache)):
        runtime = FakeRuntime(number, code)
        gpu = FakeGpu(runtime)

        outcome = outcome_of(gpu, checkpoint, path, page_cache)

        if isinstance(outcome, AgentError):
            failures += 1
            assert isinstance(outcome, DeviceError)
            assert (outcome.call, outcome.code) == (runtime.failed_call, code.name)
        else:  # it made do without; or threads raced for segments and one call fewer was made
            refusable = (*TOLERATED, "cudaHostRegister") if code is Code.memory_allocation else TOLERATED
            assert runtime.failed_call is None or runtime.failed_call in refusable
            assert verify(checkpoint, outcome.tensors).is_equal
        assert runtime.leaks() == [], runtime.failed_call
        assert runtime.errors == [], runtime.failed_call
        assert gpu.fake_driver.contexts == 0
        assert traces_of(checkpoint) == []
    assert failures > 40


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostUnregister", "cudaDeviceGetPCIBusId", "cudaMemcpyAsync"])
def test_a_call_that_always_fails_is_named(checkpoint: Checkpoint, call: str) -> None:
    """A context that is lost for good ends the load with the call's name, and still gives everything back."""
    runtime = FakeRuntime(call)

    outcome = outcome_of(FakeGpu(runtime), checkpoint, "mapped", "keep")

    assert isinstance(outcome, DeviceError)
    assert f"{call} failed: illegal_access (700)" in str(outcome)
    assert runtime.leaks() == []
    assert traces_of(checkpoint) == []


def cut(path: Path) -> None:
    os.truncate(path, 100)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def replace(path: Path) -> None:
    write(path.parent / "other", path.read_bytes()).replace(path)


@pytest.mark.parametrize("change", [cut, rewrite, replace, Path.unlink])
@pytest.mark.parametrize("path", ["mapped", "direct", "auto"])
def test_a_file_that_changes_during_the_load_fails_it_by_name(
    tmp_path: Path, gpu: FakeGpu, path: str, change: Callable[[Path], None]
) -> None:
    """A shard cut, rewritten, replaced or removed after its first copy is named, and nothing is left behind."""
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", serialise([tensor(name, "F32", [1 << 15])]))
    checkpoint = inspect(tmp_path)
    victim = checkpoint.shards[1].path
    real_copy, changes = gpu.ring.copy, iter([change])

    def change_and_copy(*arguments: object) -> None:
        for change_once in changes:
            change_once(victim)
        real_copy(*arguments)  # type: ignore[arg-type]

    gpu.ring.copy = change_and_copy  # type: ignore[method-assign, assignment]
    error = failure_of(lambda: load_by(gpu, checkpoint, path))

    assert error.code == "changed"
    assert str(victim) in str(error)
    assert all(stream.done == len(stream.queue) for stream in gpu.fake_runtime.streams.values())
    assert gpu.fake_runtime.registered == {}
    if victim.exists():
        assert traces_of(checkpoint) == []


def test_a_device_error_that_a_changed_file_explains_names_the_file(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """A driver that trips over a file cut short says something else; the load says which file it was."""
    victim = checkpoint.shards[0].path
    gpu.fake_runtime.on_register = lambda address: os.truncate(victim, 100)

    error = failure_of(lambda: load_by(gpu, checkpoint, "mapped"))

    assert error.code == "changed"
    assert str(victim) in str(error)


def test_a_caller_who_gives_up_gets_its_error_after_the_last_copy(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """An error out of ``progress`` comes out once every thread has ended and everything is given back."""

    def give_up(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        load_by(gpu, checkpoint, progress=give_up)

    caught.value.__traceback__ = None
    del caught
    assert all(stream.done == len(stream.queue) for stream in gpu.fake_runtime.streams.values())
    assert gpu.fake_runtime.registered == {}
    assert traces_of(checkpoint) == []
