"""On a real GPU: bytes, ring and errors as the fake promises them. Run with ``-m gpu``."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from remote_agent.devices import open_device
from remote_agent.devices.cuda import CudaDevice
from remote_agent.errors import DeviceError, LoadError
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.limits import Cut, LoaderLimits
from remote_agent.loader.load import Loaded, load
from remote_agent.loader.registrations import RegistrationRefused, Registrations, register_all
from remote_agent.loader.residency import measure_residency
from remote_agent.loader.ring import PinnedRing
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.verify import verify
from remote_agent.loader.views import bytes_of
from remote_agent.protocol.messages import WeightsPolicy
from tests.remote_agent.loader.caches_by_hand import drop_from_cache
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaDevice]:
    device = open_device("cuda:0")
    assert isinstance(device, CudaDevice)
    device.initialise()
    device.open_context()
    yield device
    device.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two shards of 192 MiB together, the second behind one odd byte."""
    root = tmp_path_factory.mktemp("large")
    write(root / "a.safetensors", serialise([tensor(f"a{number}", "BF16", [16 << 20], number) for number in range(3)]))
    odd = [tensor("odd", "U8", [1]), *(tensor(f"b{number}", "F32", [8 << 20], number + 5) for number in range(3))]
    write(root / "b.safetensors", serialise(odd))
    return inspect(root)


PATHS = ("auto", "mapped", "staged", "direct")


def load_by(gpu: CudaDevice, checkpoint: Checkpoint, path: str, page_cache: str = "keep") -> Loaded:
    """Load by a path; skip the test where this host can't register files, or read past its cache, and says so."""
    policy = WeightsPolicy(path=path, page_cache=page_cache)  # type: ignore[arg-type]
    loaded = load(checkpoint, gpu, policy, progress=lambda *_: None)
    if loaded.reason is not None and path in ("mapped", "direct"):
        assert "refused" in loaded.reason
        assert verify(checkpoint, loaded.tensors).is_equal
        pytest.skip(loaded.reason)
    return loaded


def maps_of(checkpoint: Checkpoint) -> list[str]:
    names = [str(header.path) for header in checkpoint.shards]
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[-1] in names]


@pytest.mark.parametrize("path", PATHS)
def test_a_large_checkpoint_arrives_byte_for_byte(gpu: CudaDevice, large: Checkpoint, path: str) -> None:
    """Many times the ring goes through it, three loads in a row, each equal to the library's."""
    for _ in range(3):
        seen: list[tuple[int, int]] = []
        load_by(gpu, large, path)  # skips what this host can't do
        policy = WeightsPolicy(path=path)  # type: ignore[arg-type]
        loaded = load(large, gpu, policy, progress=lambda done, total, seen=seen: seen.append((done, total)))

        result = verify(large, loaded.tensors)
        assert result.mismatches == ()
        assert result.verified == large.tensors
        assert path in ("auto", loaded.path)
        assert sum(loaded.counters[f"{way}_bytes"] for way in ("mapped", "staged", "direct")) == large.bytes
        assert maps_of(large) == []
        assert loaded.rate_bytes_s is not None
        assert loaded.ceiling_bytes_s is not None
        assert loaded.counters["odd_tensors"] == 1
        assert seen[-1] == (large.bytes, large.bytes)
        assert all(one.data_ptr() % 512 == 0 for name, one in loaded.tensors.items() if name != "odd")
        del loaded


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("offset", range(0, 17, 4))
def test_every_dtype_arrives_byte_for_byte(gpu: CudaDevice, tmp_path: Path, path: str, offset: int) -> None:
    """Each dtype that torch has is on the GPU with its bytes, wherever it lay in the file."""
    tensors = [tensor("head", "U8", [offset])]
    for seed, dtype in enumerate(DTYPES, 2):
        tensors += [tensor(dtype, dtype, [3, 4], seed), tensor(f"{dtype}.none", dtype, [0, 7])]
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors, pad=0)))

    loaded = load_by(gpu, checkpoint, path)

    for name, _, _, content in tensors:
        assert loaded.tensors[name].is_cuda
        assert bytes(bytes_of(loaded.tensors[name]).tolist()) == content


def test_what_is_not_cached_goes_past_the_cache_when_asked(gpu: CudaDevice, large: Checkpoint) -> None:
    """Of two shards, one dropped: bypassing reads that one from the disk and leaves it there, keeping brings it in."""
    drop_from_cache(large.shards[0].path)

    bypassed = load_by(gpu, large, "auto", "bypass")
    after = measure_residency(large.shards).cached_bytes
    kept = load_by(gpu, large, "auto", "keep")

    for loaded in (bypassed, kept):
        assert verify(large, loaded.tensors).is_equal
    assert bypassed.counters["direct_bytes"] == large.shards[0].data_bytes
    assert bypassed.counters["cached_bytes"] == large.shards[1].data_bytes
    assert after is not None
    assert after < large.bytes
    assert kept.counters["direct_bytes"] == 0
    assert measure_residency(large.shards).cached_bytes == large.bytes


