"""A manifest as it travels: sealed memory of its own, so that a model may have as many tensors as it likes.

One line of JSON, a `Manifest` and its ``format``; then JSON that says where each tensor lies, by columns, since it is
read at each attach: ``kinds`` are the few pairs of dtype and shape that a model has; ``names``, ``kind_of`` and
``starts`` have an item for each tensor, whose end follows from its kind. Standard library alone: agentd reads the first
line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from remote_agent.errors import ResidentLostError
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.header_text import INT_MAX, TensorEntry
from remote_agent.loader.headers import check_entry
from remote_agent.loader.problems import shown
from remote_agent.protocol.codec import DecodeError, decode, encode
from remote_agent.protocol.internal import Manifest
from remote_agent.resident.sealing import seal_content

LIMIT_BYTES = 256 << 20
HEAD_LIMIT_BYTES = 16 << 20
DIMENSIONS_MAX = 1024
FORMAT = 2
"""What stands in the first line; a manifest of another format is refused by that number. The first had none."""

COLUMNS = (("names", str), ("kind_of", int), ("starts", int))
"""What stands in the table for each tensor."""


class ReadManifest(NamedTuple):
    """What was read: the manifest, the line that it is, and the table of tensors, which is not read yet."""

    manifest: Manifest
    head: bytes
    table: bytes


class Kind(NamedTuple):
    """A dtype and a shape that belong together; ``item_bytes`` is what a start must be a multiple of."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    item_bytes: int


