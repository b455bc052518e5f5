"""What a resident is, as it travels: whole, sealed, and refused in words when it is anything else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from remote_agent.errors import ResidentLostError
from remote_agent.loader.header_text import TensorEntry
from remote_agent.protocol.codec import encode
from remote_agent.protocol.internal import Manifest, ShardIdentity
from remote_agent.resident.manifest import read_entries, read_manifest, write_manifest
from remote_agent.resident.names import resident_name
from tests.remote_agent.keeper.keepers import content_of, memory

SHARD = ShardIdentity("/models/tiny/model.safetensors", 1, 2, 4096, 3, 4)
MANIFEST = Manifest(
    "tiny-00@cpu",
    "run-00000001",
    "tiny",
    "/models/tiny",
    (SHARD,),
    "cpu",
    "boot",
    "ann@laptop",
    4096,
    24,
    5,
    60.0,
    "ab",
)
ENTRIES = (TensorEntry("a", "F32", (2, 2), 0, 16), TensorEntry("b.c", "BF16", (4,), 512, 520))


def test_a_manifest_comes_back_as_it_was() -> None:
    """With every tensor's place; nobody can change it on the way."""
    descriptor = write_manifest(MANIFEST, ENTRIES)
    manifest, table = read_manifest(descriptor)

    assert manifest == MANIFEST
    assert read_entries(manifest, table) == list(ENTRIES)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, 1)
    os.close(descriptor)


def test_a_mixture_of_experts_has_many_tensors() -> None:
    """Nineteen thousand are no more trouble than two."""
    entries = [TensorEntry(f"model.layers.{n}.weight", "U8", (1,), n, n + 1) for n in range(19_000)]
    descriptor = write_manifest(replace(MANIFEST, size_bytes=1 << 20), entries)
    manifest, table = read_manifest(descriptor)
    os.close(descriptor)

    assert read_entries(manifest, table) == entries


def head(**changes: Any) -> bytes:
    return json.dumps({**encode(MANIFEST), **changes}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "a manifest of 0 bytes is torn"),
        (head()[:50], "a manifest of 50 bytes is torn"),
        (b"\xff\xfe\n{}", "can't be understood"),
        (b"[" * 100_000 + b"\n{}", "can't be understood"),
        (head(size_bytes="many") + b"\n{}", "size_bytes: expected an integer"),
        (head(size_bytes=1) + b"\n{}", "size_bytes: 1 bytes can't hold tensors of 24"),
        (head(shards=None) + b"\n{}", "shards: expected a list"),
        (b"{}\n{}", "name: is required"),
    ],
)
def test_what_is_no_manifest_is_refused(content: bytes, words: str) -> None:
    """Torn, of another version, or made up: the line says what is wrong."""
    with memory(content) as (descriptor,), pytest.raises(ResidentLostError, match=words):
        read_manifest(descriptor)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (b'{"a": ', "a"),
        (json.dumps({"a": entry(data_offsets=[4090, 4098])}).encode(), "a ends at 4098, the memory at 4096"),
        (json.dumps({"a": entry(data_offsets=[2, 10])}).encode(), "a at 2 lies where no F32 can"),
        (json.dumps({"a": entry(dtype="F99")}).encode(), "dtype 'F99' is not one of"),
        (json.dumps({"a": entry(shape=[3])}).encode(), "needs 12 bytes, its offsets 0..8 give 8 bytes"),
        (json.dumps({"a": entry(data_offsets=[-8, 0])}).encode(), "are not a range"),
    ],
)
def test_a_tensor_that_cannot_lie_there_is_refused_by_name(table: bytes, words: str) -> None:
    """No view is made of it: whatever a manifest says, nothing outside the memory is read."""
    with pytest.raises(ResidentLostError, match=words):
        read_entries(MANIFEST, table)


def test_a_pipe_is_no_manifest() -> None:
    """A descriptor that can't be read at a place is refused, not waited for."""
    reading, writing = os.pipe()
    os.write(writing, b"x")
    with pytest.raises(ResidentLostError):
        read_manifest(reading)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    "change",
    [
        lambda: resident_name("/models/tiny", (SHARD,), "GPU-1"),
        lambda: resident_name("/models/tiny", (replace(SHARD, mtime_ns=9),), "cpu"),
        lambda: resident_name("/models/tiny", (replace(SHARD, inode=9),), "cpu"),
        lambda: resident_name("/models/tiny", (SHARD, SHARD), "cpu"),
    ],
)
def test_other_files_and_other_devices_have_other_names(change: Callable[[], str]) -> None:
    """A changed file is never taken for what was loaded."""
    assert change() != resident_name("/models/tiny", (SHARD,), "cpu")


@pytest.mark.parametrize("model", ["/models/a b\u00e9\n", "/", "/m/" + "x" * 500, "~/..", "/m/@@@"])
def test_any_path_gives_a_name_that_the_keeper_takes(model: str) -> None:
    """Names are plain, short, and end with the device."""
    from remote_agent.keeper.holdings import NAME

    name = resident_name(model, (SHARD,), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f")

    assert NAME.fullmatch(name), name


def test_nothing_but_the_content_is_in_the_memory() -> None:
    """One line, then a safetensors header's table."""
    descriptor = write_manifest(MANIFEST, ENTRIES)
    first, _, table = content_of(descriptor).partition(b"\n")
    os.close(descriptor)

    assert json.loads(first)["name"] == "tiny-00@cpu"
    assert json.loads(table)["a"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