def test_no_more_is_registered_at_once_than_allowed(large: Checkpoint) -> None:
    """Registrations given back while later segments are copied corrupt nothing."""

    class Careful(CudaDevice):
        def make_ring(self) -> PinnedRing:
            return PinnedRing(self.runtime, self.ordinal, LoaderLimits(registered_bytes=64 << 20))

    device = Careful("cuda:0")
    device.initialise()
    device.open_context()

    loaded = load_by(device, large, "mapped")

    assert verify(large, loaded.tensors).is_equal
    assert maps_of(large) == []
    device.close()


@pytest.mark.parametrize(
    ("cut", "registration_bytes", "streams"),
    [(Cut(5, 2, 2 << 20), 16 << 20, 1), (Cut(2, 24, 1 << 20), 4 << 20, 3), (Cut(4, 8, 16 << 20), 64 << 20, 2)],
)
def test_any_pool_and_any_registration_give_the_same_bytes(
    large: Checkpoint, cut: Cut, registration_bytes: int, streams: int
) -> None:
    """Fewer buffers than readers, small pieces and large ones, one stream and several: by every way the same bytes."""

    class Swept(CudaDevice):
        def make_ring(self) -> PinnedRing:
            limits = LoaderLimits(cut, cut, cut, registration_bytes, streams=streams)
            return PinnedRing(self.runtime, self.ordinal, limits)

    device = Swept("cuda:0")
    device.initialise()
    device.open_context()
    try:
        for path in ("auto", "staged", "direct"):
            loaded = load(large, device, WeightsPolicy(path=path), progress=lambda *_: None)  # type: ignore[arg-type]
            assert verify(large, loaded.tensors).is_equal
    finally:
        device.close()


def test_asking_an_event_that_is_yet_to_come_leaves_no_error(gpu: CudaDevice) -> None:
    """The driver notes "not ready" for the thread, and the end of a load clears that before torch asks."""
    ring = gpu.ring
    with ring.use(ring.limits.staged) as buffers:
        target = torch.empty(buffers[0].view.nbytes * len(buffers), dtype=torch.uint8, device=gpu.torch_device)
        ring.follow(gpu.current_stream())
        for number, buffer in enumerate(buffers):
            place = target.data_ptr() + number * buffer.view.nbytes
            ring.copy(ring.pages_stream, buffer.address, place, buffer.view.nbytes)
        ring.record(buffers[0].event, ring.pages_stream)
        assert not ring.is_over(buffers[0].event)
        ring.wait(buffers[0].event)
        assert ring.is_over(buffers[0].event)

    assert int(gpu.runtime.attempt("cudaGetLastError")[0]) == 0


def test_the_ceiling_is_measured_and_gives_its_events_back(gpu: CudaDevice) -> None:
    """More than a gigabyte a second on any link, measured as often as is asked."""
    assert all(gpu.ring.begin_ceiling().finish() > 1e9 for _ in range(20))


@pytest.mark.parametrize("path", PATHS)
def test_a_file_cut_short_during_the_load_fails_it_by_name(gpu: CudaDevice, tmp_path: Path, path: str) -> None:
    """No signal, no stuck device: the error names the file, and the next load is whole."""
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", serialise([tensor(name, "F32", [16 << 20])]))
    checkpoint = inspect(tmp_path)
    victim = checkpoint.shards[1].path
    content = victim.read_bytes()
    load_by(gpu, checkpoint, path)  # skips what this host can't do

    with pytest.raises(LoadError) as caught:
        load(
            checkpoint,
            gpu,
            WeightsPolicy(path=path),  # type: ignore[arg-type]
            progress=lambda done, total: os.truncate(victim, 100),
        )

    assert caught.value.code == "changed"
    assert str(victim) in str(caught.value)
    caught.value.__traceback__ = None
    del caught
    assert maps_of(checkpoint) == []
    write(victim, content)
    again = inspect(tmp_path)
    assert verify(again, load_by(gpu, again, path).tensors).is_equal


def register(gpu: CudaDevice, checkpoint: Checkpoint) -> Registrations:
    """Register every shard, in pieces that cut across a load's segments; skip where this host can't, and says so."""
    gpu.runtime("cudaSetDevice", gpu.ordinal)
    with OpenShards(checkpoint.shards) as shards:
        try:
            return register_all(checkpoint.shards, shards, gpu.runtime, 20 << 20, lambda *_: None, lambda path: None)
        except RegistrationRefused as refusal:
            pytest.skip(str(refusal))


