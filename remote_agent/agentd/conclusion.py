"""What is said at a run's end of what its workers gave."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from remote_agent.protocol.internal import WorkerReady
from remote_agent.protocol.messages import Failure, Resident, RunRecord, RunStartParams, Tier


def with_answers(record: RunRecord, ready: Sequence[WorkerReady], accepted_mono_ns: int) -> RunRecord:
    """Return the record of a run that is ready: the coldest tier its workers reached, and the last first output."""
    record = replace(record, tier_to=min((message.tier for message in ready), key=list(Tier).index))
    outputs_ns = [message.first_output_mono_ns for message in ready if message.first_output_mono_ns is not None]
    if not outputs_ns:
        return record
    return replace(record, output=ready[0].output[:4000], first_output_ns=max(outputs_ns) - accepted_mono_ns)


def stuck(failure: Failure | None, reasons: Sequence[str]) -> Failure:
    """Return the failure of a run whose processes can't be ended for ``reasons``, whatever failed before."""
    told = [failure.detail] if failure else []
    stage, log_tail = (failure.stage, failure.log_tail) if failure else (None, ())
    return Failure("stuck", "; ".join([*told, *reasons]), stage, log_tail)


def resident_of(
    params: RunStartParams, device: str, pid: int, ready: WorkerReady, owner: str, size_bytes: int
) -> Resident:
    """Return what a run left warm on one device, with the process that made it."""
    recipe = params.recipe
    return Resident(
        params.run_uid,
        recipe.name,
        recipe.model.path,
        device,
        ready.tier,
        size_bytes,
        pid,
        owner,
        time.time_ns(),
        recipe.hold.ttl_s,
        ready.resident,
    )
