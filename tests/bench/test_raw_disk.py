"""The raw read that stands beside a load reads every byte once, as the load asks for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import raw_disk


@pytest.mark.parametrize("is_direct", [True, False])
def test_every_byte_is_read_once(is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several files; past the cache each read begins on a block, and as many as there are threads are short."""
    sizes = [70_000, 0, 33_333, 4096]
    shards = [tmp_path / str(number) for number in range(len(sizes))]
    for shard, size in zip(shards, sizes, strict=True):
        shard.write_bytes(os.urandom(size))
    reads: dict[str, list[tuple[int, int, int]]] = {}
    preadv = os.preadv

    def note(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        got = preadv(descriptor, buffers, offset)
        reads.setdefault(str(Path(f"/proc/self/fd/{descriptor}").readlink()), []).append((offset, got, len(buffers[0])))
        return got

    monkeypatch.setattr(os, "preadv", note)
    monkeypatch.setattr(raw_disk, "THREADS", 3)
    monkeypatch.setattr(raw_disk, "READ_BYTES", 16384)
    monkeypatch.setattr(raw_disk, "FIRST_READ_BYTES", 4096)

    assert raw_disk.time_raw_read(shards, is_direct) > 0

    for shard, size in zip(shards, sizes, strict=True):
        place = 0
        for offset, got, _ in sorted(reads.get(str(shard), [])):
            assert offset == place
            assert not is_direct or offset % 4096 == 0
            place += got
        assert place == size
    asked = [asked for shard in shards for _, _, asked in sorted(reads.get(str(shard), []))]
    shorts = 3 if is_direct else 0
    assert asked[:shorts] == [4096] * shorts
    assert set(asked[shorts:]) == {16384}
