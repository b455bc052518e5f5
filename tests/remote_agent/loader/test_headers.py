"""Headers: what the format allows is read as the library reads it; everything else is refused by name."""

from __future__ import annotations

import json
import os
import socket
import struct
import tracemalloc
from pathlib import Path

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_agent.errors import CheckpointError
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.headers import HEADER_LIMIT_BYTES, Header, read_header
from tests.remote_agent.loader.files_by_hand import payload, serialise, size_of, tensor, with_header, write

QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda name: name != "__metadata__")


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    names = draw(st.lists(NAMES, max_size=6, unique=True))
    found = []
    for seed, name in enumerate(names):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        if DTYPES[dtype].bits % 8:
            shape = (*shape, 4)
        found.append((name, dtype, shape, payload(size_of(dtype, shape), seed + 1)))
    return found


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    return caught.value


def read_or_refuse(path: Path) -> Header | CheckpointError:
    """Any other exception than a refusal fails the test."""
    try:
        return read_header(path)
    except CheckpointError as error:
        return error


def library_accepts(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


@QUICK
@given(
    tensors=tensor_lists(),
    pad=st.sampled_from([0, 8, 64]),
    indent=st.sampled_from([None, 1]),
    metadata=st.none() | st.dictionaries(NAMES, st.text(st.characters(exclude_categories=("Cs",)), max_size=20)),
)
def test_every_legal_file_reads_as_the_library_reads_it(
    tmp_path: Path, tensors: list, pad: int, indent: int | None, metadata: dict | None
) -> None:
    """Names, dtypes, shapes, bytes and metadata of a legal file are those the safetensors library finds."""
    content = serialise(tensors, metadata, pad)
    length = struct.unpack("<Q", content[:8])[0]
    text = json.dumps(json.loads(content[8 : 8 + length]), indent=indent, ensure_ascii=bool(indent)).encode()
    content = with_header(text, content[8 + length :], pad)

    header = read_header(write(tmp_path / "x.safetensors", content))

    ours = {
        entry.name: (entry.dtype, list(entry.shape), content[header.data_start + entry.start :][: entry.nbytes])
        for entry in header.tensors
    }
    theirs = {name: (one["dtype"], one["shape"], bytes(one["data"])) for name, one in safetensors.deserialize(content)}
    assert ours == theirs
    assert dict(header.metadata) == (metadata or {})
    assert header.data_bytes == sum(entry.nbytes for entry in header.tensors)


@QUICK
@given(tensors=tensor_lists(), data=st.data())
def test_a_damaged_file_is_refused_or_still_legal(tmp_path: Path, tensors: list, data: st.DataObject) -> None:
    """Whatever happens to its bytes, a file raises CheckpointError alone, or is one the library accepts too."""
    content = bytearray(serialise(tensors, {"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(content) - 1, 0)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "drop"])):
            case "flip" if content:
                content[place] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[place:]
            case "insert":
                content[place:place] = data.draw(st.binary(min_size=1, max_size=6))
            case "drop" if content:
                del content[place]

    outcome = read_or_refuse(write(tmp_path / "x.safetensors", bytes(content)))

    assert isinstance(outcome, CheckpointError) or library_accepts(bytes(content))
    for problem in getattr(outcome, "problems", ()):
        assert problem.code
        assert problem.detail.isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@QUICK
@given(field=st.sampled_from(["dtype", "shape", "data_offsets", "entry", "metadata", "header", "extra"]), value=JSON)
def test_any_json_in_any_place_is_refused_or_legal(tmp_path: Path, field: str, value: object) -> None:
    """A header whose parts are arbitrary JSON raises CheckpointError alone, or is one the library accepts too."""
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    header: object = {"a": entry}
    match field:
        case "entry":
            header = {"a": value}
        case "metadata":
            header = {"__metadata__": value, "a": entry}
        case "header":
            header = value
        case _:
            header = {"a": {**entry, field: value}}
    content = with_header(json.dumps(header).encode(), b"12")

    outcome = read_or_refuse(write(tmp_path / "x.safetensors", content))

    assert library_accepts(content) if isinstance(outcome, Header) else outcome.problems


ENTRY = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'

BAD_HEADERS = [
    ("not JSON", b'{"a":', b"", "bad_header"),
    ("goes on", b'{"a":%s}x' % ENTRY.encode(), b"12", "bad_header"),
    ("not UTF-8", b'{"\xff":%s}' % ENTRY.encode(), b"12", "bad_header"),
    ("half a surrogate", b'{"\\ud800":%s}' % ENTRY.encode(), b"12", "bad_header"),
    ("a name twice", b'{"a":%s,"\\u0061":%s}' % (ENTRY.encode(), ENTRY.encode()), b"12", "duplicate_name"),
    ("a key twice", b'{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"12", "bad_header"),
    ("no offsets", b'{"a":{"dtype":"U8","shape":[2]}}', b"12", "bad_header"),
    ("NaN", b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,2]}}', b"12", "bad_header"),
    ("a fraction", b'{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}', b"12", "bad_header"),
    ("a negative dimension", b'{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}}', b"12", "bad_shape"),
    ("a huge dimension", b'{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,2]}}', b"", "bad_shape"),
    ("an endless integer", b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,2]}}' % (b"9" * 5000), b"", None),
    ("too many", b'{"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}', b"", "bad_shape"),
    ("a boolean dimension", b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"1", "bad_shape"),
    ("reversed offsets", b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}', b"12", "bad_offsets"),
    ("negative offsets", b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[-2,0]}}', b"12", "bad_offsets"),
    ("three offsets", b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,2]}}', b"12", "bad_offsets"),
    ("an unknown dtype", b'{"a":{"dtype":"C128","shape":[2],"data_offsets":[0,32]}}', b"1" * 32, "unknown_dtype"),
    ("dtype against bytes", b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,2]}}', b"12", "size_mismatch"),
    ("half a byte", b'{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', b"12", "size_mismatch"),
    ("metadata a number", b'{"__metadata__":{"step":100},"a":%s}' % ENTRY.encode(), b"12", "bad_metadata"),
    ("metadata a list", b'{"__metadata__":[],"a":%s}' % ENTRY.encode(), b"12", "bad_metadata"),
    ("metadata twice", b'{"__metadata__":{},"__metadata__":{}}', b"", "duplicate_name"),
    ("a hole", b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', b"123", "hole"),
    ("longer", b'{"a":%s}' % ENTRY.encode(), b"123", "file_too_long"),
    ("shorter", b'{"a":%s}' % ENTRY.encode(), b"1", "truncated"),
    ("deep nesting", b'{"a":' + b"[" * 100_000, b"", "bad_header"),
    ("deep metadata", b'{"__metadata__":{"a":' + b"[" * 100_000, b"", "bad_metadata"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("header", "data", "code"), [case[1:] for case in BAD_HEADERS], ids=[c[0] for c in BAD_HEADERS]
)
def test_a_bad_header_is_refused_with_its_code(tmp_path: Path, header: bytes, data: bytes, code: str | None) -> None:
    """Each way a header can be wrong has a code, and the tensor is named where there is one."""
    error = refusal(write(tmp_path / "x.safetensors", with_header(header, data)))

    assert code is None or error.problems[0].code == code
    assert error.problems[0].file == "x.safetensors"
    assert not library_accepts(with_header(header, data)) or code in ("duplicate_name", "bad_shape")


def test_overlapping_tensors_are_both_named(tmp_path: Path) -> None:
    """An overlap names the tensor, the one it runs into, and where."""
    header = (
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}'
    )

    problem = refusal(write(tmp_path / "x.safetensors", with_header(header, b"123456"))).problems[0]

    assert (problem.code, problem.tensor) == ("overlap", "b")
    assert problem.detail == "tensor b at 2..6 overlaps a, which ends at 4"