def test_loads_copy_from_shards_that_stay_registered(gpu: CudaDevice, large: Checkpoint) -> None:
    """Three loads, one registration; another context's user of the files, here a second one, may register them too."""
    kept = register(gpu, large)
    try:
        for _ in range(3):
            loaded = load(large, gpu, WeightsPolicy(), progress=lambda *_: None, registered=kept)
            assert (loaded.path, loaded.counters["registrations"]) == ("registered", 0)
            assert verify(large, loaded.tensors).is_equal
        again = register(gpu, large)
        beside = load_by(gpu, large, "auto")
        assert verify(large, beside.tensors).is_equal
        again.close()
        loaded = load(large, gpu, WeightsPolicy(), progress=lambda *_: None, registered=kept)
        assert verify(large, loaded.tensors).is_equal
    finally:
        kept.close()

    assert maps_of(large) == []


def test_pages_that_a_file_lost_are_not_loaded(gpu: CudaDevice, tmp_path: Path) -> None:
    """A registration keeps the pages of a file that is cut; the load fails by the file's name all the same."""
    tensors = [tensor(f"t{number}", "BF16", [16 << 20], number) for number in range(2)]
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors)))
    kept = register(gpu, checkpoint)
    try:
        os.truncate(checkpoint.shards[0].path, checkpoint.shards[0].size_bytes // 2)
        with pytest.raises(LoadError, match=r"x\.safetensors: changed since it was checked: size"):
            load(checkpoint, gpu, WeightsPolicy(), progress=lambda *_: None, registered=kept)
    finally:
        kept.close()


def test_loads_at_once_share_the_gpu_and_the_files(gpu: CudaDevice, large: Checkpoint) -> None:
    """Threads that load the same files onto one GPU each get their bytes."""
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(load_by, gpu, large, path) for path in ("auto", "staged", "auto")]
        loaded = [one.result() for one in loads]

    assert all(verify(large, one.tensors).is_equal for one in loaded)
    assert maps_of(large) == []


def test_memory_in_use_on_torchs_stream_is_not_overwritten_early(gpu: CudaDevice, large: Checkpoint) -> None:
    """Memory that torch hands out while its last user still runs is written only behind that user."""
    for path in (*PATHS, "auto"):
        held = torch.zeros(large.bytes + 4096, dtype=torch.uint8, device=gpu.torch_device)
        for _ in range(40):
            held.add_(1)
        del held
        loaded = load(large, gpu, WeightsPolicy(path=path), progress=lambda *_: None)  # type: ignore[arg-type]
        assert verify(large, loaded.tensors).is_equal


def test_a_load_given_up_leaves_no_thread_and_no_memory(gpu: CudaDevice, large: Checkpoint) -> None:
    """An error in the middle comes out after the last copy, and the next load is whole."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()

    def give_up(done: int, total: int) -> None:
        raise LoadError("enough")

    with pytest.raises(LoadError, match="enough") as caught:
        load(large, gpu, WeightsPolicy(), progress=give_up)

    caught.value.__traceback__ = None
    del caught
    assert not any(thread.name.startswith("load-") for thread in threading.enumerate())
    loaded = load(large, gpu, WeightsPolicy(), progress=lambda *_: None)
    assert verify(large, loaded.tensors).is_equal
    del loaded
    assert torch.cuda.memory_allocated() - before < 16 << 20


def test_more_than_the_gpu_has_is_refused_with_numbers(gpu: CudaDevice, large: Checkpoint) -> None:
    """Memory that is not there is a LoadError with what is needed and what is free."""
    torch.cuda.empty_cache()  # what earlier tests left with torch would be handed out again
    free, _ = gpu.memory()
    held = torch.empty(free - (64 << 20), dtype=torch.uint8, device=gpu.torch_device)

    with pytest.raises(LoadError, match="bytes are needed") as caught:
        load(large, gpu, WeightsPolicy(), progress=lambda *_: None)

    assert caught.value.code == "out_of_memory"
    del held
    torch.cuda.empty_cache()


def test_the_device_names_itself(gpu: CudaDevice) -> None:
    """Facts and memory are the driver's own, and a call that fails is a DeviceError with name and code."""
    facts = gpu.initialise()

    assert str(facts["gpu_uuid"]).startswith(("GPU-", "MIG-"))
    assert facts["gpu_name"]
    free, total = gpu.memory()
    assert 0 < free <= total
    with pytest.raises(DeviceError, match="cudaSetDevice failed: cudaErrorInvalidDevice"):
        gpu.runtime("cudaSetDevice", 4096)


def test_a_ring_gives_its_pinned_memory_back(gpu: CudaDevice) -> None:
    """Rings can be made and closed over and over."""
    for _ in range(20):
        ring = PinnedRing(gpu.runtime, gpu.ordinal)
        assert ring.size_bytes > 0
        ring.close()
        ring.close()
