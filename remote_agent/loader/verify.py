"""Compares what was loaded with what the safetensors library reads, byte for byte."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from remote_agent.errors import LoadError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.files import describe, open_regular, read_exactly
from remote_agent.loader.headers import Header, TensorEntry
from remote_agent.loader.problems import counted, shown
from remote_agent.loader.views import bytes_of


@dataclass(frozen=True)
class Verification:
    """``verified`` tensors are equal in bytes, dtype and shape; ``mismatches`` are named.

    ``notes``: what was held against the file itself instead of the library, and why.
    """

    verified: int
    mismatches: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return not self.mismatches


def verify(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> Verification:
    """Compare every tensor of ``checkpoint`` with the library's: bytes, dtype and shape.

    What the library can't give (a dtype it does not know, a file it can't map) is compared with
    the file's own bytes, and a note says so. Raises: LoadError if a file can't be read.
    """
    verified = 0
    mismatches = []
    fallbacks: dict[str, int] = defaultdict(int)
    for shard, header in enumerate(checkpoint.shards):
        with ExitStack() as stack:
            library, refusal = _open_library(stack, header)
            for entry in header.tensors:
                if (shard, entry.name) in checkpoint.shadowed:
                    continue
                expected, why = _expected(library, refusal, header, entry)
                if why is not None:
                    fallbacks[why] += 1
                problem = _difference(expected, entry, tensors.get(entry.name), only_bytes=why is not None)
                if problem is None:
                    verified += 1
                else:
                    mismatches.append(problem)
    notes = tuple(
        f"{counted(number, 'tensor')} compared with the file's own bytes: {why}" for why, number in fallbacks.items()
    )
    return Verification(verified, tuple(mismatches), notes)


def _open_library(stack: ExitStack, header: Header) -> tuple[Any, str | None]:
    from safetensors import SafetensorError, safe_open

    try:
        opened: AbstractContextManager[Any] = safe_open(header.path, framework="pt")
        return stack.enter_context(opened), None
    except (SafetensorError, OSError) as error:
        return None, f"safetensors can't open {shown(header.path.name)}: {_line(error)}"


def _expected(library: Any, refusal: str | None, header: Header, entry: TensorEntry) -> tuple[torch.Tensor, str | None]:
    if library is None:
        return _from_file(header, entry), refusal
    try:
        return library.get_tensor(entry.name), None
    except Exception as error:  # the library raises its own error, or torch's, for what it can't give
        return _from_file(header, entry), f"safetensors can't give {entry.dtype}: {_line(error)}"


def _from_file(header: Header, entry: TensorEntry) -> torch.Tensor:
    descriptor = open_regular(header.path)
    try:
        content = read_exactly(descriptor, header.data_start + entry.start, entry.nbytes)
    except OSError as error:
        raise LoadError(f"{shown(str(header.path), 400)}: can't be read: {describe(error)}", "unreadable") from error
    finally:
        os.close(descriptor)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _difference(
    expected: torch.Tensor, entry: TensorEntry, tensor: torch.Tensor | None, *, only_bytes: bool
) -> str | None:
    name = shown(entry.name)
    if tensor is None:
        return f"{name}: was not loaded"
    if not only_bytes and (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
        found, wanted = (f"{one.dtype} {list(one.shape)}" for one in (tensor, expected))
        return f"{name}: is {found}, expected {wanted}"
    ours, theirs = bytes_of(tensor), bytes_of(expected)
    if ours.numel() != theirs.numel():
        return f"{name}: {ours.numel()} bytes, expected {theirs.numel()}"
    if torch.equal(ours, theirs):
        return None
    wrong = torch.nonzero(ours != theirs)
    return f"{name}: {len(wrong)} of {ours.numel()} bytes differ, the first at {int(wrong[0])}"


def _line(error: BaseException) -> str:
    return shown(" ".join(str(error).split()), 200)