def test_a_short_file_names_missing_bytes_and_lost_tensors(tmp_path: Path) -> None:
    """A truncated file says how many bytes are missing and which tensors end behind its end."""
    whole = serialise([tensor(f"t{number}", "F32", [10]) for number in range(4)])

    problem = refusal(write(tmp_path / "x.safetensors", whole[:-50])).problems[0]

    assert problem.code == "truncated"
    assert "50 bytes are missing" in problem.detail
    assert "2 tensors lost: t2, t3" in problem.detail
    assert f"declares {len(whole)}, the file has {len(whole) - 50}" in problem.detail


def test_a_header_longer_than_its_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    """The header's length and the file's stand in the refusal."""
    path = write(tmp_path / "x.safetensors", struct.pack("<Q", 5000) + b'{"a"' + b" " * 100)

    problem = refusal(path).problems[0]

    assert problem.code == "header_beyond_file"
    assert "5000 bytes, the file has 112: 4896 bytes are missing" in problem.detail


def test_an_oversized_header_is_counted_in_bounded_memory(tmp_path: Path) -> None:
    """A header over the cap is refused with size, tensors and cap, without being held in memory."""
    entry = b'"%07d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
    path = tmp_path / "x.safetensors"
    block = b"".join(entry % number for number in range(1000))
    times = HEADER_LIMIT_BYTES // len(block) + 1
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 + len(block) * times) + b"{")
        for _ in range(times):
            file.write(block)

    tracemalloc.start()
    problem = refusal(path).problems[0]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert problem.code == "header_too_large"
    assert f"header of {1 + len(block) * times} bytes ({times * 1000} tensors)" in problem.detail
    assert str(HEADER_LIMIT_BYTES) in problem.detail
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize("filling", [b"[", b"[],", b'{"":', b"1,", b'"",'])
def test_hostile_json_costs_no_more_than_its_own_size(tmp_path: Path, filling: bytes) -> None:
    """A header of nested or endless JSON is refused in memory of the order of the header itself."""
    size = 4 << 20
    header = b'{"a":{"shape":[' + filling * (size // len(filling))
    path = write(tmp_path / "x.safetensors", with_header(header))

    tracemalloc.start()
    refusal(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak_bytes < 4 * size


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"", "empty_file", "0 bytes"),
        (b"1234567", "too_short", "7 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n", "lfs_pointer", "4976698672"),
        (b"<!DOCTYPE html><html><title>404 Not Found</title>", "html", "404 Not Found"),
        (b"\n<HTML><body>no</body>", "html", "HTML page"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "pickle", "never unpickled"),
        (b"PK\x03\x04" + b"\x14\0" * 20, "torch_zip", "zip"),
        (b"GGUF\x03\0\0\0" + b"\0" * 40, "gguf", "GGUF"),
        (b"\0" * 5000, "zero_filled", "never written"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", "not_safetensors", "AccessDenied"),
        (b'{"error":"Repository not found"}', "not_safetensors", "Repository not found"),
        (b"Too Many Requests: slow down please", "not_safetensors", "plain text"),
        (b"\x1f\x8b\x08" + b"\xaa" * 40, "not_safetensors", "gzip"),
    ],
)
def test_what_is_no_safetensors_file_is_called_what_it_is(
    tmp_path: Path, content: bytes, code: str, words: str
) -> None:
    """The first bytes of a file of another kind are recognised, and nothing of it is parsed."""
    problem = refusal(write(tmp_path / "x.safetensors", content)).problems[0]

    assert problem.code == code
    assert words in problem.detail


