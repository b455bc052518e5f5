"""Every way onto a GPU, against a runtime that pins and copies as lazily as the real one: the same bytes by each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_agent.loader import staged
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.direct import DirectShards
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.load import Loaded, load
from remote_agent.loader.plan import Segment
from remote_agent.loader.read_ahead import ReadAhead
from remote_agent.loader.residency import measure_residency
from remote_agent.loader.verify import verify
from remote_agent.loader.views import bytes_of
from remote_agent.protocol.messages import WeightsPolicy
from tests.remote_agent.fake_cuda import FakeGpu, FakeRuntime
from tests.remote_agent.loader.caches_by_hand import drop_from_cache
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write
from tests.remote_agent.loader.gpu_loads import PATHS, load_by, tell, traces_of

pytestmark = pytest.mark.usefixtures("small_ranges")


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


@pytest.mark.parametrize(
    ("path", "every", "registers"), [("auto", None, True), ("auto", 2, True), ("auto", 2, False), ("direct", 1, True)]
)
def test_a_reader_s_first_read_past_the_cache_is_short(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, path: str, every: int | None, registers: bool
) -> None:
    """Its memory has to be cleared before it, whatever it took from the cache until then; later ones are as long as a
    buffer."""
    lengths: dict[str, list[int]] = {}
    read = DirectShards.read

    def read_past(shards: DirectShards, segment: Segment, view: memoryview) -> int:
        lengths.setdefault(threading.current_thread().name, []).append(segment.length)
        return read(shards, segment, view)

    gpu.fake_runtime.registers = registers
    monkeypatch.setattr(staged, "FIRST_READ_BYTES", 512)
    monkeypatch.setattr(DirectShards, "read", read_past)
    tell(monkeypatch, lambda number: every is not None and number % every == 0)

    assert verify(checkpoint, load_by(gpu, checkpoint, path, "bypass").tensors).is_equal

    assert all(first <= 512 for first, *_ in lengths.values())
    assert max(length for _, *rest in lengths.values() for length in rest) == gpu.buffer_bytes


def test_a_reader_s_first_read_through_the_cache_is_as_long_as_a_buffer(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache is no memory of its own."""
    firsts: dict[str, int] = {}
    bring_in = ReadAhead.bring_in

    def note(ahead: ReadAhead, shard: int, place: int, length: int) -> bool:
        firsts.setdefault(threading.current_thread().name, length)
        return bring_in(ahead, shard, place, length)

    monkeypatch.setattr(staged, "FIRST_READ_BYTES", 512)
    monkeypatch.setattr(ReadAhead, "bring_in", note)
    tell(monkeypatch, lambda number: False)

    assert verify(checkpoint, load_by(gpu, checkpoint, "staged").tensors).is_equal

    assert max(firsts.values()) == gpu.buffer_bytes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 30_000), max_size=6),
    pad=st.sampled_from([0, 8, 4096]),
    pattern=st.lists(st.booleans(), min_size=1, max_size=4),
    path=st.sampled_from(PATHS),
    page_cache=st.sampled_from(["keep", "bypass"]),
    pages=st.integers(1, 3),
    readers=st.integers(1, 4),
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
    readers: int,
    registered: int | None,
) -> None:
    """No combination of sizes, places, cached ranges, ways, buffers and readers loses or doubles a byte."""
    tensors = [tensor(str(number), "U8", [size], number + 1) for number, size in enumerate(sizes)]
    write(tmp_path / "a.safetensors", serialise(tensors[::2], pad=pad))
    write(tmp_path / "b.safetensors", serialise(tensors[1::2], pad=pad))
    checkpoint = inspect(tmp_path)
    gpu = FakeGpu(FakeRuntime())
    gpu.buffer_bytes, gpu.readers, gpu.registered_bytes = 4096 * pages, readers, registered
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


def test_more_is_on_its_way_from_a_disk_than_fits_the_buffers(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reader waits for the disk at once, and only then for one of the buffers, of which there are fewer."""
    cold = gpu.ring.limits.cold
    assert cold.readers > cold.buffers
    tell(monkeypatch, lambda number: False)
    together, first = threading.Barrier(cold.readers, timeout=30), iter(range(cold.readers))
    bring_in = ReadAhead.bring_in

    def wait_for_all(ahead: ReadAhead, shard: int, place: int, length: int) -> bool:
        if next(first, None) is not None:
            together.wait()
        return bring_in(ahead, shard, place, length)

    monkeypatch.setattr(ReadAhead, "bring_in", wait_for_all)

    loaded = load_by(gpu, checkpoint, "staged")

    assert (loaded.path, verify(checkpoint, loaded.tensors).is_equal) == ("staged", True)
    assert traces_of(checkpoint) == []
