"""Samples of memory: where they lie, what they find."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from remote_agent.devices.calls import Calls
from remote_agent.resident import checksum
from remote_agent.resident.checksum import (
    SAMPLE_BYTES,
    SAMPLES,
    Samples,
    copy_samples,
    sample_offsets,
    sampled_checksum,
    views_of_samples,
)
from tests.remote_agent.fake_cuda import FakeRuntime


@pytest.mark.parametrize(
    "size", [1, SAMPLE_BYTES - 1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 100_000, 10 << 20, 13_500_000_001]
)
def test_samples_are_spread_from_the_first_byte_to_the_last(size: int) -> None:
    """However large the memory, the first and the last bytes are among them, and none lies beyond."""
    offsets = sample_offsets(size)

    assert offsets[0] == 0
    assert offsets[-1] == max(0, size - SAMPLE_BYTES)
    assert len(offsets) == SAMPLES or size < SAMPLES + SAMPLE_BYTES
    steps = [after - before for before, after in itertools.pairwise(offsets)]
    assert len(set(steps[:-1])) <= 1
    assert not steps or 0 <= steps[-1] - steps[0] < SAMPLES


def test_the_checksum_is_of_the_bytes_and_their_number() -> None:
    """Equal bytes agree whatever dtype made them; a byte changed in a sample, or a size, does not."""
    values = torch.arange(100_000, dtype=torch.float32)
    content = values.view(torch.uint8)
    expected = sampled_checksum(content, content.numel())

    assert expected == sampled_checksum(content.clone(), content.numel())
    assert expected != sampled_checksum(content, content.numel() - 1)
    for position in (0, content.numel() - 1, sample_offsets(content.numel())[20] + 7):
        changed = content.clone()
        changed[position] ^= 1
        assert expected != sampled_checksum(changed, content.numel())


@pytest.mark.parametrize("size", [1, SAMPLE_BYTES, SAMPLE_BYTES + 1, SAMPLE_BYTES + 40, 100_001, 1 << 20])
def test_a_device_s_samples_are_the_very_bytes(size: int) -> None:
    """By one copy or one view of all that stand at one distance, also within a larger storage."""
    memory = torch.arange(size + 16, dtype=torch.int64).to(torch.uint8)[16:]
    offsets, length = sample_offsets(size), min(SAMPLE_BYTES, size)

    expected = b"".join(bytes(memory[offset : offset + length].tolist()) for offset in offsets)
    views = torch.cat([view.reshape(-1) for view in views_of_samples(memory, offsets, length)])
    assert bytes(views.tolist()) == expected
    runtime = FakeRuntime()
    assert copy_samples(Calls("runtime", runtime), memory.data_ptr(), offsets, length) == expected


def test_one_call_copies_all_samples_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they lie further apart, or nearer to each other, than the rows of one copy may: then each has its own."""
    memory = torch.arange(1 << 20, dtype=torch.int64).to(torch.uint8)
    offsets = sample_offsets(memory.numel())

    def calls(length: int) -> tuple[int, int]:
        runtime = FakeRuntime()
        copy_samples(Calls("runtime", runtime), memory.data_ptr(), offsets, length)
        return runtime.calls["cudaMemcpy2D"], runtime.calls["cudaMemcpy"]

    assert calls(SAMPLE_BYTES) == (1, 1)
    assert calls(offsets[1] + 1) == (0, SAMPLES)
    monkeypatch.setattr(checksum, "PITCH_LIMIT_BYTES", offsets[1] - 1)
    assert calls(SAMPLE_BYTES) == (0, SAMPLES)


def test_a_gpu_s_samples_are_copied_by_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the caller's own: memory behind a descriptor is open to the one that it is mapped for alone."""
    content = torch.arange(1 << 20, dtype=torch.int64).to(torch.uint8)
    memory = SimpleNamespace(device=torch.device("cuda", 1), data_ptr=content.data_ptr)
    order: list[object] = []

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        order.append(chosen)
        yield
        order.append("the caller's own")

    runtime = FakeRuntime()
    copy = runtime.do_cudaMemcpy2D
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(runtime, "cudaMemcpy2D", lambda *call: (order.append("copy"), copy(*call))[1], raising=False)
    monkeypatch.setattr(checksum, "Calls", lambda name: Calls(name, runtime))

    assert sampled_checksum(memory, 1 << 20) == sampled_checksum(content, 1 << 20)  # type: ignore[arg-type]
    assert list(dict.fromkeys(order)) == [memory.device, "copy", "the caller's own"]


def test_what_lies_behind_the_given_size_does_not_count() -> None:
    """An allocation is larger than what was asked for, and its end holds anything."""
    content = torch.zeros(50_000, dtype=torch.uint8)
    other = content.clone()
    other[40_000:] = 9

    assert sampled_checksum(content, 40_000) == sampled_checksum(other, 40_000)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_samples_that_were_queued_are_read_again_each_time(place: str) -> None:
    """The checksum is that of the memory when they were queued, whatever else the device does meanwhile."""
    memory = torch.arange(1 << 20, dtype=torch.int64).to(torch.uint8).to(place)
    samples = Samples(memory, memory.numel())
    for number in range(3):
        memory.add_(number)
        expected = sampled_checksum(memory, memory.numel())
        samples.queue()
        busy = torch.ones(2048, 2048, device=place)
        busy @= busy

        assert samples.checksum() == expected
