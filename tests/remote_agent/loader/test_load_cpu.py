"""Loading onto the CPU: byte-exact by map and by read, and never from a file that changes."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_agent.devices import open_device
from remote_agent.errors import LoadError
from remote_agent.loader import mapped
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.load import Loaded, load
from remote_agent.loader.residency import measure_residency
from remote_agent.loader.verify import verify
from remote_agent.loader.views import bytes_of
from remote_agent.protocol.messages import WeightsPolicy
from tests.remote_agent.loader.caches_by_hand import drop_from_cache, refuse_direct, tell_cached
from tests.remote_agent.loader.files_by_hand import failure_of, serialise, tensor, write


def load_on_cpu(
    checkpoint: Checkpoint, progress: Callable[[int, int], None] = lambda done, total: None, **policy: str
) -> Loaded:
    return load(checkpoint, open_device("cpu"), WeightsPolicy(**policy), progress=progress)  # type: ignore[arg-type]


def skip(done: int, total: int) -> None:
    """Nobody asks how far a load is."""


@pytest.fixture
def refuse_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that can't map, as the system call answers there."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(mapped.mmap, "mmap", refuse)


def every_dtype(offset: int) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Each dtype once behind ``offset`` bytes, with scalars and tensors of no bytes between them."""
    found = [tensor("head", "U8", [offset])]
    for seed, dtype in enumerate(DTYPES, 2):
        found.append(tensor(f"{dtype}.matrix", dtype, [3, 4], seed))
        found.append(tensor(f"{dtype}.empty", dtype, [2, 0, 5], seed))
        if DTYPES[dtype].bits >= 8:
            found.append(tensor(f"{dtype}.scalar", dtype, [], seed))
    return found


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("pad", [0, 8])
def test_every_dtype_at_every_offset_is_byte_exact(tmp_path: Path, offset: int, pad: int) -> None:
    """Whatever the dtype and wherever it lies, the tensor's bytes are the file's, and the library agrees."""
    tensors = every_dtype(offset)
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors, {"p": "x" * offset}, pad)))

    loaded = load_on_cpu(checkpoint)

    assert loaded.path == "mapped"
    assert loaded.reason is None
    for name, dtype, shape, content in tensors:
        assert bytes(bytes_of(loaded.tensors[name]).tolist()) == content
        if DTYPES[dtype].packed == 1 and DTYPES[dtype].torch_name:
            assert tuple(loaded.tensors[name].shape) == tuple(shape)
            assert loaded.tensors[name].dtype == getattr(torch, str(DTYPES[dtype].torch_name))
    assert set(loaded.tensors) == {one[0] for one in tensors}
    result = verify(checkpoint, loaded.tensors)
    assert result.is_equal
    assert result.verified == len(tensors)
    assert any("F6_E2M3" in note for note in result.notes)
    assert any("F6_E2M3" in note for note in loaded.notes)


@pytest.mark.usefixtures("refuse_maps")
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_reading_gives_the_same_where_maps_are_refused(tmp_path: Path, offset: int) -> None:
    """The read path gives every byte, and its reason names the filesystem and the refusal."""
    tensors = every_dtype(offset)
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors)))

    loaded = load_on_cpu(checkpoint)

    assert loaded.path == "read"
    assert loaded.reason is not None
    assert "mmap refused on" in loaded.reason
    assert "errno 19" in loaded.reason
    assert "unknown" not in loaded.reason
    for name, _, _, content in tensors:
        assert bytes(bytes_of(loaded.tensors[name]).tolist()) == content


def test_each_file_is_announced_before_its_pages_are_touched(tmp_path: Path) -> None:
    """Whoever dies of a page has said before which file it lies in."""
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", serialise([tensor(name, "F32", [1 << 10])]))
    told: list[str] = []

    load(
        inspect(tmp_path),
        open_device("cpu"),
        WeightsPolicy(),
        progress=lambda done, total: told.append(f"{done} bytes"),
        announce=lambda path: told.append(path.name),
    )

    assert told[:3] == ["a.safetensors", "b.safetensors", "0 bytes"]
    assert told[-1] == "8192 bytes"


