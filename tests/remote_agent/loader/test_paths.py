"""Every way onto a GPU, against a runtime that pins and copies as lazily as the real one: the same bytes by each."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_agent.errors import AgentError, DeviceError, LoadError
from remote_agent.loader import residency, route
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.headers import Header
from remote_agent.loader.load import Loaded, load
from remote_agent.loader.residency import RangeResidency, measure_residency
from remote_agent.loader.verify import verify
from remote_agent.loader.views import bytes_of
from remote_agent.protocol.messages import WeightsPolicy
from tests.remote_agent.fake_cuda import Code, FakeGpu, FakeRuntime
from tests.remote_agent.loader.caches_by_hand import drop_from_cache, refuse_direct
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write

PATHS = ("auto", "mapped", "staged", "direct")
RANGE = 16384


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of kilobytes have several ranges, as real ones have."""
    monkeypatch.setattr(residency, "RANGE_BYTES", RANGE)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Two shards of some hundred kilobytes, with odd places, in many more segments than there are buffers."""
    first = [tensor("odd", "U8", [3]), tensor("w", "F32", [20_000], 2), tensor("b", "BF16", [77, 3], 3)]
    second = [tensor("v", "BF16", [50_000], 4), tensor("tag", "F16", [0]), tensor("scale", "F32", [], 5)]
    write(tmp_path / "a.safetensors", serialise(first))
    write(tmp_path / "b.safetensors", serialise(second, pad=0))
    return inspect(tmp_path)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    """A GPU whose every object must be given back, and whose rules must be kept."""
    device = FakeGpu(FakeRuntime())
    device.open_context()
    yield device
    device.close()
    assert device.fake_runtime.leaks() == []
    assert device.fake_runtime.errors == []


def load_by(
    gpu: FakeGpu,
    checkpoint: Checkpoint,
    path: str = "auto",
    page_cache: str = "keep",
    progress: Callable[[int, int], None] = lambda done, total: None,
    announce: Callable[[Path], None] = lambda path: None,
) -> Loaded:
    policy = WeightsPolicy(path=path, page_cache=page_cache)  # type: ignore[arg-type]
    return load(checkpoint, gpu, policy, progress=progress, announce=announce)


def tell(monkeypatch: pytest.MonkeyPatch, is_cached: Callable[[int], bool]) -> None:
    """Let a load believe that ranges of each file are cached or not, by their number."""

    def measure(header: Header, descriptor: int) -> RangeResidency:
        count = -(-header.size_bytes // RANGE)
        return RangeResidency(tuple(float(is_cached(number)) for number in range(count)), "told")

    monkeypatch.setattr(route, "measure_ranges", measure)


def traces_of(checkpoint: Checkpoint) -> list[str]:
    """Return what a load left: threads, maps, descriptors and locks of the shards."""
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("load-")]
    names = {str(header.path) for header in checkpoint.shards}
    left += [line for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[-1] in names]
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and str(entry.readlink()) in names:
            left.append(str(entry.readlink()))
    for name in names:
        with open(name, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return left


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("offset", range(0, 17, 3))
def test_every_dtype_at_odd_offsets_is_byte_exact(tmp_path: Path, gpu: FakeGpu, path: str, offset: int) -> None:
    """Whatever the way, the dtype and its place in the file, its bytes arrive, aligned for a view."""
    tensors = [tensor("head", "U8", [offset])]
    for seed, dtype in enumerate(DTYPES, 2):
        tensors += [tensor(dtype, dtype, [3, 4], seed), tensor(f"{dtype}.none", dtype, [0, 7])]
        tensors.append(tensor(f"{dtype}.large", dtype, [40, 128], seed + 9))
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors, pad=0)))

    loaded = load_by(gpu, checkpoint, path)

    assert loaded.reason is None
    for name, dtype, _, content in tensors:
        found = loaded.tensors[name]
        assert bytes(bytes_of(found).numpy()) == content
        assert found.data_ptr() % DTYPES[dtype].item_bytes == 0
    ways = [loaded.counters[f"{way}_bytes"] for way in ("mapped", "staged", "direct")]
    assert sum(ways) == checkpoint.bytes
    assert loaded.counters["registrations_refused"] == 0


@pytest.mark.parametrize("path", PATHS[1:])
def test_a_path_that_is_asked_for_takes_every_byte(checkpoint: Checkpoint, gpu: FakeGpu, path: str) -> None:
    """Forced, one way moves all of it, cached or not."""
    drop_from_cache(checkpoint.shards[0].path)

    loaded = load_by(gpu, checkpoint, path)

    assert (loaded.path, loaded.reason) == (path, None)
    assert loaded.counters[f"{path}_bytes"] == checkpoint.bytes
    assert verify(checkpoint, loaded.tensors).is_equal


def test_ways_are_mixed_by_what_the_page_cache_holds(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached ranges are registered or copied, others go past the cache where it is to be bypassed."""
    tell(monkeypatch, lambda number: number % 2 == 0)

    bypassed = load_by(gpu, checkpoint, page_cache="bypass")
    kept = load_by(gpu, checkpoint)

    uncached = sum(header.size_bytes for header in checkpoint.shards) - bypassed.counters["cached_bytes"]
    assert 0 < bypassed.counters["direct_bytes"] <= uncached
    assert "direct" in bypassed.path.split("+")
    assert bypassed.counters["direct_bytes"] + bypassed.counters["cached_bytes"] == checkpoint.bytes
    assert kept.counters["direct_bytes"] == 0
    assert kept.counters["staged_bytes"] >= bypassed.counters["direct_bytes"]
    for loaded in (bypassed, kept):
        assert loaded.reason is None
        assert verify(checkpoint, loaded.tensors).is_equal


