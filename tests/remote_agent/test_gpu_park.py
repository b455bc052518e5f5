"""A standby parked by a real driver: a real agent, a real worker, its answer before and after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from remote_agent.agentd.paths import StateDir
from remote_agent.client import Client, open_client
from remote_agent.devices.calls import Calls
from remote_agent.devices.cuda import DRIVER
from remote_agent.devices.process_checkpoint import ProcessCheckpoint
from remote_agent.errors import DeviceError, RefusedError
from remote_agent.keeper.client import KeeperAddress, ask
from remote_agent.protocol.messages import (
    Actor,
    Empty,
    FirstRequest,
    ModelSource,
    ParkParams,
    ParkResult,
    Recipe,
    RunRecord,
    RunResult,
    RunStartParams,
    RunStartResult,
    RunState,
    RunUidParams,
    ShutdownParams,
    StatusResult,
    Tier,
)
from tests.remote_agent import checkpoints
from tests.remote_agent.agentd.agents import REPOSITORY, eventually, is_running, parts_sum_to_wall, stage_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of some 100 MB, so that its memory can be told from the context's."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
    folder = tmp_path_factory.mktemp("models") / "llama"
    return checkpoints.write_llama(folder, torch.bfloat16, vocab_size=8192, num_hidden_layers=3, **sizes)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    return StateDir(tmp_path_factory.mktemp("agent") / "state")


@pytest.fixture
def client(state: StateDir) -> Iterator[Client]:
    """Return a client of an agent that is started for this test and stopped after it."""
    with open_client(state, "test") as client:
        client._link.settimeout(120)
        yield client
        client.call("shutdown", ShutdownParams(keeper=True, force=True), Empty)


def warm(client: Client, model: Path) -> RunRecord:
    recipe = Recipe("llama", ModelSource(str(model)), devices=("cuda:0",), request=FirstRequest(prompt_tokens=16))
    uid = str(uuid.uuid4())
    client.call("run.start", RunStartParams(uid, recipe, Actor("ann", "here"), (sys.executable,)), RunStartResult)

    def over() -> RunRecord | None:
        run = client.call("run.get", RunUidParams(uid), RunResult).run
        return run if run.state.is_terminal else None

    run = eventually(over, "the run ends", 120)
    assert run is not None
    assert run.state is RunState.READY, run.failure
    return run


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def test_a_parked_standby_gives_its_context_back_and_answers_the_same(client: Client, model: Path) -> None:
    """By request and by the run that finds it; its process is one and the same all along."""
    first = warm(client, model)
    (standby,) = client.call("status", Empty(), StatusResult).residents
    before = used_bytes()
    parked = client.call("park", ParkParams(first.run_uid), ParkResult)
    between = used_bytes()
    back = client.call("unpark", ParkParams(first.run_uid), ParkResult)
    second = warm(client, model)
    client.call("park", ParkParams(second.run_uid), ParkResult)
    third = warm(client, model)
    (now,) = client.call("status", Empty(), StatusResult).residents

    assert [one.tier for one in parked.residents] == [Tier.PARKED]
    assert before - between > 200 << 20
    assert {"lock_ns", "checkpoint_ns", "unmap_ns"} <= next(iter(parked.steps.values())).keys()
    assert {"restore_ns", "unlock_ns", "map_ns"} <= next(iter(back.steps.values())).keys()
    assert (second.tier_from, third.tier_from) == (Tier.STANDBY, Tier.PARKED)
    assert first.output == second.output == third.output
    assert stage_of(third, "context").extra["restore_ns"]
    assert parts_sum_to_wall(third)
    assert now.pid == standby.pid


def test_a_parked_standby_whose_weights_were_released_is_lost(client: Client, state: StateDir, model: Path) -> None:
    """Its process is ended though it is parked; nothing of it is left on the GPU."""
    run = warm(client, model)
    (parked,) = client.call("park", ParkParams(run.run_uid), ParkResult).residents
    ask(KeeperAddress(state), f"drop {parked.name}")

    eventually(lambda: not is_running(parked.pid or 0), "the parked process ends")
    with pytest.raises(RefusedError, match=r"holds nothing|has ended"):
        client.call("unpark", ParkParams(run.run_uid), ParkResult)


ATTACHED = """
import sys
import remote_agent
with remote_agent.attach("llama", state_dir=sys.argv[1]) as resident:
    print(len(resident.tensors), float(next(iter(resident.tensors.values())).float().sum()), flush=True)
    sys.stdin.read()
"""


def test_a_process_that_has_a_resident_mapped_is_not_restored(client: Client, state: StateDir, model: Path) -> None:
    """The driver takes the checkpoint, and only then refuses: what a worker's unmapping is for."""
    warm(client, model)
    victim = subprocess.Popen(
        [sys.executable, "-c", ATTACHED, str(state.root)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdin is not None
    assert victim.stdout is not None
    try:
        assert victim.stdout.readline()
        process = ProcessCheckpoint(Calls(DRIVER), victim.pid)
        process.require_support()
        process.park(10_000)
        assert process.left() == "parked"
        with pytest.raises(DeviceError, match="cuCheckpointProcessRestore failed"):
            process.unpark()
        assert process.left() == "lost"
    finally:
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        victim.stdin.close()
        victim.stdout.close()
