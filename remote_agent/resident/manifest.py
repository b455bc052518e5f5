"""A manifest as it travels: sealed memory of its own, so that a model may have as many tensors as it likes.

One line of JSON, a `Manifest`; then a safetensors header's JSON that says where each tensor lies: the format is
known, and so is what can be wrong with it. Standard library alone: agentd reads the first line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from remote_agent.errors import ResidentLostError
from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.header_text import HeaderTextError, TensorEntry, parse_header_text
from remote_agent.loader.headers import check_entry
from remote_agent.loader.problems import shown
from remote_agent.protocol.codec import DecodeError, decode, encode
from remote_agent.protocol.internal import Manifest
from remote_agent.resident.sealing import seal_content

LIMIT_BYTES = 256 << 20
HEAD_LIMIT_BYTES = 16 << 20


def write_manifest(manifest: Manifest, entries: Iterable[TensorEntry]) -> int:
    """Return the descriptor of memory that holds both and can't be changed any more. Raises: OSError"""
    content = json.dumps(encode(manifest), separators=(",", ":")).encode() + b"\n" + write_table(entries)
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
    table = {
        entry.name: {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.start, entry.end]}
        for entry in entries
    }
    return json.dumps(table, separators=(",", ":")).encode()


def read_manifest(descriptor: int) -> tuple[Manifest, bytes]:
    """Return the manifest and the table of tensors, which is not read yet.

    Raises: ResidentLostError if it is torn, too large or another version's.
    """
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
    try:
        return decode(Manifest, json.loads(head)), table
    except (DecodeError, ValueError, RecursionError) as error:
        raise ResidentLostError(f"a manifest can't be understood: {shown(str(error), 200)}") from error


def read_entries(manifest: Manifest, table: bytes) -> list[TensorEntry]:
    """Return where each tensor lies; all of them lie in the memory, where a view of their dtype can.

    Raises: ResidentLostError naming the tensor.
    """
    try:
        entries, _ = parse_header_text(table)
    except HeaderTextError as error:
        raise ResidentLostError(f"{manifest.name}: its manifest can't be used: {error}") from error
    for entry in entries:
        problem = check_entry(entry, manifest.name)
        if problem is not None:
            raise ResidentLostError(f"{manifest.name}: its manifest can't be used: {problem.detail}")
        if entry.end > manifest.size_bytes:
            text = f"{shown(entry.name)} ends at {entry.end}, the memory at {manifest.size_bytes}"
            raise ResidentLostError(f"{manifest.name}: its manifest can't be used: {text}")
        if entry.start % DTYPES[entry.dtype].item_bytes:
            text = f"{shown(entry.name)} at {entry.start} lies where no {entry.dtype} can"
            raise ResidentLostError(f"{manifest.name}: its manifest can't be used: {text}")
    return entries
