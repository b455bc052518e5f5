"""Reads one safetensors header and holds it against its file, before anything else is read.

A header is parsed only when it fits the file and the format's cap; until then a few
kilobytes have been read. What is refused is refused with every number a person needs.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.files import describe, identity_of, open_regular, read_exactly, refused
from remote_agent.loader.header_text import INT_MAX, HeaderTextError, TensorEntry, parse_header_text
from remote_agent.loader.problems import CheckpointProblem, counted, listed, shown
from remote_agent.loader.sniff import SNIFF_BYTES, sniff
from remote_agent.protocol.internal import ShardIdentity

__all__ = ["HEADER_LIMIT_BYTES", "Header", "TensorEntry", "check_entry", "read_header"]

LENGTH_BYTES = 8
HEADER_LIMIT_BYTES = 100_000_000
"""The cap of the safetensors library; a longer header loads nowhere."""

COUNT_LIMIT_BYTES = 1 << 30
"""How much of an oversized header is searched for its number of tensors."""

PROBLEMS_PER_FILE = 20


@dataclass(frozen=True)
class Header:
    """A header that fits its file: tensors cover the data section without hole or overlap, in its order."""

    path: Path
    size_bytes: int
    data_start: int
    tensors: tuple[TensorEntry, ...]
    identity: ShardIdentity
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        return self.size_bytes - self.data_start


def read_header(path: Path, name: str | None = None) -> Header:
    """Return the header of one safetensors file, checked against the file.

    ``name`` stands for the file in problems (default: its last part).
    Raises: CheckpointError with every problem found.
    """
    label = path.name if name is None else name
    descriptor = open_regular(path, label)
    try:
        # What the kernel read ahead of a header would be cached in small pages, where a load brings in large ones.
        with contextlib.suppress(OSError):  # some kernels take no advice
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        status = os.fstat(descriptor)
        data_start, content = _read_content(descriptor, status.st_size, label)
    except OSError as error:
        raise refused(CheckpointProblem("unreadable", label, None, f"can't be read: {describe(error)}")) from error
    finally:
        os.close(descriptor)
    try:
        entries, metadata = parse_header_text(content)
    except HeaderTextError as error:
        raise refused(CheckpointProblem(error.code, label, error.tensor, str(error))) from error
    del content
    entries.sort(key=lambda entry: (entry.start, entry.end))
    tensors = tuple(entries)
    del entries
    problems = [problem for tensor in tensors if (problem := check_entry(tensor, label)) is not None]
    if not problems:
        problems = _check_layout(tensors, label) or _check_size(tensors, data_start, status.st_size, label)
    if problems:
        raise refused(*_capped(problems, label))
    identity = identity_of(str(path.absolute()), status)
    return Header(path, status.st_size, data_start, tensors, identity, metadata)


def _read_content(descriptor: int, size_bytes: int, label: str) -> tuple[int, bytes]:
    head = read_exactly(descriptor, 0, SNIFF_BYTES)
    if not head:
        raise refused(CheckpointProblem("empty_file", label, None, "is an empty file (0 bytes)"))
    if len(head) < LENGTH_BYTES:
        detail = f"has {counted(len(head), 'byte')}: too short for a header"
        raise refused(CheckpointProblem("too_short", label, None, detail))
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    fits = length <= min(HEADER_LIMIT_BYTES, size_bytes - LENGTH_BYTES)
    if not fits or not head[LENGTH_BYTES:].lstrip(b" \t\r\n").startswith(b"{"):
        found = sniff(head)
        if found is not None:
            raise refused(CheckpointProblem(found[0], label, None, found[1]))
    if not fits:
        raise refused(_misfit(descriptor, length, size_bytes, label))
    content = read_exactly(descriptor, LENGTH_BYTES, length)
    if len(content) < length:
        detail = f"header of {length} bytes ended after {len(content)}: the file is being changed"
        raise refused(CheckpointProblem("header_beyond_file", label, None, detail))
    return LENGTH_BYTES + length, content


def _misfit(descriptor: int, length: int, size_bytes: int, label: str) -> CheckpointProblem:
    if length > size_bytes - LENGTH_BYTES:
        detail = (
            f"header is said to have {length} bytes, the file has {size_bytes}: "
            f"{length + LENGTH_BYTES - size_bytes} bytes are missing, or this is no safetensors file"
        )
        return CheckpointProblem("header_beyond_file", label, None, detail)
    tensors = _count_tensors(descriptor, length)
    detail = f"header of {length} bytes ({tensors}) is over the format's cap of {HEADER_LIMIT_BYTES} bytes"
    return CheckpointProblem("header_too_large", label, None, f"{detail}; split the file into shards")


def _count_tensors(descriptor: int, length: int) -> str:
    """Count without parsing: one block in memory at a time."""
    needle, block_bytes, found, tail = b'"data_offsets"', 1 << 20, 0, b""
    for offset in range(0, min(length, COUNT_LIMIT_BYTES), block_bytes):
        block = tail + read_exactly(descriptor, LENGTH_BYTES + offset, min(block_bytes, length - offset))
        found += block.count(needle)
        tail = block[-(len(needle) - 1) :]
    return counted(found, "tensor") + (" in its first GiB" if length > COUNT_LIMIT_BYTES else "")


def check_entry(tensor: TensorEntry, label: str) -> CheckpointProblem | None:
    """Return why a tensor's dtype, shape and offsets do not belong together; None where they do."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        detail = f"tensor {shown(tensor.name)}: dtype {shown(tensor.dtype, 40)!r} is not one of: {', '.join(DTYPES)}"
        return CheckpointProblem("unknown_dtype", label, tensor.name, detail)
    if math.prod(dimension for dimension in tensor.shape if dimension) > INT_MAX // 8:
        detail = f"tensor {shown(tensor.name)}: shape {_shape(tensor.shape)} holds more elements than can be addressed"
        return CheckpointProblem("bad_shape", label, tensor.name, detail)
    bits = math.prod(tensor.shape) * dtype.bits
    declared = tensor.end - tensor.start
    if bits != declared * 8:
        needed = f"{bits // 8} bytes" if bits % 8 == 0 else f"{bits} bits, which end inside a byte"
        detail = (
            f"tensor {shown(tensor.name)}: {tensor.dtype} {_shape(tensor.shape)} needs {needed}, "
            f"its offsets {tensor.start}..{tensor.end} give {declared} bytes"
        )
        return CheckpointProblem("size_mismatch", label, tensor.name, detail)
    return None


