"""On a real GPU: a spare has initialised the driver and holds no memory; its first job opens the context."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from remote_agent.agentd.paths import StateDir
from remote_agent.devices.calls import Calls
from remote_agent.devices.cuda import DRIVER, visible_uuids
from remote_agent.loader.checkpoint import inspect
from remote_agent.protocol.internal import WorkerGo, WorkerJob, WorkerPrepare, WorkerPrepared, WorkerReady
from remote_agent.protocol.messages import FirstRequest, ModelSource, Recipe, StageStatus
from remote_agent.resident.names import resident_name
from tests.remote_agent import checkpoints
from tests.remote_agent.worker_ends import do_job, only, running_zygote, stages_over

pytestmark = pytest.mark.gpu

CONTEXT_BYTES = 128 << 20
"""Less than any context takes."""


@pytest.mark.timeout(600)
def test_a_spare_holds_no_memory_of_its_gpu_and_its_job_does_no_init(tmp_path: Path) -> None:
    """What is free on the whole GPU is compared before and after; the job answers with its own context."""
    torch.cuda.init()
    uuid = visible_uuids(Calls(DRIVER))[0]
    folder = checkpoints.write_llama(tmp_path / "model", torch.bfloat16)
    recipe = Recipe("tiny", ModelSource(str(folder)), devices=(uuid,), request=FirstRequest(prompt_tokens=8))
    state, shards = StateDir(tmp_path / "state"), inspect(folder).identities
    go = WorkerGo(shards, resident_name(str(folder), shards, uuid))
    with running_zygote(tmp_path / "zygote-log") as zygote, zygote.worker(tmp_path / "log") as worker:
        free_bytes = [torch.cuda.mem_get_info()[0]]
        worker.end.send(WorkerPrepare(uuid, str(folder)))
        prepared = worker.end.receive()
        free_bytes.append(torch.cuda.mem_get_info()[0])
        has_driver = "libcuda.so" in Path(f"/proc/{worker.pid}/maps").read_text()
        job = WorkerJob("run-00000001", recipe, uuid, time.monotonic_ns(), str(state.cache), None, str(state.root))
        messages = do_job(worker.end, job, go)
        free_bytes.append(torch.cuda.mem_get_info()[0])

    init = stages_over(messages)["init"]
    assert prepared == WorkerPrepared()
    assert has_driver
    assert free_bytes[0] - free_bytes[1] < CONTEXT_BYTES < free_bytes[0] - free_bytes[2]
    assert init.status is StageStatus.REUSED
    assert init.extra["gpu_uuid"] == uuid
    assert only(messages, WorkerReady).output
