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
    manifest, _, table = read_manifest(descriptor)

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
    manifest, _, table = read_manifest(descriptor)
    os.close(descriptor)

    assert read_entries(manifest, table) == entries


def head(**changes: Any) -> bytes:
    return json.dumps({"format": 2, **encode(MANIFEST), **changes}).encode()


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
        (head(format=None) + b"\n{}", "tiny-00@cpu: its manifest is of format None, not of 2: load it again"),
        (head(format=3) + b"\n{}", "tiny-00@cpu: its manifest is of format 3"),
        (json.dumps(encode(MANIFEST)).encode() + b"\n{}", "tiny-00@cpu: its manifest is of format 1, not of 2"),
        (b"[]\n{}", "expected|can't be understood"),
    ],
)
def test_what_is_no_manifest_is_refused(content: bytes, words: str) -> None:
    """Torn, of another version, or made up: the line says what is wrong."""
    with memory(content) as (descriptor,), pytest.raises(ResidentLostError, match=words):
        read_manifest(descriptor)


def test_a_manifest_that_was_read_before_is_not_decoded_again() -> None:
    """The very same line gives the very same manifest; another line is read, whatever was read before."""
    descriptor, other = write_manifest(MANIFEST, ENTRIES), write_manifest(replace(MANIFEST, ttl_s=None), ())
    before = read_manifest(descriptor)

    assert read_manifest(descriptor, before).manifest is before.manifest
    assert read_manifest(other, before).manifest == replace(MANIFEST, ttl_s=None)
    assert read_manifest(other, before).table != before.table
    os.close(descriptor)
    os.close(other)


def table(**changes: Any) -> bytes:
    """Return the table of two tensors."""
    columns = {"kinds": [["F32", [2]], ["U8", [3]]], "names": ["a", "b"], "kind_of": [0, 1], "starts": [0, 8]}
    return json.dumps({**columns, **changes}).encode()


def test_tensors_of_one_kind_share_it() -> None:
    """An end follows from dtype and shape, also where there is nothing to hold or a shape is none."""
    kinds = [["F32", [2]], ["F64", []], ["I64", [0, 4]], ["F4", [2, 4]]]
    content = table(kinds=kinds, names=["a", "b", "c", "d", "e"], kind_of=[0, 0, 1, 2, 3], starts=[0, 8, 16, 4096, 5])

    assert [(entry.shape, entry.start, entry.end) for entry in read_entries(MANIFEST, content)] == [
        ((2,), 0, 8), ((2,), 8, 16), ((), 16, 24), ((0, 4), 4096, 4096), ((2, 4), 5, 9),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (b'{"a": ', "Expecting"),
        (b"\xff", "utf-8"),
        (b"[]", "names is no list of texts"),
        (b"[" * 100_000, "its manifest can't be used"),
        (table(names=["a", 1]), "names is no list of texts"),
        (table(names=["a", "\ud800"]), "surrogates not allowed"),
        (table(names=["a", "a"]), "2 tensors have 1 names"),
        (table(names=["a"]), "1 names, 2 kinds and 2 starts"),
        (table(starts=[0, 8.0]), "starts is no list of integers"),
        (table(starts=[0, True]), "starts is no list of integers"),
        (table(starts=None), "starts is no list of integers"),
        (table(kind_of=[0, 2]), "kinds 0 to 2 are named, there are 2"),
        (table(kind_of=[-1, 0]), "kinds -1 to 0 are named"),
        (table(kinds={"F32": [2]}), "kinds is no list of pairs"),
        (table(kinds=[["F32", [2]], "U8"]), "kinds is no list of pairs"),
        (table(kinds=[["F32", [2]], [8, [3]]]), "a kind is not a dtype and a list of integers"),
        (table(kinds=[["F32", [-2]], ["U8", [3]]]), "has one that is not within"),
        (table(kinds=[["F32", [1] * 2000], ["U8", [3]]]), "a kind of 2000 dimensions"),
        (table(kinds=[["F32", [1 << 62, 1 << 62]], ["U8", [3]]]), "tensor a: shape .* more elements than can be"),
        (table(kinds=[["F99", [2]], ["U8", [3]]]), "tensor a: dtype 'F99' is not one of"),
        (table(kinds=[["F32", [2]], ["F6_E2M3", [3]]]), "tensor b: .* end inside a byte"),
        (table(starts=[4090, 8]), "a ends at 4098, the memory at 4096"),
        (table(starts=[0, 10**30]), "b ends at 10+.*, the memory at 4096"),
        (table(starts=[2, 8]), "a at 2 lies where no F32 can"),
        (table(starts=[0, -8]), "b at -8 lies where no U8 can"),
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
    """One line, then the tensors by columns: each dtype and shape stands there once."""
    descriptor = write_manifest(MANIFEST, ENTRIES)
    first, _, table = content_of(descriptor).partition(b"\n")
    os.close(descriptor)

    assert (json.loads(first)["name"], json.loads(first)["format"]) == ("tiny-00@cpu", 2)
    kinds = [["F32", [2, 2]], ["BF16", [4]]]
    assert json.loads(table) == {"kinds": kinds, "names": ["a", "b.c"], "kind_of": [0, 1], "starts": [0, 512]}
