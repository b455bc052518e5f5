"""Checkpoints: which files are one, what is left out and why, and how they are held against each other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from remote_agent.errors import CheckpointError
from remote_agent.loader import checkpoint
from remote_agent.loader.checkpoint import examine, inspect
from remote_agent.loader.files import identity_of
from remote_agent.loader.headers import Header
from remote_agent.protocol.codec import decode, encode
from remote_agent.protocol.internal import ShardIdentity
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write, write_index

A, B, C = (tensor(name, "F32", [4], seed) for seed, name in enumerate("abc", 1))


def codes(path: Path) -> list[str]:
    return [problem.code for problem in examine(path).problems]


def test_only_the_set_of_an_index_is_loaded(tmp_path: Path) -> None:
    """Files beside the index's set are listed with a reason and neither counted nor loaded."""
    root = write_index(tmp_path, {"one.safetensors": [A], "two.safetensors": [B]})
    write(root / "consolidated.safetensors", serialise([A, B]))
    (root / "folder.safetensors").mkdir()

    found = inspect(root)

    assert [header.path.name for header in found.shards] == ["one.safetensors", "two.safetensors"]
    assert (found.bytes, found.tensors) == (32, 2)
    assert {item.file: item.reason for item in found.ignored} == {
        "consolidated.safetensors": "not in model.safetensors.index.json",
        "folder.safetensors": "is a directory, not a file",
    }


def test_a_header_that_is_known_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its file has changed since: then it is read as any other."""
    root = write_index(tmp_path, {"one.safetensors": [A], "two.safetensors": [B]})
    known = inspect(root).shards
    read: list[str] = []
    original = checkpoint.read_header

    def read_header(path: Path, name: str) -> Header:
        read.append(name)
        return original(path, name)

    monkeypatch.setattr(checkpoint, "read_header", read_header)

    assert inspect(root, known=known).shards == known
    assert read == []
    write(root / "two.safetensors", serialise([tensor("b", "F32", [8], 2)]))
    assert inspect(root, known=known).bytes == 16 + 32
    assert read == ["two.safetensors"]


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    """A missing shard is named with the tensors that the index puts in it; a directory is no shard."""
    root = write_index(tmp_path, {"one.safetensors": [A], "two.safetensors": [B, C]})
    (root / "two.safetensors").unlink()

    problem = examine(root).problems[0]

    assert (problem.code, problem.file) == ("missing_shard", "two.safetensors")
    assert "2 tensors in it: b, c" in problem.detail
    (root / "two.safetensors").mkdir()
    assert codes(root) == ["missing_shard"]


def test_a_tensor_must_be_in_the_shard_that_the_index_says(tmp_path: Path) -> None:
    """A tensor in no shard is missing; one in another shard than the index says is named with both."""
    root = write_index(tmp_path, {"one.safetensors": [A], "two.safetensors": [B]})
    weight_map = {"a": "two.safetensors", "b": "two.safetensors", "z": "one.safetensors"}
    write(root / "model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())

    problems = {problem.code: problem for problem in examine(root).problems}

    assert problems["missing_tensor"].tensor == "z"
    assert problems["missing_tensor"].file == "one.safetensors"
    assert "one.safetensors does: a" in problems["wrong_shard"].detail


def test_of_two_copies_the_one_the_index_names_is_loaded(tmp_path: Path) -> None:
    """A second copy of a tensor in another shard of the index is left out and said to be."""
    write(tmp_path / "one.safetensors", serialise([A, B]))
    write(tmp_path / "two.safetensors", serialise([tensor("a", "F32", [4], 9), C]))
    weight_map = {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    write(tmp_path / "model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())

    found = inspect(tmp_path)

    assert [(header.path.name, entry.name) for header, entry in found.entries()] == [
        ("one.safetensors", "b"),
        ("two.safetensors", "a"),
        ("two.safetensors", "c"),
    ]
    assert (found.bytes, found.tensors) == (48, 3)
    assert "its copy of a" in found.ignored[0].reason


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "", "..", "x\0.safetensors"]
)
def test_an_index_never_leads_out_of_its_folder(tmp_path: Path, shard: str) -> None:
    """A shard name that would leave the folder is refused before it is looked at."""
    write(tmp_path.parent / "x.safetensors", serialise([A]))
    write(tmp_path / "model.safetensors.index.json", json.dumps({"weight_map": {"a": shard}}).encode())

    assert codes(tmp_path) == ["index_path"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "bad_index"),
        (b"[]", "bad_index"),
        (b'{"weight_map": []}', "bad_index"),
        (b'{"weight_map": {}}', "bad_index"),
        (b'{"weight_map": {"a": 1}}', "bad_index"),
        (b'{"weight_map": {"a"', "bad_index"),
        (b"[" * 100_000, "bad_index"),
        (b"\xff\xfe", "bad_index"),
        (b"<html><title>401</title>", "html"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 12\n", "lfs_pointer"),
    ],
    ids=range(10),
)
def test_a_bad_index_is_refused_by_name(tmp_path: Path, content: bytes, code: str) -> None:
    """An index that can't be used is refused as such, and the shards beside it are not guessed at."""
    write(tmp_path / "model.safetensors", serialise([A]))
    write(tmp_path / "model.safetensors.index.json", content)

    problem = examine(tmp_path).problems[0]

    assert (problem.code, problem.file) == (code, "model.safetensors.index.json")


