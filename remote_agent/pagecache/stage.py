"""Stage ``weights`` where the page cache is as far as it goes: what was read, and whether it stayed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.problems import gigabytes
from remote_agent.loader.residency import measure_residency
from remote_agent.loader.shards import OpenShards
from remote_agent.pagecache.reading import bring_in
from remote_agent.pipeline.failures import fail
from remote_agent.pipeline.preflight import CACHED_SHARE
from remote_agent.protocol.messages import Finding, StageStatus

if TYPE_CHECKING:
    from remote_agent.pipeline.timing import Measure, Stages


def cache_shards(checkpoint: Checkpoint, shards: OpenShards, stages: Stages, measure: Measure) -> Finding | None:
    """Bring every shard into the page cache and return what did not stay there, if anything.

    Raises: LoadError naming the file; StageError ``not_cached`` where too little stayed to call it cached.
    """
    read_cached(checkpoint, shards, stages, measure)
    shards.check_unchanged()
    return check_stay(checkpoint, measure)


def read_cached(checkpoint: Checkpoint, shards: OpenShards, stages: Stages, measure: Measure) -> None:
    """Bring in what is missing, and put into the stage what that took. Raises: LoadError naming the file"""
    brought = bring_in(checkpoint, shards, partial(stages.progress, "weights", start_mono_ns=measure.start_mono_ns))
    measure.path = "page cache"
    measure.bytes = brought.read_bytes
    measure.rate_bytes_s = brought.rate_bytes_s
    measure.extra["cached_bytes"] = brought.cached_bytes
    measure.extra["read_ns"] = brought.duration_ns
    if not brought.read_bytes:
        measure.status = StageStatus.REUSED
        measure.reason = "the page cache has it"


def check_stay(checkpoint: Checkpoint, measure: Measure) -> Finding | None:
    """Return what of the shards is not in the page cache now, if anything.

    Raises: StageError ``not_cached`` where that is more than what may be missing of a tier ``cached``.
    """
    total = sum(header.data_bytes for header in checkpoint.shards)
    found = measure_residency(checkpoint.shards)
    measure.extra["residency"] = found.how
    if found.cached_bytes is None:
        text = f"whether the shards stayed in the page cache is not known: {found.reason}"
        return Finding("stay_unknown", "info", text)
    measure.extra["stayed_bytes"] = found.cached_bytes
    if found.cached_bytes >= total:
        return None
    text = f"{gigabytes(total - found.cached_bytes)} of {gigabytes(total)} did not stay in the page cache"
    if found.cached_bytes < total * CACHED_SHARE:
        raise fail("not_cached", f"{text} ({found.how}): memory is short, or its filesystem keeps none there")
    return Finding("not_all_cached", "warning", text)
