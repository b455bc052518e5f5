"""What a stub's worker does with the keeper, which is the real one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from remote_agent.agentd import hostfacts
from remote_agent.agentd.paths import StateDir
from remote_agent.keeper.client import KeeperAddress, ask
from remote_agent.protocol.internal import Manifest, WorkerGo, WorkerJob
from remote_agent.resident.manifest import write_manifest


def put_resident(job: WorkerJob, go: WorkerGo) -> None:
    """Give the keeper a resident as a worker would, without weights in it."""
    recipe = job.recipe
    manifest = Manifest(
        go.resident or "", job.run_uid, recipe.name, recipe.model.path, go.shards, job.device, hostfacts.boot_id(),
        job.owner, 1000, 0, time.time_ns(), recipe.hold.ttl_s, "",
    )  # fmt: skip
    descriptors = [write_manifest(manifest, ()), os.memfd_create("weights", os.MFD_CLOEXEC)]
    ask(_keeper_of(job), f"put {go.resident}", descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def drop_resident(job: WorkerJob, go: WorkerGo) -> None:
    """Have the keeper lose what the worker was told that it holds."""
    ask(_keeper_of(job), f"drop! {go.resident}")


def _keeper_of(job: WorkerJob) -> KeeperAddress:
    assert job.state_directory is not None
    return KeeperAddress(StateDir(Path(job.state_directory)))
