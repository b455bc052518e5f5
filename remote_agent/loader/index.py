"""Reads a ``*.safetensors.index.json``: which tensor lies in which shard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from remote_agent.loader.files import describe, open_regular, read_exactly, refused
from remote_agent.loader.problems import CheckpointProblem, shown
from remote_agent.loader.sniff import SNIFF_BYTES, sniff

INDEX_SUFFIX = ".safetensors.index.json"
INDEX_LIMIT_BYTES = 100_000_000


def read_index(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensors of each shard, in the index's order; every shard stays inside the folder.

    Raises: CheckpointError.
    """
    weight_map = _read_weight_map(path)
    shards: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise _bad(path, f"weight_map.{shown(tensor)} is not the name of a file", tensor)
        shards.setdefault(shard, []).append(tensor)
    outside = [
        CheckpointProblem("index_path", path.name, tensors[0], f"names {shown(shard)!r}, which leads out of the folder")
        for shard, tensors in shards.items()
        if not _is_inside(shard)
    ]
    if outside:
        raise refused(*outside)
    return {str(PurePosixPath(shard)): tuple(tensors) for shard, tensors in shards.items()}


def _read_weight_map(path: Path) -> Mapping[str, object]:
    descriptor = open_regular(path)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > INDEX_LIMIT_BYTES:
            raise _bad(path, f"has {size_bytes} bytes, more than the {INDEX_LIMIT_BYTES} that an index may have")
        content = read_exactly(descriptor, 0, size_bytes)
    except OSError as error:
        raise refused(CheckpointProblem("unreadable", path.name, None, f"can't be read: {describe(error)}")) from error
    finally:
        os.close(descriptor)
    if not content.strip():
        raise _bad(path, f"is an empty file ({size_bytes} bytes)")
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        found = None if content.lstrip()[:1] == b"{" else sniff(content[:SNIFF_BYTES])
        if found is not None and found[0] != "not_safetensors":
            raise refused(CheckpointProblem(found[0], path.name, None, found[1])) from error
        raise _bad(path, f"is not JSON: {shown(str(error))}") from error
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict):
        raise _bad(path, "has no weight_map that names a shard for each tensor")
    if not weight_map:
        raise _bad(path, "has an empty weight_map: no tensor is in any shard")
    return weight_map


def _is_inside(shard: str) -> bool:
    path = PurePosixPath(shard)
    return bool(path.parts) and "\0" not in shard and not path.is_absolute() and ".." not in path.parts


def _bad(path: Path, detail: str, tensor: str | None = None) -> Exception:
    return refused(CheckpointProblem("bad_index", path.name, tensor, detail))