def test_bypassing_leaves_the_page_cache_as_it_was(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """What was cached stays, what was not is not afterwards; keeping leaves all of it."""
    drop_from_cache(checkpoint.shards[0].path)
    before = measure_residency(checkpoint.shards)

    bypassed = load_by(gpu, checkpoint, page_cache="bypass")
    after = measure_residency(checkpoint.shards)
    load_by(gpu, checkpoint, page_cache="keep")

    assert bypassed.counters["direct_bytes"] == checkpoint.shards[0].data_bytes
    assert before == after
    assert measure_residency(checkpoint.shards).cached_bytes == checkpoint.bytes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 30_000), max_size=6),
    pad=st.sampled_from([0, 8, 4096]),
    pattern=st.lists(st.booleans(), min_size=1, max_size=4),
    path=st.sampled_from(PATHS),
    page_cache=st.sampled_from(["keep", "bypass"]),
    pages=st.integers(1, 3),
    lanes=st.integers(1, 4),
    registered=st.one_of(st.none(), st.integers(0, 40_000)),
)
def test_any_layout_by_any_way_arrives(
    tmp_path: Path,
    sizes: list[int],
    pad: int,
    pattern: list[bool],
    path: str,
    page_cache: str,
    pages: int,
    lanes: int,
    registered: int | None,
) -> None:
    """No combination of sizes, places, cached ranges, ways, buffers and lanes loses or doubles a byte."""
    tensors = [tensor(str(number), "U8", [size], number + 1) for number, size in enumerate(sizes)]
    write(tmp_path / "a.safetensors", serialise(tensors[::2], pad=pad))
    write(tmp_path / "b.safetensors", serialise(tensors[1::2], pad=pad))
    checkpoint = inspect(tmp_path)
    gpu = FakeGpu(FakeRuntime())
    gpu.buffer_bytes, gpu.lanes, gpu.registered_bytes = 4096 * pages, lanes, registered
    gpu.open_context()
    with pytest.MonkeyPatch.context() as patch:
        tell(patch, lambda number: pattern[number % len(pattern)])

        loaded = load_by(gpu, checkpoint, path, page_cache)

    assert verify(checkpoint, loaded.tensors).is_equal
    assert sum(loaded.counters[f"{way}_bytes"] for way in ("mapped", "staged", "direct")) == checkpoint.bytes
    gpu.close()
    assert gpu.fake_runtime.errors == []
    assert gpu.fake_runtime.leaks() == []
    assert traces_of(checkpoint) == []


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

    patch.setattr("remote_agent.loader.registrar.FileMap", refuse)


