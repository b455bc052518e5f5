"""One thread sends: what readers filled and what is registered; readers wait for no driver."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from remote_agent.errors import DeviceError, LoadError
from remote_agent.loader import onto_gpu
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.limits import Cut, LoaderLimits
from remote_agent.loader.load import load
from remote_agent.loader.ring import PinnedRing
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.switching import quickly
from remote_agent.loader.verify import verify
from remote_agent.protocol.messages import WeightsPolicy
from tests.remote_agent.fake_cuda import Code, FakeGpu, FakeRuntime
from tests.remote_agent.loader.files_by_hand import failure_of
from tests.remote_agent.loader.gpu_loads import PATHS, load_by, traces_of

pytestmark = pytest.mark.usefixtures("small_ranges")

DEADLINE_S = 10.0


@pytest.mark.parametrize("path", PATHS)
def test_no_reader_makes_a_cuda_call(checkpoint: Checkpoint, gpu: FakeGpu, path: str) -> None:
    """Whatever the way, the thread that loads makes all of them; another one only gives registrations back."""
    gpu.fake_runtime.callers.clear()

    loaded = load_by(gpu, checkpoint, path)

    assert verify(checkpoint, loaded.tensors).is_equal
    assert gpu.fake_runtime.callers - {"load-unregister"} == {threading.current_thread().name}


@pytest.mark.parametrize("path", ["auto", "staged", "direct"])
def test_readers_fill_buffers_before_there_is_memory(checkpoint: Checkpoint, gpu: FakeGpu, path: str) -> None:
    """What was read meanwhile is sent at once; where a GPU has none to give, nothing stays."""
    alive: list[set[str]] = []

    def refuse(size_bytes: int) -> torch.Tensor:
        alive.append({thread.name for thread in threading.enumerate() if thread.name.startswith("load-reader")})
        raise torch.OutOfMemoryError("none is left")

    with pytest.raises(LoadError) as caught:
        load(checkpoint, gpu, WeightsPolicy(path=path), progress=lambda *_: None, memory=refuse)  # type: ignore[arg-type]

    assert caught.value.code == "out_of_memory"
    assert alive[0]
    assert traces_of(checkpoint) == []


def test_beside_a_caller_another_single_thread_makes_them(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """A caller that has something else to do meanwhile copies nothing."""
    copiers: list[str] = []
    copy = gpu.ring.copy

    def copy_and_tell(*arguments: int) -> None:
        copiers.append(threading.current_thread().name)
        copy(*arguments)

    gpu.ring.copy = copy_and_tell  # type: ignore[method-assign]
    load(checkpoint, gpu, WeightsPolicy(), progress=lambda *_: None, meanwhile=lambda: None)

    assert set(copiers) == {"load-transfer"}


@pytest.mark.parametrize("path", ["auto", "staged"])
def test_an_event_that_can_t_be_asked_for_fails_the_load(checkpoint: Checkpoint, gpu: FakeGpu, path: str) -> None:
    """An error that a query tells of is an earlier copy's: the load ends with it, and nothing is left."""
    gpu.fake_runtime.fail_at = "cudaEventQuery"

    with pytest.raises(DeviceError, match=r"cudaEventQuery failed: illegal_access \(700\)") as caught:
        load_by(gpu, checkpoint, path)

    caught.value.__traceback__ = None
    del caught
    gpu.fake_runtime.fail_at = None
    assert gpu.fake_runtime.registered == {}
    assert traces_of(checkpoint) == []


