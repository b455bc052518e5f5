"""The process of a ``cached`` run: reads, and with ``hold.lock`` stays, holding the pages. Standard library only.

It speaks a worker's messages. It ends with its socket to agentd, as every holder does, and by itself
when a file that it has locked is no longer the file it locked.
"""

from __future__ import annotations

import argparse
import socket
import sys
import traceback
from functools import partial
from pathlib import Path

from remote_agent.errors import LoadError
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.shards import OpenShards
from remote_agent.pagecache.locking import LockedShards, LockRefused
from remote_agent.pagecache.stage import cache_shards
from remote_agent.pipeline.channel import Channel
from remote_agent.pipeline.failures import describe_failure, one_line
from remote_agent.pipeline.timing import Stages
from remote_agent.protocol.internal import (
    WorkerFailed,
    WorkerFinding,
    WorkerGo,
    WorkerJob,
    WorkerLetsGo,
    WorkerReady,
)
from remote_agent.protocol.messages import Finding, Tier

CHECK_S = 1.0
"""How often the files are compared that are locked."""


def main(argv: list[str]) -> int:
    """Serve the jobs that come over the inherited socket ``--fd``."""
    parser = argparse.ArgumentParser(prog="python -m remote_agent cacher")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to agentd")
    channel = Channel(socket.socket(fileno=parser.parse_args(argv).fd))
    channel.watch()
    return Cacher(channel).serve()


class Cacher:
    """Does one job after another; between them it holds what the last one locked."""

    def __init__(self, line: Channel) -> None:
        self._line = line
        self._locked: LockedShards | None = None

    def serve(self) -> int:
        """Do jobs until told to let go, or until one failed or what is locked has changed; return the exit code."""
        while True:
            message = self._line.receive_within(CHECK_S) if self._locked is not None else self._line.receive()
            if message is None:
                reason = self._find_change()
                if reason is None:
                    continue
                self._line.send(WorkerLetsGo(reason))
                return 0
            if not isinstance(message, WorkerJob) or not self._run(message):
                return 0

    def _find_change(self) -> str | None:
        assert self._locked is not None
        try:
            self._locked.check_unchanged()
        except LoadError as error:
            return one_line(f"its pages are locked no longer: {error}")
        return None

    def _run(self, job: WorkerJob) -> bool:
        """Do one job and report how it went; never raises."""
        stages = Stages(self._line.send)
        try:
            go = self._line.receive()
            if not isinstance(go, WorkerGo):
                return False
            self._line.send(self._do_stages(job, go, stages))
            return True
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._line.send(WorkerFailed(describe_failure(error, stages.current)))
            return False

    def _do_stages(self, job: WorkerJob, go: WorkerGo, stages: Stages) -> WorkerReady:
        if self._locked is not None and self._locked.identities == go.shards:
            for stage in ("weights", "hold"):
                stages.reuse(stage, "its pages are locked already")
            return WorkerReady(None, "", Tier.CACHED, self._locked.locked_bytes)
        if self._locked is not None:
            self._locked.close()
            self._locked = None
        checkpoint = inspect(Path(job.recipe.model.path).expanduser(), job.recipe.model.revision)
        with stages.measure("weights") as measure, OpenShards(checkpoint.shards, go.shards) as shards:
            finding = cache_shards(checkpoint, shards, stages, measure)
        if finding is not None:
            self._line.send(WorkerFinding(finding))
        if job.recipe.hold.lock:
            self._locked = self._lock(checkpoint, go, stages)
        if self._locked is None:
            return WorkerReady(None, "", Tier.CACHED, checkpoint.bytes, is_held=False)
        return WorkerReady(None, "", Tier.CACHED, self._locked.locked_bytes)

    def _lock(self, checkpoint: Checkpoint, go: WorkerGo, stages: Stages) -> LockedShards | None:
        """Return the shards locked; None where that is refused, which is told: they are cached all the same."""
        with stages.measure("hold") as measure:
            locked = LockedShards(checkpoint.shards, OpenShards(checkpoint.shards, go.shards))
            progress = partial(stages.progress, "hold", start_mono_ns=measure.start_mono_ns)
            try:
                locked.lock(go.registered_bytes, progress, measure.announce)
            except LockRefused as refusal:
                locked.close()
                measure.reason = f"not locked: {refusal}"
                self._line.send(WorkerFinding(Finding("not_locked", "warning", one_line(str(refusal)))))
                return None
            measure.bytes = locked.locked_bytes
            measure.extra["holder"] = "worker"
        return locked