def refused_lock(gpu: FakeGpu, patch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    patch.setattr("remote_agent.loader.registrar.fcntl.flock", refuse)


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


def test_a_disk_error_past_the_cache_names_file_and_place(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no refusal ends the load."""
    refuse_direct(monkeypatch, errno.EIO, at_open=False)

    with pytest.raises(LoadError, match=r"safetensors: can't be read at byte \d+: Input/output error") as caught:
        load_by(gpu, checkpoint, "direct")
    assert caught.value.code == "unreadable"


def test_no_more_is_registered_at_once_than_allowed(checkpoint: Checkpoint) -> None:
    """The oldest registrations are given back while later segments are copied."""
    gpu = FakeGpu(FakeRuntime())
    gpu.registered_bytes = 2 * gpu.registration_bytes
    gpu.open_context()

    loaded = load_by(gpu, checkpoint, "mapped")

    assert verify(checkpoint, loaded.tensors).is_equal
    assert gpu.fake_runtime.most_registered <= 3 * gpu.registration_bytes
    gpu.close()
    assert gpu.fake_runtime.errors == []
    assert gpu.fake_runtime.leaks() == []


def test_each_shard_is_announced_before_it_is_mapped(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """Whoever dies of a page has said before which file it lies in."""
    told: list[tuple[Path, int]] = []

    load_by(
        gpu,
        checkpoint,
        "mapped",
        announce=lambda path: told.append((path, gpu.fake_runtime.calls["cudaHostRegister"])),
    )

    assert [path for path, _ in told] == [header.path for header in checkpoint.shards]
    assert told[0][1] == 0


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


def failure_of(call: Callable[[], object]) -> LoadError:
    """Return the error of ``call`` without its traceback, whose frames hold on to everything in them."""
    try:
        call()
    except LoadError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    raise AssertionError("the load did not fail")


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


def load_together(loads: Sequence[Callable[[], Loaded]]) -> list[Loaded]:
    """Do loads at once and return what each gave."""
    results: list[Loaded | None] = [None] * len(loads)

    def run(number: int) -> None:
        results[number] = loads[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(loads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for result in results if result is not None]


def test_loads_at_once_share_a_context(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """Two loads on one GPU take turns with its buffers; each gets its bytes."""
    loaded = load_together([lambda: load_by(gpu, checkpoint), lambda: load_by(gpu, checkpoint, "direct")])

    assert [verify(checkpoint, one.tensors).is_equal for one in loaded] == [True, True]


def test_loads_at_once_on_two_gpus_share_the_files(checkpoint: Checkpoint) -> None:
    """No file is registered by two loads at one time, and each GPU gets its bytes."""
    gpus = [FakeGpu(FakeRuntime()) for _ in range(2)]
    for gpu in gpus:
        gpu.open_context()

    loaded = load_together([lambda gpu=gpu: load_by(gpu, checkpoint) for gpu in gpus])  # type: ignore[misc]

    assert [verify(checkpoint, one.tensors).is_equal for one in loaded] == [True, True]
    for gpu in gpus:
        gpu.close()
        assert gpu.fake_runtime.errors == []
        assert gpu.fake_runtime.leaks() == []
    assert traces_of(checkpoint) == []


def test_given_memory_is_filled_by_every_way(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """A caller's own device memory gets the same bytes at the plan's places, whatever the way."""
    for path in PATHS:
        given = gpu.allocate(checkpoint.bytes + 8192)

        loaded = load(
            checkpoint,
            gpu,
            WeightsPolicy(path=path),  # type: ignore[arg-type]
            progress=lambda *_: None,
            memory=lambda size_bytes, given=given: given,  # type: ignore[misc]
        )

        assert loaded.base is given
        assert torch.equal(given[loaded.plan.size_bytes :], torch.full_like(given[loaded.plan.size_bytes :], 0xEE))  # type: ignore[union-attr]
        assert verify(checkpoint, loaded.tensors).is_equal