def test_a_copy_that_is_not_over_yet_is_no_error_and_leaves_none(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """The driver keeps "not ready" as the thread's last error, which torch would take for a kernel's."""
    told: list[Code] = []
    query = gpu.fake_runtime.do_cudaEventQuery

    def query_and_tell(event: int) -> tuple[Code]:
        told.extend(query(event))
        return (told[-1],)

    gpu.fake_runtime.cudaEventQuery = query_and_tell  # type: ignore[attr-defined]

    loaded = load_by(gpu, checkpoint, "staged")

    assert {Code.not_ready, Code.success} == set(told)
    assert verify(checkpoint, loaded.tensors).is_equal
    assert gpu.fake_runtime.do_cudaGetLastError() == (Code.success,)


class SharedPool(FakeGpu):
    """A GPU whose pool is cut as asked."""

    def __init__(self, cut: Cut, streams: int) -> None:
        super().__init__(FakeRuntime())
        self._limits = LoaderLimits(cut, cut, cut, self.registration_bytes, streams=streams)

    def make_ring(self) -> PinnedRing:
        return PinnedRing(self.runtime, self.ordinal, self._limits)


def test_a_reader_that_can_t_be_started_fails_the_load(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run already have read nothing, since none begins before all are there, and end; nothing is left."""
    start, read, reads = threading.Thread.start, OpenShards.read, list[int]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "load-reader-2":
            reading.wait(0.05)  # of those before it, which is not to come
            raise RuntimeError("can't start new thread")
        start(thread)

    def note(shards: OpenShards, shard: int, offset: int, view: memoryview) -> None:
        reads.append(shard)
        reading.set()
        read(shards, shard, offset, view)

    reading = threading.Event()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(OpenShards, "read", note)

    error = failure_of(lambda: load_by(gpu, checkpoint, "staged"))

    assert str(error) == "thread 3 of 3 could not be started: can't start new thread"
    assert (reads, traces_of(checkpoint)) == ([], [])


def test_a_load_that_could_not_begin_keeps_the_ring_from_nobody(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a caller that goes on, it has ended its threads at once, in the thread that was bound for them."""
    start, refused = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "load-reader-1" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def load_another() -> None:
        refused.wait(DEADLINE_S)
        assert verify(checkpoint, load_by(gpu, checkpoint, "staged").tensors).is_equal
        others.append("staged")

    others: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    other = threading.Thread(target=load_another, daemon=True)

    def meanwhile() -> None:
        other.start()
        other.join(DEADLINE_S)

    with pytest.raises(LoadError, match="could not be started"):
        load(checkpoint, gpu, WeightsPolicy("staged"), progress=lambda *_: None, meanwhile=meanwhile)

    assert others == ["staged"]


@pytest.mark.parametrize(("readers", "buffers", "streams"), [(3, 1, 1), (5, 2, 3), (2, 40, 2)])
def test_any_number_of_buffers_serves_any_number_of_readers(
    checkpoint: Checkpoint, readers: int, buffers: int, streams: int
) -> None:
    """One buffer for many readers is slow and right; what several streams are given arrives all the same."""
    gpu = SharedPool(Cut(readers, buffers, 4096), streams)
    gpu.open_context()

    for path in PATHS:
        assert verify(checkpoint, load_by(gpu, checkpoint, path).tensors).is_equal
    gpu.close()

    assert gpu.fake_runtime.errors == []
    assert gpu.fake_runtime.leaks() == []


def test_views_are_made_while_the_last_copies_are_under_way(
    checkpoint: Checkpoint, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's part of a load costs nothing where the link is still busy."""
    under_way: list[int] = []
    real = onto_gpu.tensors_in

    def look(*arguments: object) -> object:
        streams = gpu.fake_runtime.streams.values()
        under_way.append(sum(len(stream.queue) - stream.done for stream in streams))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(onto_gpu, "tensors_in", look)
    load_by(gpu, checkpoint, "mapped")

    assert len(under_way) == 1
    assert under_way[0] > 0


def test_threads_switch_more_quickly_during_a_load_and_not_after_it(checkpoint: Checkpoint, gpu: FakeGpu) -> None:
    """The interpreter's interval is the process's own, and as it was once the load is over."""
    before = sys.getswitchinterval()
    seen: list[float] = []

    load_by(gpu, checkpoint, progress=lambda done, total: seen.append(sys.getswitchinterval()))

    assert seen[0] == pytest.approx(gpu.ring.limits.switch_interval_s)
    assert sys.getswitchinterval() == before


def test_the_last_of_several_loads_puts_the_interval_back() -> None:
    """Loads at once overlap in any order; None leaves it alone."""
    before = sys.getswitchinterval()
    first, second = quickly(0.001), quickly(0.001)

    with quickly(None):
        assert sys.getswitchinterval() == before
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert sys.getswitchinterval() == pytest.approx(0.001)
        second.__exit__(None, None, None)

    assert sys.getswitchinterval() == before
