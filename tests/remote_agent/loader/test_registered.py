"""Shards that stay registered: a load copies them from where they lie, and leaves them so."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from remote_agent.errors import DeviceError
from remote_agent.loader import registrations
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.filemap import PAGE_BYTES
from remote_agent.loader.load import Loaded, load
from remote_agent.loader.registrations import Piece, RegistrationRefused, Registrations, register_all
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.verify import verify
from remote_agent.protocol.messages import WeightsPolicy
from tests.remote_agent.fake_cuda import Code, FakeGpu
from tests.remote_agent.loader.gpu_loads import traces_of

STEP_BYTES = 5 * PAGE_BYTES
"""Not a multiple of a load's segments: copies are split where one registration ends."""


def register(checkpoint: Checkpoint, gpu: FakeGpu, step_bytes: int = STEP_BYTES) -> Registrations:
    gpu.runtime("cudaSetDevice", gpu.ordinal)
    with OpenShards(checkpoint.shards) as shards:
        return register_all(
            checkpoint.shards, shards, gpu.runtime, step_bytes, lambda done, total: None, lambda path: None
        )


@contextmanager
def registered(checkpoint: Checkpoint, gpu: FakeGpu, step_bytes: int = STEP_BYTES) -> Iterator[Registrations]:
    found = register(checkpoint, gpu, step_bytes)
    try:
        yield found
    finally:
        found.close()


def load_from(found: Registrations, gpu: FakeGpu, checkpoint: Checkpoint, path: str = "auto") -> Loaded:
    policy = WeightsPolicy(path=path)  # type: ignore[arg-type]
    return load(checkpoint, gpu, policy, progress=lambda done, total: None, registered=found)


@pytest.mark.parametrize("step_pages", [1, 2, 3, 4, 1000])
def test_loads_copy_from_what_is_registered_and_register_nothing(
    checkpoint: Checkpoint, gpu: FakeGpu, step_pages: int
) -> None:
    """Three loads from one registration, whatever its pieces: every byte by ``registered``, none on the host."""
    with registered(checkpoint, gpu, step_pages * PAGE_BYTES) as found:
        calls = gpu.fake_runtime.calls["cudaHostRegister"]
        for _ in range(3):
            loaded = load_from(found, gpu, checkpoint)

            assert (loaded.path, loaded.reason) == ("registered", None)
            assert loaded.counters["registered_bytes"] == checkpoint.bytes
            assert (loaded.counters["staged_bytes"], loaded.counters["mapped_bytes"]) == (0, 0)
            assert loaded.counters["registrations"] == 0
            assert verify(checkpoint, loaded.tensors).is_equal
        assert gpu.fake_runtime.calls["cudaHostRegister"] == calls == found.count
        assert gpu.fake_runtime.calls["cudaHostUnregister"] == 0
        assert found.size_bytes == sum(map(len, gpu.fake_runtime.registered.values()))

    assert traces_of(checkpoint) == []


def test_a_path_that_is_asked_for_is_taken_instead(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """``staged`` means readers, also where a copy from registered pages could be had."""
    with registered(checkpoint, gpu) as found:
        loaded = load_from(found, gpu, checkpoint, "staged")

    assert loaded.path == "staged"
    assert verify(checkpoint, loaded.tensors).is_equal


def test_what_is_not_registered_yet_is_registered_on_the_way(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """Registrations and what a load adds to them never overlap; the owner gives all of it back."""
    with registered(checkpoint, gpu) as found:
        for first in (0, 2 * STEP_BYTES):
            found.give_back(0, Piece(first, first + STEP_BYTES))
        loaded = load_from(found, gpu, checkpoint)

        assert loaded.path == "registered+mapped"
        assert loaded.counters["mapped_bytes"] + loaded.counters["registered_bytes"] == checkpoint.bytes
        assert verify(checkpoint, loaded.tensors).is_equal

    assert traces_of(checkpoint) == []


def test_a_file_may_be_registered_by_others_once_it_is_registered_here(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is for the act: who keeps registrations keeps nobody from loading; who holds it is waited for."""
    polls: list[float] = []
    with checkpoint.shards[1].path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def poll(delay_s: float) -> None:
            polls.append(delay_s)
            if len(polls) == 3:
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(registrations.time, "sleep", poll)
        with registered(checkpoint, gpu) as found:
            assert found.count
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    assert len(polls) == 3


def test_a_file_that_another_process_registers_for_ever_is_named(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting has an end, and what was registered before it is given back."""
    monkeypatch.setattr(registrations, "LOCK_WAIT_S", 0)
    before = gpu.fake_runtime.leaks()
    with checkpoint.shards[1].path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RegistrationRefused, match=r"b\.safetensors is registered by another load"):
            register(checkpoint, gpu)

    assert gpu.fake_runtime.leaks() == before == ["1 pinned", "3 streams", "6 events", "1 allocated"]
    assert traces_of(checkpoint) == []


@pytest.mark.parametrize("code", [Code.memory_allocation, Code.not_supported, Code.invalid_value])
def test_a_registration_that_is_refused_midway_leaves_nothing(checkpoint: Checkpoint, gpu: FakeGpu, code: Code) -> None:
    """The refusal has the driver's name and the bytes; pieces registered before it are given back."""
    numbers = iter(range(100))

    def refuse(address: int) -> None:
        gpu.fake_runtime.fail_at = "cudaHostRegister" if next(numbers) == 2 else None

    gpu.fake_runtime.on_register, gpu.fake_runtime.fail_with = refuse, code
    with pytest.raises(RegistrationRefused, match=rf"registration refused: {code.name} \({code.value}\) for \d+ bytes"):
        register(checkpoint, gpu)

    gpu.fake_runtime.fail_at = None
    assert gpu.fake_runtime.registered == {}
    assert traces_of(checkpoint) == []


def test_an_error_of_the_device_is_no_refusal(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """A context that is broken can't go on by another way."""
    gpu.fake_runtime.fail_at = "cudaHostRegister"
    with pytest.raises(DeviceError, match="cudaHostRegister failed: illegal_access"):
        register(checkpoint, gpu)
    gpu.fake_runtime.fail_at = None

    assert traces_of(checkpoint) == []


@pytest.mark.parametrize(
    "change",
    [lambda path: path.touch(), lambda path: path.write_bytes(path.read_bytes()[:-4000])],
    ids=["touched", "cut"],
)
def test_a_file_changed_since_is_not_taken_for_what_is_registered(
    checkpoint: Checkpoint, gpu: FakeGpu, change: Callable[[Path], object]
) -> None:
    """Pages that a file lost keep their bytes while they are registered, and are no longer the file's."""
    with registered(checkpoint, gpu) as found:
        change(checkpoint.shards[0].path)
        with pytest.raises(Exception, match=r"a\.safetensors: changed since it was checked"):
            load_from(found, gpu, checkpoint)

    assert traces_of(inspect(checkpoint.shards[1].path)) == []