def _check_layout(tensors: Sequence[TensorEntry], label: str) -> list[CheckpointProblem]:
    problems = []
    covered, previous = 0, ""
    for tensor in tensors:
        if tensor.start < covered:
            detail = (
                f"tensor {shown(tensor.name)} at {tensor.start}..{tensor.end} overlaps {shown(previous)}, "
                f"which ends at {covered}"
            )
            problems.append(CheckpointProblem("overlap", label, tensor.name, detail))
        elif tensor.start > covered:
            detail = (
                f"{tensor.start - covered} bytes before tensor {shown(tensor.name)} at {tensor.start} are no tensor's"
            )
            problems.append(CheckpointProblem("hole", label, tensor.name, detail))
        if tensor.end >= covered:
            covered, previous = tensor.end, tensor.name
    return problems


def _check_size(
    tensors: Sequence[TensorEntry], data_start: int, size_bytes: int, label: str
) -> list[CheckpointProblem]:
    declared = data_start + (tensors[-1].end if tensors else 0)
    if size_bytes > declared:
        detail = f"is {size_bytes - declared} bytes longer than its header declares: {size_bytes}, not {declared}"
        return [CheckpointProblem("file_too_long", label, None, detail)]
    if size_bytes == declared:
        return []
    lost = [tensor.name for tensor in tensors if data_start + tensor.end > size_bytes]
    detail = (
        f"{declared - size_bytes} bytes are missing: the header declares {declared}, the file has {size_bytes}; "
        f"{counted(len(lost), 'tensor')} lost: {listed(lost)}"
    )
    return [CheckpointProblem("truncated", label, lost[0], detail)]


def _capped(problems: list[CheckpointProblem], label: str) -> list[CheckpointProblem]:
    if len(problems) <= PROBLEMS_PER_FILE:
        return problems
    more = f"and {len(problems) - PROBLEMS_PER_FILE} more problems like these"
    last = problems[PROBLEMS_PER_FILE]
    return [*problems[:PROBLEMS_PER_FILE], CheckpointProblem(last.code, label, last.tensor, more)]


def _shape(shape: tuple[int, ...]) -> str:
    return shown(str(list(shape)))