def test_tensors_of_a_map_can_be_written_without_touching_the_file(tmp_path: Path) -> None:
    """The map is copy on write: what a model does to its weights never reaches the checkpoint."""
    path = write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [1024])]))
    before = path.read_bytes()

    load_on_cpu(inspect(path)).tensors["a"].zero_()

    assert path.read_bytes() == before


def given_memory(spare_bytes: int = 0, shift_bytes: int = 0) -> Callable[[int], torch.Tensor]:
    """Return what gives memory as a caller with its own does: aligned, perhaps larger, 0xEE where nothing was read."""

    def give(size_bytes: int) -> torch.Tensor:
        room = torch.full((size_bytes + spare_bytes + shift_bytes + 512,), 0xEE, dtype=torch.uint8)
        start = -room.data_ptr() % 512 + shift_bytes
        return room[start : start + size_bytes + spare_bytes]

    return give


def test_tensors_lie_in_the_memory_that_was_given(tmp_path: Path) -> None:
    """Each tensor is a view of it at the plan's place, byte for byte; what is left over is not touched."""
    tensors = every_dtype(3)
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors)))

    loaded = load(
        checkpoint, open_device("cpu"), WeightsPolicy(), progress=lambda *_: None, memory=given_memory(spare_bytes=100)
    )

    assert loaded.path == "read"
    assert loaded.reason is None
    assert loaded.base is not None
    assert loaded.plan is not None
    assert loaded.base[loaded.plan.size_bytes :].tolist() == [0xEE] * 100
    assert verify(checkpoint, loaded.tensors).is_equal
    for placement in loaded.plan.placements:
        assert loaded.tensors[placement.entry.name].data_ptr() == loaded.base.data_ptr() + placement.target


def test_memory_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Too little, misaligned or no bytes: the error has the numbers, and nothing is written."""
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [1024])])))
    unfit: list[tuple[Callable[[int], torch.Tensor], str]] = [
        (lambda size: torch.empty(size - 1, dtype=torch.uint8), r"is torch.uint8 \[4095\]; 4096 contiguous bytes"),
        (lambda size: torch.empty(size // 4, dtype=torch.int32), r"is torch.int32 \[1024\]; 4096 contiguous bytes"),
        (given_memory(shift_bytes=8), "no multiple of 512"),
    ]
    for memory, words in unfit:
        with pytest.raises(LoadError, match=words):
            load(checkpoint, open_device("cpu"), WeightsPolicy(), progress=lambda *_: None, memory=memory)


def test_figures_stand_beside_their_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, rate, ceiling and steps are there; progress ends at the whole and only grows."""
    tell_cached(monkeypatch, 0.99)
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [1 << 20])])))
    seen: list[tuple[int, int]] = []

    loaded = load_on_cpu(checkpoint, progress=lambda done, total: seen.append((done, total)))

    assert loaded.bytes == 4 << 20
    assert loaded.rate_bytes_s == pytest.approx(loaded.bytes / loaded.duration_ns * 1e9)
    assert loaded.ceiling_bytes_s is not None
    assert loaded.ceiling_bytes_s > 0
    assert set(loaded.steps) == {"map", "views"}
    assert seen[-1] == (4 << 20, 4 << 20)
    assert seen == sorted(seen)
    assert loaded.counters["brought_in_bytes"] == checkpoint.shards[0].size_bytes


