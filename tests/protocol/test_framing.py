"""Frames and the sync mark: any split gives the same, limits hold before anything is kept."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from remote_agent.protocol.framing import FrameReader, ProtocolError, SyncScanner, frame, sync_mark
from remote_agent.protocol.messages import FRAME_LIMIT_BYTES, PROTOCOL_MAX, PROTOCOL_MIN

TOKEN = "0123456789abcdef"

payloads = st.lists(st.binary(min_size=1, max_size=50).filter(lambda data: b"\n" not in data), max_size=10)
cuts = st.lists(st.integers(0, 600), max_size=12)


def pieces(data: bytes, at: list[int]) -> list[bytes]:
    """Cut ``data`` at the given places."""
    places = sorted({0, len(data), *(place for place in at if place < len(data))})
    return [data[start:end] for start, end in itertools.pairwise(places)]


@given(payloads, cuts)
def test_any_split_of_the_bytes_gives_the_same_frames(frames: list[bytes], at: list[int]) -> None:
    """Where the network cuts a stream does not matter."""
    reader = FrameReader()
    data = b"".join(frame(payload) for payload in frames)
    found = [payload for piece in pieces(data, at) for payload in reader.feed(piece)]

    assert found == frames
    reader.end()


@given(payloads, st.binary(min_size=1, max_size=50).filter(lambda data: b"\n" not in data))
def test_a_stream_that_ends_inside_a_frame_is_an_error(frames: list[bytes], rest: bytes) -> None:
    """A part of a message is never taken for a message."""
    reader = FrameReader()
    found = reader.feed(b"".join(frame(payload) for payload in frames) + rest)

    assert found == frames
    with pytest.raises(ProtocolError, match=f"{len(rest)} bytes into a frame"):
        reader.end()


@given(st.integers(1, 40), st.integers(0, 100), cuts)
def test_a_frame_over_the_limit_is_refused_before_it_is_kept(limit: int, extra: int, at: list[int]) -> None:
    """However it is cut, an endless line costs no more than the limit."""
    reader = FrameReader(limit)
    refused = False
    for piece in pieces(b"x" * (limit + extra), at):
        refused = refused or is_refused(reader, piece)
        assert len(reader._pending) < limit  # nothing beyond the limit may be held

    assert refused


def is_refused(reader: FrameReader, piece: bytes) -> bool:
    """Return whether a reader takes ``piece`` for a breach."""
    try:
        reader.feed(piece)
    except ProtocolError as error:
        return "over the limit" in str(error)
    return False


def test_a_frame_just_under_the_limit_passes() -> None:
    """The limit is the first size that is refused, on both sides."""
    largest = b"x" * (FRAME_LIMIT_BYTES - 1)

    assert FrameReader().feed(frame(largest)) == [largest]
    with pytest.raises(ProtocolError):
        frame(largest + b"x")
    with pytest.raises(ProtocolError):
        FrameReader().feed(largest + b"x\n")


def test_a_payload_with_a_newline_is_no_frame() -> None:
    """One message can't become two."""
    with pytest.raises(ProtocolError, match="newline"):
        frame(b"a\nb")


def test_empty_lines_are_no_frames() -> None:
    """A stray newline changes nothing."""
    assert FrameReader().feed(b"\n\na\n\n") == [b"a"]


@given(st.binary(max_size=300), st.binary(max_size=100), cuts)
def test_the_mark_is_found_after_any_noise_and_any_split(noise: bytes, rest: bytes, at: list[int]) -> None:
    """What a login shell prints before the agent does not matter, and what follows the mark is kept whole."""
    scanner = SyncScanner(TOKEN)
    result, after = None, b""
    for piece in pieces(noise + sync_mark(TOKEN) + rest, at):
        if result is None:
            result = scanner.feed(piece)
        else:
            after += piece

    assert result is not None
    assert result[:2] == (PROTOCOL_MIN, PROTOCOL_MAX)
    assert result[2] + after == rest
    assert scanner.noise.startswith(noise[:100])


@given(st.binary(max_size=500))
def test_noise_without_the_mark_is_never_taken_for_it(noise: bytes) -> None:
    """Another token's mark, or none, gives nothing."""
    scanner = SyncScanner(TOKEN)

    assert scanner.feed(noise + sync_mark("another-token-0")) is None


def test_too_much_noise_is_an_error_and_is_not_kept() -> None:
    """A host that prints for ever is given up on, at a bounded cost."""
    scanner = SyncScanner(TOKEN, limit_bytes=10_000)
    for _ in range(10):
        assert scanner.feed(b"x" * 1000) is None
        assert len(scanner._seen) < 2000  # noise is dropped as it comes

    with pytest.raises(ProtocolError, match="no agent answered"):
        scanner.feed(b"x" * 1000)
    assert len(scanner.noise) <= 5000


@pytest.mark.parametrize("words", [b"1\n", b"1 2 3\n", b"one 2\n", b"-1 1\n", b"1 999999\n", b"1 1" + b" " * 100])
def test_a_mark_that_cannot_be_read_is_an_error(words: bytes) -> None:
    """The right token with a wrong line is not guessed at."""
    with pytest.raises(ProtocolError, match="can't be read"):
        SyncScanner(TOKEN).feed(b"\nGLOWPLUG-SYNC " + TOKEN.encode() + b" " + words)
