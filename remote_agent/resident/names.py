"""What a resident is called: one name for one model's files on one device."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import PurePath

from remote_agent.protocol.internal import ShardIdentity

STEM_CHARACTERS = 40


def resident_name(model: str, shards: Sequence[ShardIdentity], device: str) -> str:
    """Return the name under which the keeper has these files' tensors: another one once a file is another.

    ``device``: ``cpu`` or a UUID. The beginning is for people: the model's folder.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(model).name)[:STEM_CHARACTERS].strip("-._") or "model"
    digest = hashlib.blake2b(digest_size=8)
    for shard in shards:
        identity = (shard.path, shard.device, shard.inode, shard.size_bytes, shard.mtime_ns, shard.ctime_ns)
        digest.update(repr(identity).encode("utf-8", "surrogatepass"))
    return f"{stem}-{digest.hexdigest()}@{device}"