def test_pages_that_are_in_memory_are_left_to_their_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is brought in, so there is no ceiling to it; one page that is missing brings in its block."""
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [1 << 20])])))
    tell_cached(monkeypatch, 1.0)

    loaded = load_on_cpu(checkpoint)

    assert (loaded.path, loaded.counters["brought_in_bytes"], loaded.ceiling_bytes_s) == ("mapped", 0, None)
    assert verify(checkpoint, loaded.tensors).is_equal


def test_a_checkpoint_without_bytes_loads_without_a_rate(tmp_path: Path) -> None:
    """Empty tensors alone, or none, divide nothing by zero."""
    for name, tensors in (("empty", [tensor("tag", "F16", [0])]), ("none", [])):
        loaded = load_on_cpu(inspect(write(tmp_path / f"{name}.safetensors", serialise(tensors))))

        assert (loaded.bytes, loaded.rate_bytes_s, loaded.ceiling_bytes_s) == (0, None, None)
        assert len(loaded.tensors) == len(tensors)


def test_what_a_cpu_cannot_do_is_named(tmp_path: Path) -> None:
    """A path for GPUs, and a page cache that tensors lie in and so can't be bypassed, stand in the reason."""
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [4])])))

    loaded = load_on_cpu(checkpoint, path="staged", page_cache="bypass")
    given = load(checkpoint, open_device("cpu"), WeightsPolicy(path="mapped"), progress=skip, memory=given_memory())

    assert loaded.path == "mapped"
    assert str(loaded.reason).startswith("staged is for GPUs: mapped instead; page_cache=bypass: what is mapped")
    assert (given.path, given.reason) == ("read", "read: mapped tensors can't lie in memory that was given")


@pytest.mark.parametrize("offset", [0, 1, 4093])
def test_a_cpu_reads_past_the_page_cache(tmp_path: Path, offset: int) -> None:
    """Asked for ``direct``, or to bypass a cache that does not hold the file, nothing of it is cached afterwards."""
    tensors = [*every_dtype(offset), tensor("large", "F32", [3 << 20], 9), tensor("end", "U8", [5])]
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors, pad=0)))
    drop_from_cache(checkpoint.shards[0].path)

    bypassed = load_on_cpu(checkpoint, page_cache="bypass")
    left = measure_residency(checkpoint.shards).cached_bytes
    forced = load_on_cpu(checkpoint, path="direct")

    for loaded in (bypassed, forced):
        assert (loaded.path, loaded.reason, loaded.ceiling_bytes_s) == ("direct", None, None)
        assert loaded.counters["direct_bytes"] == checkpoint.bytes
        for name, _, _, content in tensors:
            assert bytes(bytes_of(loaded.tensors[name]).numpy()) == content
    assert left is not None
    assert left < checkpoint.bytes // 8


def test_what_is_cached_is_not_read_from_the_disk_again(tmp_path: Path) -> None:
    """Bypassing drops nothing: a file in the page cache is read from there."""
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [1 << 16])])))

    loaded = load_on_cpu(checkpoint, page_cache="bypass")

    assert (loaded.path, loaded.reason) == ("read", None)
    assert measure_residency(checkpoint.shards).cached_bytes == checkpoint.bytes
    assert verify(checkpoint, loaded.tensors).is_equal


