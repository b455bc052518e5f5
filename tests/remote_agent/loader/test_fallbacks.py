"""What a host, a device or a file does not allow is named, and the bytes arrive another way."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.loader import route
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.filemap import FileMap
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.verify import verify
from tests.remote_agent.fake_cuda import Code, FakeGpu, FakeRuntime
from tests.remote_agent.loader.caches_by_hand import refuse_direct
from tests.remote_agent.loader.files_by_hand import write
from tests.remote_agent.loader.gpu_loads import load_by, tell, traces_of

pytestmark = pytest.mark.usefixtures("small_ranges")


def old_driver(gpu: FakeGpu, patch: pytest.MonkeyPatch, folder: Path) -> None:
    version = write(folder / "version", b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  565.57.01  Thu Oct 10\n")
    patch.setattr(route, "DRIVER_VERSION", version)


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.06  Wed Jun 26 06:46:07 UTC 2024", True),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (root@host)", False),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  565.57.01  Release Build  (root@host)", True),
        ("nothing of that kind", False),
    ],
)
def test_the_kernels_driver_is_told_by_its_own_words(
    checkpoint: Checkpoint, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_refused: bool
) -> None:
    """Both kinds of kernel module name their branch; where it is not told the CUDA driver's version decides."""
    monkeypatch.setattr(route, "DRIVER_VERSION", write(tmp_path / "version", text.encode()))

    loaded = load_by(gpu, checkpoint, "mapped")

    assert (loaded.path == "staged") is is_refused


def set_runtime(**attributes: object) -> Callable[[FakeGpu, pytest.MonkeyPatch, Path], None]:
    def apply(gpu: FakeGpu, patch: pytest.MonkeyPatch, folder: Path) -> None:
        for name, value in attributes.items():
            setattr(gpu.fake_runtime, name, value)

    return apply


def network_filesystem(gpu: FakeGpu, patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(route, "filesystem_of", lambda path: "nfs4")


def refused_map(gpu: FakeGpu, patch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    patch.setattr("remote_agent.loader.registrations.FileMap", refuse)


def refused_lock(gpu: FakeGpu, patch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    patch.setattr("remote_agent.loader.registrations.fcntl.flock", refuse)


@pytest.mark.parametrize("path", ["auto", "mapped"])
@pytest.mark.parametrize(
    ("hinder", "words"),
    [
        (set_runtime(registers=False), "registration refused: this device and driver register no read-only memory"),
        (set_runtime(fail_at="cudaDeviceGetAttribute"), "registration refused: cudaDeviceGetAttribute failed"),
        (set_runtime(version=12070), "registration refused: the driver is of CUDA 12.7, older than 12.8"),
        (old_driver, "registration refused: driver 565 marks pages as written; 570 does not"),
        (network_filesystem, "registration refused: nfs4 is not a filesystem known to be local"),
        (
            set_runtime(fail_at="cudaHostRegister", fail_with=Code.not_supported),
            "registration refused: not_supported (801) for 16384 bytes",
        ),
        (
            set_runtime(fail_at="cudaHostRegister", fail_with=Code.memory_allocation),
            "registration refused: memory_allocation (2) for 16384 bytes",
        ),
        (refused_map, "mmap refused on {filesystem}: No such device (errno 19)"),
        (refused_lock, "flock refused on {filesystem}: No locks available (errno 37)"),
    ],
)
def test_what_cannot_be_registered_is_read_instead(
    checkpoint: Checkpoint,
    tmp_path: Path,
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    hinder: Callable[[FakeGpu, pytest.MonkeyPatch, Path], None],
    words: str,
) -> None:
    """Each reason not to register, known before or found out on the way, is named once, and every byte arrives."""
    with monkeypatch.context() as patch:
        hinder(gpu, patch, tmp_path / "driver")
        loaded = load_by(gpu, checkpoint, path)
    gpu.fake_runtime.fail_at = None

    assert loaded.path == "staged"
    assert str(loaded.reason).startswith(words.format(filesystem=filesystem_of(tmp_path)))
    assert loaded.counters["mapped_bytes"] == 0
    assert verify(checkpoint, loaded.tensors).is_equal
    assert traces_of(checkpoint) == []


def test_registering_that_is_refused_half_way_leaves_the_rest_to_readers(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """What was registered arrives from there, what was not is read, and both ways are shown."""

    def refuse_later(address: int) -> None:
        gpu.fake_runtime.registers = gpu.fake_runtime.calls["cudaHostRegister"] < 4

    gpu.fake_runtime.on_register = refuse_later

    loaded = load_by(gpu, checkpoint, "mapped")

    assert loaded.path == "mapped+staged"
    assert str(loaded.reason).startswith("registration refused: not_supported (801)")
    assert (loaded.counters["registrations"], loaded.counters["registrations_refused"]) == (3, 1)
    assert verify(checkpoint, loaded.tensors).is_equal


@pytest.mark.parametrize("path", ["auto", "mapped"])
def test_a_shard_that_another_load_registers_is_read(checkpoint: Checkpoint, gpu: FakeGpu, path: str) -> None:
    """Nobody waits for another process: its shard is read, the others are registered."""
    with open(checkpoint.shards[0].path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        loaded = load_by(gpu, checkpoint, path)

    assert loaded.reason == "registration refused: a.safetensors is registered by another load"
    assert loaded.counters["mapped_bytes"] <= checkpoint.shards[1].data_bytes
    assert loaded.counters["staged_bytes"] >= checkpoint.shards[0].data_bytes
    assert verify(checkpoint, loaded.tensors).is_equal
    assert traces_of(checkpoint) == []


@pytest.mark.parametrize("at_open", [True, False])
def test_a_filesystem_that_refuses_direct_reads_is_read_through_its_cache(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, at_open: bool
) -> None:
    """Refused when opened or at the first read, the reason names filesystem and refusal, and every byte arrives."""
    refuse_direct(monkeypatch, errno.EINVAL, at_open)

    loaded = load_by(gpu, checkpoint, "direct")

    where = filesystem_of(checkpoint.root)
    assert loaded.path == "staged"
    assert loaded.reason == f"O_DIRECT refused on {where}: Invalid argument (errno 22); read through the page cache"
    assert verify(checkpoint, loaded.tensors).is_equal


def test_a_kernel_that_takes_no_advice_is_read_all_the_same(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are built without it; reading ahead is a help and no part of the load."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    tell(monkeypatch, lambda number: False)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    monkeypatch.setattr(FileMap, "populate", refuse)

    loaded = load_by(gpu, inspect(checkpoint.root))

    assert loaded.path == "staged"
    assert verify(checkpoint, loaded.tensors).is_equal


def test_buffers_smaller_than_a_block_read_nothing_past_the_cache(checkpoint: Checkpoint) -> None:
    """A ring that can't hold whole blocks is named; every byte arrives through the page cache."""
    gpu = FakeGpu(FakeRuntime())
    gpu.buffer_bytes = 1000
    gpu.open_context()

    loaded = load_by(gpu, checkpoint, "direct")

    assert "bytes of whole blocks do not fit a buffer of 1000" in str(loaded.reason)
    assert verify(checkpoint, loaded.tensors).is_equal
    assert "no multiple of a page" in str(load_by(gpu, checkpoint, "mapped").reason)
    gpu.close()


def test_a_bypass_that_a_forced_path_rules_out_is_named(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """What was asked for twice and contradicts itself follows the path and says so."""
    loaded = load_by(gpu, checkpoint, "staged", "bypass")

    assert loaded.path == "staged"
    assert loaded.reason == "page_cache=bypass: what is staged goes through the page cache"
