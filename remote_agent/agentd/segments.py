"""Journal segments: files named by their first seq, one event a line: ``CRC32 SEQ JSON``.

A line is written once and never changed. The checksum covers the seq and the JSON.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from remote_agent.errors import JournalError
from remote_agent.protocol.codec import DecodeError, decode, encode
from remote_agent.protocol.messages import Event

SUFFIX = ".jsonl"


def encode_line(event: Event) -> bytes:
    """Return ``event`` as one line."""
    body = b"%d %s" % (event.seq, json.dumps(encode(event), separators=(",", ":"), allow_nan=False).encode("ascii"))
    return b"%08x %s\n" % (zlib.crc32(body), body)


def line_seq(line: bytes) -> int:
    """Return the seq of an intact line (without its newline). Raises: JournalError if it is damaged."""
    checksum, _, body = line.partition(b" ")
    seq = body.partition(b" ")[0]
    try:
        intact = len(checksum) == 8 and int(checksum, 16) == zlib.crc32(body)
    except ValueError:
        intact = False
    if not intact or not seq.isdigit():
        raise JournalError(f"a damaged line: {line[:40]!r}")
    return int(seq)


def decode_line(line: bytes) -> Event:
    """Return the event of a line, its data as plain JSON. Raises: JournalError if it is damaged."""
    line_seq(line)
    try:
        return decode(Event, json.loads(line.split(b" ", 2)[2]))
    except (ValueError, IndexError, DecodeError) as error:
        raise JournalError(f"a line that is no event: {line[:60]!r}") from error


@dataclass(frozen=True)
class Scan:
    """What a segment holds: its last intact seq (``first - 1`` for none) and how many bytes of it are intact.

    ``torn``: bytes that follow are no line, as after a crash in the middle of a write.
    ``broken``: the order is wrong, or intact lines follow a damaged one.
    """

    last_seq: int
    good_bytes: int
    torn: bool
    broken: bool


def scan(data: bytes, first_seq: int) -> Scan:
    """Check every line of a segment."""
    lines = data.split(b"\n")
    seq, good_bytes = first_seq - 1, 0
    for index, line in enumerate(lines[:-1]):
        try:
            found = line_seq(line)
        except JournalError:
            return Scan(seq, good_bytes, True, any(_is_intact(later) for later in lines[index + 1 :]))
        if found != seq + 1:
            return Scan(seq, good_bytes, True, True)
        seq, good_bytes = found, good_bytes + len(line) + 1
    return Scan(seq, good_bytes, good_bytes < len(data), False)


def lines_after(data: bytes, after_seq: int) -> Iterator[bytes]:
    """Yield the whole lines of a segment that follow ``after_seq``. Raises: JournalError at a damaged one."""
    for line in data.split(b"\n")[:-1]:
        if line_seq(line) > after_seq:
            yield line


def segment_name(first_seq: int) -> str:
    return f"{first_seq:020d}{SUFFIX}"


def first_seqs(directory: Path) -> list[int]:
    """Return the first seq of each segment, in order."""
    names = (path.name.removesuffix(SUFFIX) for path in directory.glob(f"*{SUFFIX}"))
    return sorted(int(name) for name in names if name.isdigit())


def _is_intact(line: bytes) -> bool:
    try:
        line_seq(line)
    except JournalError:
        return False
    return True