def test_the_usual_single_file_comes_before_others(tmp_path: Path) -> None:
    """Without an index ``model.safetensors`` is the checkpoint and everything else is left out."""
    write(tmp_path / "model.safetensors", serialise([A]))
    write(tmp_path / "adapter_model.safetensors", serialise([B]))

    found = inspect(tmp_path)

    assert [header.path.name for header in found.shards] == ["model.safetensors"]
    assert [item.file for item in found.ignored] == ["adapter_model.safetensors"]


def test_a_numbered_set_without_an_index_must_be_complete(tmp_path: Path) -> None:
    """All of NNNNN-of-NNNNN load in order; a missing one is named in the set's own spelling."""
    for number, content in ((1, A), (2, B), (3, C)):
        write(tmp_path / f"model-{number:05d}-of-00003.safetensors", serialise([content]))
    write(tmp_path / "consolidated.safetensors", serialise([A]))

    assert [header.path.name[6:11] for header in inspect(tmp_path).shards] == ["00001", "00002", "00003"]
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    problem = examine(tmp_path).problems[0]
    assert (problem.code, problem.file) == ("missing_shard", "model-00002-of-00003.safetensors")
    assert "2 of 3 shards" in problem.detail


def test_a_set_whose_count_is_absurd_costs_nothing(tmp_path: Path) -> None:
    """A name that counts a billion shards is refused at once, in a few problems."""
    write(tmp_path / "model-000000001-of-999999999.safetensors", serialise([A]))
    write(tmp_path / "more" / "model-00007-of-00003.safetensors", serialise([A]))
    write(tmp_path / "many" / "model-00001-of-09000.safetensors", serialise([A]))

    assert codes(tmp_path) == ["missing_shard"]
    assert codes(tmp_path / "more") == ["missing_shard"]
    assert len(examine(tmp_path / "many").problems) == 21


def test_two_sets_without_an_index_are_ambiguous(tmp_path: Path) -> None:
    """Which of two sets is meant is never guessed."""
    for stem in ("base", "ema"):
        write(tmp_path / f"{stem}-00001-of-00001.safetensors", serialise([A]))

    problem = examine(tmp_path).problems[0]

    assert problem.code == "ambiguous"
    assert "base-*-of-1" in problem.detail
    assert "ema-*-of-1" in problem.detail


def test_two_indexes_are_ambiguous_unless_one_is_the_default(tmp_path: Path) -> None:
    """The default index wins over others; two others are refused with their names."""
    root = write_index(tmp_path, {"one.safetensors": [A]}, "fp16.safetensors.index.json")
    write_index(tmp_path, {"two.safetensors": [A]}, "fp32.safetensors.index.json")

    assert codes(root) == ["ambiguous"]
    write_index(tmp_path, {"three.safetensors": [A]})
    assert [header.path.name for header in inspect(root).shards] == ["three.safetensors"]
    assert [h.path.name for h in inspect(root / "fp16.safetensors.index.json").shards] == ["one.safetensors"]


def test_loose_files_load_together_unless_they_share_a_tensor(tmp_path: Path) -> None:
    """Files without index or numbers are one checkpoint if no tensor is twice in them, and refused otherwise."""
    write(tmp_path / "first.safetensors", serialise([A]))
    write(tmp_path / "second.safetensors", serialise([B]))

    assert inspect(tmp_path).tensors == 2
    write(tmp_path / "third.safetensors", serialise([A]))
    problem = examine(tmp_path).problems[0]
    assert (problem.code, problem.tensor) == ("duplicate_tensor", "a")
    assert "third.safetensors holds too" in problem.detail