def write_manifest(manifest: Manifest, entries: Iterable[TensorEntry]) -> int:
    """Return the descriptor of memory that holds both and can't be changed any more. Raises: OSError"""
    head = json.dumps({"format": FORMAT, **encode(manifest)}, separators=(",", ":")).encode()
    content = head + b"\n" + write_table(entries)
    descriptor = os.memfd_create("glowplug-manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        seal_content(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_table(entries: Iterable[TensorEntry]) -> bytes:
    """Return the table of tensors: the same bytes for the same entries, so that two may be compared unread."""
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    names, kind_of, starts = list[str](), list[int](), list[int]()
    for entry in entries:
        names.append(entry.name)
        kind_of.append(kinds.setdefault((entry.dtype, entry.shape), len(kinds)))
        starts.append(entry.start)
    table = {"kinds": list(kinds), "names": names, "kind_of": kind_of, "starts": starts}
    return json.dumps(table, separators=(",", ":")).encode()


def read_manifest(descriptor: int, before: ReadManifest | None = None) -> ReadManifest:
    """Return a manifest; the line of ``before``, which was read already, is not decoded again.

    Raises: ResidentLostError if it is torn, too large or of another format.
    """
    head, table = read_parts(descriptor)
    manifest = before.manifest if before is not None and before.head == head else decode_head(head)
    return ReadManifest(manifest, head, table)


def read_parts(descriptor: int) -> tuple[bytes, bytes]:
    """Return a manifest's first line and its table, neither of them decoded. Raises: ResidentLostError"""
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > LIMIT_BYTES:
            raise ResidentLostError(f"a manifest of {size_bytes} bytes is over the limit of {LIMIT_BYTES}")
        content = b""
        while part := os.pread(descriptor, size_bytes - len(content), len(content)):
            content += part
    except OSError as error:
        raise ResidentLostError(f"a manifest can't be read: {error.strerror}") from error
    head, newline, table = content.partition(b"\n")
    if not newline or len(head) > HEAD_LIMIT_BYTES:
        raise ResidentLostError(f"a manifest of {len(content)} bytes is torn")
    return head, table


def decode_head(head: bytes) -> Manifest:
    """Return what a manifest's first line says. Raises: ResidentLostError"""
    try:
        found = json.loads(head)
        if isinstance(found, Mapping) and "name" in found and found.get("format") != FORMAT:
            number = shown(str(found.get("format", 1)), 24)
            text = f"{shown(str(found['name']), 200)}: its manifest is of format {number}, not of {FORMAT}"
            raise ResidentLostError(f"{text}: load it again")
        return decode(Manifest, found)
    except (DecodeError, ValueError, RecursionError) as error:
        raise ResidentLostError(f"a manifest can't be understood: {shown(str(error), 200)}") from error


def read_entries(manifest: Manifest, table: bytes) -> list[TensorEntry]:
    """Return where each tensor lies; all of them lie in the memory, where a view of their dtype can.

    Raises: ResidentLostError naming the tensor.
    """
    try:
        columns = json.loads(table.decode("utf-8"))
        names, kind_of, starts = (_column(columns, *column) for column in COLUMNS)
        if not len(names) == len(kind_of) == len(starts):
            raise ValueError(f"{len(names)} names, {len(kind_of)} kinds and {len(starts)} starts")
        "".join(names).encode("utf-8")  # a lone surrogate can't be printed by whoever attaches
        if len(set(names)) < len(names):
            raise ValueError(f"{len(names)} tensors have {len(set(names))} names")
        kinds = _read_kinds(columns)
        if kind_of and not 0 <= min(kind_of) <= max(kind_of) < len(kinds):
            raise ValueError(f"kinds {min(kind_of)} to {max(kind_of)} are named, there are {len(kinds)}")
    except (ValueError, RecursionError) as error:
        raise _unusable(manifest, shown(str(error), 200)) from error
    first = dict(zip(reversed(kind_of), reversed(names), strict=True))
    found = [_check_kind(manifest, first.get(number, ""), *kind) for number, kind in enumerate(kinds)]
    entries, size_bytes = [], manifest.size_bytes
    for name, number, start in zip(names, kind_of, starts, strict=True):
        dtype, shape, needed_bytes, item_bytes = found[number]
        end = start + needed_bytes
        if start < 0 or end > size_bytes or start % item_bytes:
            raise _unusable(manifest, _misplaced(name, dtype, start, end, size_bytes))
        entries.append(TensorEntry(name, dtype, shape, start, end))
    return entries


def _column(columns: object, name: str, kind: type) -> list[Any]:
    """Return a column whose items are all of that type. Raises: ValueError"""
    found = columns.get(name) if isinstance(columns, Mapping) else None
    if not isinstance(found, list) or not set(map(type, found)) <= {kind}:
        raise ValueError(f"{name} is no list of {'texts' if kind is str else 'integers'}")
    return found


def _read_kinds(columns: Mapping[str, object]) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each kind, as they stand there. Raises: ValueError"""
    kinds = columns.get("kinds")
    if not isinstance(kinds, list) or any(not isinstance(kind, list) or len(kind) != 2 for kind in kinds):
        raise ValueError("kinds is no list of pairs")
    for dtype, shape in kinds:
        if not isinstance(dtype, str) or not isinstance(shape, list) or not set(map(type, shape)) <= {int}:
            raise ValueError("a kind is not a dtype and a list of integers")
        if len(shape) > DIMENSIONS_MAX or any(not 0 <= number <= INT_MAX for number in shape):
            raise ValueError(f"a kind of {len(shape)} dimensions has one that is not within 0..{INT_MAX}")
    return [(dtype, tuple(shape)) for dtype, shape in kinds]


def _check_kind(manifest: Manifest, name: str, dtype: str, shape: tuple[int, ...]) -> Kind:
    """Return a kind that tensors can be of; ``name`` is the first of them. Raises: ResidentLostError"""
    known = DTYPES.get(dtype)
    size_bytes = 0 if known is None else math.prod(shape) * known.bits // 8
    problem = check_entry(TensorEntry(name, dtype, shape, 0, size_bytes), manifest.name)
    if problem is not None or known is None:
        raise _unusable(manifest, problem.detail if problem is not None else dtype)
    return Kind(dtype, shape, size_bytes, known.item_bytes)


def _misplaced(name: str, dtype: str, start: int, end: int, size_bytes: int) -> str:
    if end > size_bytes:
        return f"{shown(name)} ends at {shown(str(end), 24)}, the memory at {size_bytes}"
    return f"{shown(name)} at {shown(str(start), 24)} lies where no {dtype} can"


def _unusable(manifest: Manifest, text: str) -> ResidentLostError:
    return ResidentLostError(f"{manifest.name}: its manifest can't be used: {text}")
