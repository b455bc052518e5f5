"""Writes safetensors files byte by byte, so that broken ones can be made, and catches what a load says of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from remote_agent.errors import LoadError
from remote_agent.loader.dtypes import DTYPES

Tensor = tuple[str, str, Sequence[int], bytes]


def size_of(dtype: str, shape: Sequence[int]) -> int:
    count = 1
    for dimension in shape:
        count *= dimension
    return count * DTYPES[dtype].bits // 8


def payload(length: int, seed: int = 1) -> bytes:
    """Return bytes that differ from place to place and from seed to seed."""
    block = bytes((seed * 37 + place * 11) % 253 for place in range(min(length, 8192)))
    return (block * (length // max(len(block), 1) + 1))[:length]


def tensor(name: str, dtype: str, shape: Sequence[int], seed: int = 1) -> Tensor:
    return name, dtype, tuple(shape), payload(size_of(dtype, shape), seed)


def serialise(tensors: Sequence[Tensor], metadata: Mapping[str, object] | None = None, pad: int = 8) -> bytes:
    """Return a whole file; ``pad`` 0 leaves the header as long as it is."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return with_header(json.dumps(header, separators=(",", ":")).encode(), data, pad)


def with_header(header: bytes, data: bytes = b"", pad: int = 0) -> bytes:
    if pad:
        header += b" " * (-(8 + len(header)) % pad)
    return struct.pack("<Q", len(header)) + header + data


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_index(root: Path, shards: Mapping[str, Sequence[Tensor]], name: str = "model.safetensors.index.json") -> Path:
    """Write every shard and the index that names its tensors; return the folder."""
    for shard, tensors in shards.items():
        write(root / shard, serialise(tensors))
    weight_map = {one[0]: shard for shard, tensors in shards.items() for one in tensors}
    write(root / name, json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}).encode())
    return root


def failure_of(call: Callable[[], object]) -> LoadError:
    """Return the error of ``call`` without its traceback, whose frames hold on to everything in them."""
    try:
        call()
    except LoadError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    raise AssertionError("the load did not fail")