def test_special_files_are_refused_without_waiting(tmp_path: Path) -> None:
    """A FIFO, a socket, a directory and a device are refused at once."""
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "dir.safetensors").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.safetensors"))
        for name, kind in (("fifo", "FIFO"), ("dir", "directory"), ("socket", "socket")):
            problem = refusal(tmp_path / f"{name}.safetensors").problems[0]

            assert problem.code == "not_regular"
            assert kind in problem.detail
    assert refusal(Path("/dev/null")).problems[0].code == "not_regular"


def test_links_that_lead_nowhere_are_named_with_their_target(tmp_path: Path) -> None:
    """A dangling link names its target and the way to copy it right; a circle of links is called one."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x.incomplete").touch()
    (tmp_path / "a.safetensors").symlink_to("blobs/gone")
    (tmp_path / "b.safetensors").symlink_to("b.safetensors")

    dangling = refusal(tmp_path / "a.safetensors").problems[0]

    assert dangling.code == "dangling_link"
    assert "blobs/gone" in dangling.detail
    assert "rsync -aL" in dangling.detail
    assert "1 unfinished download" in dangling.detail
    assert refusal(tmp_path / "b.safetensors").problems[0].code == "link_loop"
    assert refusal(tmp_path / "c.safetensors").problems[0].code == "not_found"


@pytest.mark.parametrize("number", [5, 13])
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The system's own words and number stand in the refusal, at opening and at reading alike."""
    path = write(tmp_path / "x.safetensors", serialise([]))

    def fail(*arguments: object, **options: object) -> int:
        raise OSError(number, os.strerror(number))

    for call in ("open", "pread"):
        with monkeypatch.context() as patch:
            patch.setattr(f"remote_agent.loader.files.os.{call}", fail)
            problem = refusal(path).problems[0]

        assert problem.code == "unreadable"
        assert f"errno {number}" in problem.detail


def test_many_problems_of_one_file_are_counted(tmp_path: Path) -> None:
    """A file with a hundred bad tensors names twenty and counts the rest."""
    entries = ",".join(f'"t{number}":{{"dtype":"X9","shape":[],"data_offsets":[0,0]}}' for number in range(100))

    error = refusal(write(tmp_path / "x.safetensors", with_header(b"{" + entries.encode() + b"}")))

    assert len(error.problems) == 21
    assert "80 more" in error.problems[-1].detail


def test_hostile_names_stay_on_one_printable_line(tmp_path: Path) -> None:
    """Escape sequences, newlines and bidi marks in a tensor's name never reach a terminal as they are."""
    name = "a\u001b]52;c;x\u0007\n\u202e" + "x" * 5000
    header = json.dumps({name: {"dtype": "U8", "shape": [9], "data_offsets": [0, 2]}}).encode()

    line = str(refusal(write(tmp_path / "x.safetensors", with_header(header, b"12"))))

    assert line.isprintable()
    assert len(line) < 600