def test_a_filesystem_that_always_caches_is_read_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where O_DIRECT is refused the bytes come all the same, and the reason names filesystem and refusal."""
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [1 << 16])])))
    refuse_direct(monkeypatch, errno.EINVAL)

    loaded = load_on_cpu(checkpoint, path="direct")

    assert loaded.path == "read"
    where = filesystem_of(checkpoint.shards[0].path)
    assert loaded.reason == f"O_DIRECT refused on {where}: Invalid argument (errno 22); read through the page cache"
    assert verify(checkpoint, loaded.tensors).is_equal


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def rewrite(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[::-1])


def replace(path: Path) -> None:
    other = write(path.parent / "other", path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("change", [cut, rewrite, replace, Path.unlink])
@pytest.mark.parametrize("maps", [True, False])
def test_a_file_that_changes_during_the_load_fails_it_by_name(
    tmp_path: Path, request: pytest.FixtureRequest, change: Callable[[Path], None], maps: bool
) -> None:
    """A shard cut, rewritten, replaced or removed while it is loaded is named, and nothing is left open."""
    if not maps:
        request.getfixturevalue("refuse_maps")
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", serialise([tensor(name, "F32", [1 << 16])]))
    checkpoint = inspect(tmp_path)
    victim = tmp_path / "b.safetensors"

    def change_once(done: int, total: int) -> None:
        if done < total and victim.exists() and victim.stat().st_mtime_ns == checkpoint.shards[1].identity.mtime_ns:
            change(victim)

    before = open_files()
    error = failure_of(lambda: load_on_cpu(checkpoint, progress=change_once))

    assert error.code == "changed"
    assert str(victim) in str(error)
    assert open_files() <= before


def test_a_file_that_changed_before_the_load_fails_it(tmp_path: Path) -> None:
    """What preflight saw is compared before the first byte is read, by every field."""
    path = write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [4])]))
    old = inspect(path)
    write(path, serialise([tensor("a", "F32", [4], seed=2)]))
    new = inspect(path)

    with pytest.raises(LoadError, match="changed since it was checked"):
        load_on_cpu(old)
    with pytest.raises(LoadError, match="change time"):
        load(new, open_device("cpu"), WeightsPolicy(), progress=lambda *_: None, identities=old.identities)
    other = inspect(write(tmp_path / "y.safetensors", serialise([])))
    with pytest.raises(LoadError, match="not among the files that preflight checked"):
        load(new, open_device("cpu"), WeightsPolicy(), progress=lambda *_: None, identities=other.identities)
    loaded = load(new, open_device("cpu"), WeightsPolicy(), progress=lambda *_: None, identities=new.identities)
    assert loaded.bytes == 16


def test_a_page_that_cannot_be_brought_in_is_read_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without MADV_POPULATE_READ still maps; a filesystem that can't populate is read."""
    tell_cached(monkeypatch, 0)
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [1 << 16], 5)])))
    for number, path in ((errno.EINVAL, "mapped"), (errno.EFAULT, "read")):

        def refuse(address: int, length: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(mapped, "populate", refuse)
        loaded = load_on_cpu(checkpoint)

        assert loaded.path == path
        assert verify(checkpoint, loaded.tensors).is_equal


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENODEV])
def test_a_ceiling_that_cannot_be_measured_fails_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The tensors are there by then: one more map that is refused costs the figure alone."""
    tell_cached(monkeypatch, 0)
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [4])])))
    real, made = mmap.mmap, []

    def map_once(*arguments: Any, **options: Any) -> mmap.mmap:
        if made:
            raise OSError(number, os.strerror(number))
        made.append(real(*arguments, **options))
        return made[0]

    monkeypatch.setattr(mapped.mmap, "mmap", map_once)

    loaded = load_on_cpu(checkpoint)

    assert (loaded.path, loaded.ceiling_bytes_s) == ("mapped", None)
    assert verify(checkpoint, loaded.tensors).is_equal


def test_a_progress_that_raises_ends_the_load(tmp_path: Path) -> None:
    """A caller who gives up gets its own error back, and no thread of the load lives on."""
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise([tensor("a", "F32", [4])])))

    def give_up(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        load_on_cpu(checkpoint, progress=give_up)
    assert set(threading.enumerate()) <= before


def test_verification_finds_one_wrong_byte(tmp_path: Path) -> None:
    """A single differing byte, a missing tensor and a wrong dtype are each named."""
    tensors = [tensor(name, "F32", [64]) for name in ("good", "bad", "gone", "other")]
    checkpoint = inspect(write(tmp_path / "x.safetensors", serialise(tensors)))
    loaded = dict(load_on_cpu(checkpoint).tensors)
    loaded["bad"].view(torch.uint8)[77] ^= 1
    loaded["other"] = loaded["other"].view(torch.int32)
    del loaded["gone"]

    result = verify(checkpoint, loaded)

    assert result.verified == 1
    assert sorted(result.mismatches) == [
        "bad: 1 of 256 bytes differ, the first at 77",
        "gone: was not loaded",
        "other: is torch.int32 [64], expected torch.float32 [64]",
    ]
