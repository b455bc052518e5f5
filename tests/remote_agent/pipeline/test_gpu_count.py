"""Imports that ask how many GPUs there are get the true count, and this process asked no driver for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from remote_agent.agentd.zygotes import ZygoteTimes
from remote_agent.pipeline import gpu_count
from remote_agent.pipeline.gpu_count import gpus_counted_in_child


@pytest.fixture(autouse=True)
def not_counted_yet() -> Iterator[None]:
    """A process counts once."""
    gpu_count._count_in_child.cache_clear()
    yield
    gpu_count._count_in_child.cache_clear()


def counting(monkeypatch: pytest.MonkeyPatch, log: Path, count: Callable[[], int]) -> Callable[[], list[int]]:
    """Have torch count by ``count``; returns what tells the processes that did, one a time."""

    def device_count() -> int:
        with log.open("a") as written:
            written.write(f"{os.getpid()}\n")
        return count()

    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    return lambda: [int(pid) for pid in log.read_text().split()] if log.exists() else []


def test_another_process_counts_once_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And who kept the function that was there meanwhile asks this process's torch afterwards."""
    pids = counting(monkeypatch, tmp_path / "log", lambda: 3)
    own = torch.cuda.device_count
    for _ in range(2):
        with gpus_counted_in_child():
            kept = torch.cuda.device_count
            assert (kept(), kept()) == (3, 3)
    asked = pids()
    assert len(asked) == 1
    assert asked != [os.getpid()]

    assert torch.cuda.device_count is own
    assert kept() == 3
    assert pids() == [*asked, os.getpid()]


def test_torch_finds_a_gpu_by_that_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As packages ask while they are imported, wherever torch was built for GPUs."""
    if not torch.cuda._is_compiled():
        monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    pids = counting(monkeypatch, tmp_path / "log", lambda: 1)
    with gpus_counted_in_child():
        assert torch.cuda.is_available()

    assert os.getpid() not in pids()


def test_torch_counts_again_where_an_import_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of what was imported is passed on."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    own = torch.cuda.device_count
    with pytest.raises(ImportError, match="no such package"), gpus_counted_in_child():
        raise ImportError("no such package")

    assert torch.cuda.device_count is own


def die() -> int:
    """End as a process does in a driver that breaks."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def fail() -> int:
    """Fail as torch does with a driver that is too old."""
    raise RuntimeError("the driver is too old")


def leave() -> int:
    """End as a library does that gives up."""
    os._exit(1)


def hang() -> int:
    """Wait as NVML does for a driver that hangs."""
    while True:
        signal.pause()


def test_a_count_that_is_waited_for_leaves_time_for_the_imports() -> None:
    """agentd gives up a zygote that is not ready by then."""
    assert ZygoteTimes().ready_s - 60 >= gpu_count.COUNT_TIMEOUT_S


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (die, "ended without an answer; imports are told that there is none"),
        (hang, "gave no answer within 0.5 s; imports are told that there is none"),
        (leave, "ended without an answer; imports are told that there is none"),
        (fail, "the driver is too old"),
    ],
)
def test_a_driver_that_breaks_counts_as_no_gpu(
    count: Callable[[], int], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The log says so, and the process that imports lives."""
    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(gpu_count, "COUNT_TIMEOUT_S", 0.5)
    with gpus_counted_in_child():
        assert torch.cuda.device_count() == 0

    assert said in capfd.readouterr().err
