"""Small files that are always whole: the old content or the new, never a part of one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def write_whole(path: Path, content: object) -> None:
    """Replace ``path`` by ``content`` as JSON, durably. Raises: OSError; the old file stays then."""
    beside = path.with_name(f".{path.name}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, json.dumps(content, separators=(",", ":")).encode())
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    beside.replace(path)
    sync_directory(path.parent)


def read_json(path: Path) -> Mapping[str, object] | None:
    """Return the object in ``path``, or None where there is none that can be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(path: Path) -> None:
    """Make new and removed names in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