def test_a_folder_without_safetensors_says_what_it_has(tmp_path: Path) -> None:
    """Pickles that must be converted, and caches that should be pointed at, are named."""
    assert codes(tmp_path) == ["no_safetensors"]
    (tmp_path / "models--org--name").mkdir()
    assert "models--org--name" in examine(tmp_path).problems[0].detail
    write(tmp_path / "pytorch_model.bin", b"\x80\x02")
    assert "pytorch_model.bin, which must be converted" in examine(tmp_path).problems[0].detail


def test_every_bad_shard_is_reported_at_once(tmp_path: Path) -> None:
    """Two bad shards are two problems, whatever is wrong with each."""
    root = write_index(tmp_path, {"one.safetensors": [A], "two.safetensors": [B], "three.safetensors": [C]})
    write(root / "one.safetensors", b"")
    write(root / "three.safetensors", b"PK\x03\x04" + b"\x14" * 40)

    with pytest.raises(CheckpointError) as caught:
        inspect(root)

    assert {(one.file, one.code) for one in caught.value.problems} == {
        ("one.safetensors", "empty_file"),
        ("three.safetensors", "torch_zip"),
    }
    assert examine(root).as_dict()["verdict"] == "refused"


def test_a_cache_directory_leads_to_its_snapshot(tmp_path: Path) -> None:
    """A Hugging Face cache directory is followed by ref, by commit, or to its only snapshot."""
    cache = tmp_path / "models--org--my name"
    for commit, content in (("a" * 40, A), ("b" * 40, B)):
        write(cache / "snapshots" / commit / "model.safetensors", serialise([content]))
    write(cache / "refs" / "main", ("a" * 40).encode())
    write(cache / "refs" / "pr" / "7", ("b" * 40 + "\n").encode())

    def names(revision: str | None) -> list[str]:
        return [entry.name for _, entry in inspect(cache, revision).entries()]

    assert names(None) == ["a"]
    assert names("pr/7") == ["b"]
    assert names("b" * 40) == ["b"]
    (cache / "refs" / "main").unlink()
    with pytest.raises(CheckpointError, match="revision_not_found"):
        inspect(cache)
    for revision in ("v2", "../main", "/etc/passwd", "\0", ""):
        assert [problem.code for problem in examine(cache, revision).problems] == ["revision_not_found"]


def test_a_revision_needs_a_cache_directory(tmp_path: Path) -> None:
    """A revision of a plain folder is refused, since nothing says which one the folder holds."""
    write(tmp_path / "model.safetensors", serialise([A]))

    assert [problem.code for problem in examine(tmp_path, "main").problems] == ["revision_not_found"]


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    """No path makes an examination raise."""
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")

    assert codes(tmp_path / "nothing") == ["not_found"]
    assert codes(tmp_path / "nothing" / "model.safetensors.index.json") == ["not_found"]
    assert codes(tmp_path / "loop") == ["link_loop"]
    assert codes(tmp_path / "fifo") == ["not_regular"]
    assert codes(Path("a\0b")) == ["not_found"]


def test_names_that_are_not_unicode_are_shown_escaped(tmp_path: Path) -> None:
    """A file name of arbitrary bytes is refused or loaded like any other, and printable in every line."""
    write(tmp_path / os.fsdecode(b"\xff\x1b[31m.safetensors"), b"junk that is no header")

    examination = examine(tmp_path)

    assert [problem.code for problem in examination.problems] == ["not_safetensors"]
    assert str(examination.problems[0]).isprintable()
    assert json.dumps(examination.as_dict()).isascii()


@pytest.mark.parametrize("number", [7, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_file_s_identity_fits_a_message_whatever_its_inode(number: int) -> None:
    """Overlays and Lustre number files with all 64 bits; two files stay two."""
    times = {"st_mtime_ns": 3, "st_ctime_ns": 4}
    status = os.stat_result((0o100644, number, number, 1, 0, 0, 12, 0, 0, 0), times)
    other = os.stat_result((0o100644, number - 1, number, 1, 0, 0, 12, 0, 0, 0), times)
    identity = identity_of("/m/model.safetensors", status)

    assert decode(ShardIdentity, encode(identity)) == identity
    assert identity != identity_of("/m/model.safetensors", other)


@pytest.mark.parametrize("quick_ns", [0, 10**12])
def test_headers_are_the_same_whoever_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_ns: int
) -> None:
    """A first header that came slowly has others read at once, a quick one by the same thread: in order either way."""
    for number in range(3):
        write(tmp_path / f"{number}.safetensors", serialise([tensor(f"w{number}", "F32", [number + 1])]))
    monkeypatch.setattr("remote_agent.loader.spread.QUICK_NS", quick_ns)

    found = inspect(tmp_path)

    assert [header.tensors[0].name for header in found.shards] == ["w0", "w1", "w2"]
