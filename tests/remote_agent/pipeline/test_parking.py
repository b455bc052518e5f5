"""A worker's part in being parked, on the fake driver's GPU and on a CPU: memory goes, addresses stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from remote_agent.agentd.paths import StateDir
from remote_agent.devices.base import Device
from remote_agent.devices.cpu import CpuDevice
from remote_agent.errors import DeviceError, KeeperRefusedError, ResidentLostError
from remote_agent.keeper.client import KeeperAddress, ask, list_residents
from remote_agent.loader.checkpoint import inspect
from remote_agent.pipeline.host import HostShards
from remote_agent.pipeline.keeping import Backing, Keeping
from remote_agent.pipeline.parking import CONTEXT_BYTES, map_weights, unmap_weights
from remote_agent.pipeline.timing import Measure, Stages
from remote_agent.pipeline.weights import Weights, attach_weights, load_weights
from remote_agent.protocol.internal import WorkerGo
from remote_agent.protocol.messages import ModelSource, Recipe
from tests.remote_agent import checkpoints
from tests.remote_agent.agentd.agents import REPOSITORY, eventually, is_running
from tests.remote_agent.fake_cuda import POOL_BYTES, UUID_TEXT, FakeGpu
from tests.remote_agent.resident.residents import keeping_for

ROOM = 1 << 40
NEEDED = CONTEXT_BYTES + POOL_BYTES
"""What the fake GPU's process has there beside its weights."""


def loaded(state: StateDir, folder: Path, gpu: FakeGpu) -> tuple[Weights, Keeping, Backing]:
    """Return weights that this process loaded and gave to the keeper, as a standby does."""
    keeping = keeping_for(state, folder, device=UUID_TEXT)
    recipe = Recipe("tiny", ModelSource(str(folder)), devices=("cuda:0",))
    weights = load_weights(recipe, gpu, (), Measure(0), lambda done, total: None)
    assert weights.backing.keepable is not None
    keeping.keep(weights.backing.keepable)
    return weights, keeping, replace(weights.backing, is_kept=True)


def attached(state: StateDir, folder: Path, device: Device) -> tuple[Weights, Keeping]:
    """Return weights that this process found at the keeper."""
    named = "cpu" if device.kind == "cpu" else UUID_TEXT
    keeping = keeping_for(state, folder, device=named, is_resident=True)
    weights = attach_weights(Recipe("tiny", ModelSource(str(folder))), device, keeping, Measure(0))
    keeping.detach()
    return weights, keeping


def equal(found: Weights, folder: Path) -> bool:
    expected = checkpoints.read_tensors(folder)
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.tensors.items())


def test_what_a_standby_loaded_goes_and_comes_back_where_it_was(
    keeper: int, state: StateDir, llama: Path, gpu: FakeGpu
) -> None:
    """Between the two nothing is mapped and no handle is open, as a checkpoint wants it; the addresses are kept."""
    weights, keeping, backing = loaded(state, llama, gpu)
    addresses = {name: tensor.data_ptr() for name, tensor in weights.tensors.items()}
    away = unmap_weights(backing, keeping, gpu, ROOM, HostShards())
    left = (len(gpu.fake_driver.handles), len(gpu.fake_driver.maps), len(gpu.fake_driver.ranges))
    there = list_residents(KeeperAddress(state))[0].attached
    backing, steps = map_weights(backing, keeping)

    assert (away.problem, away.device_bytes, away.steps.keys()) == (None, NEEDED, {"unmap_ns"})
    assert (left, there) == ((0, 0, 1), ())
    assert steps.keys() == {"fetch_ns", "verify_ns", "map_ns"}
    assert {name: tensor.data_ptr() for name, tensor in weights.tensors.items()} == addresses
    assert equal(weights, llama)
    assert backing.keepable is None
    assert list_residents(KeeperAddress(state))[0].attached == ()


def test_what_a_standby_attached_goes_and_comes_back(keeper: int, state: StateDir, llama: Path, gpu: FakeGpu) -> None:
    """As often as it is asked to."""
    _, _, backing = loaded(state, llama, gpu)
    weights, keeping = attached(state, llama, gpu)
    backing = weights.backing
    for _ in range(2):
        assert unmap_weights(backing, keeping, gpu, ROOM, HostShards()).problem is None
        backing, _ = map_weights(backing, keeping)

    assert equal(weights, llama)


def test_weights_that_nobody_else_has_are_not_unmapped(keeper: int, state: StateDir, llama: Path, gpu: FakeGpu) -> None:
    """Not kept at all, or released meanwhile: they would be lost. Nothing was touched."""
    weights, keeping, backing = loaded(state, llama, gpu)
    never = unmap_weights(replace(backing, is_kept=False, problem="no keeper"), keeping, gpu, ROOM, HostShards())
    ask(KeeperAddress(state), f"drop {keeping.name}")
    released = unmap_weights(backing, keeping, gpu, ROOM, HostShards())

    text = "its weights lie in shared memory that the keeper does not have"
    assert (never.problem, released.problem) == (f"{text}: no keeper", f"{text}: {keeping.name}")
    assert equal(weights, llama)


def test_a_host_without_room_is_named_with_the_numbers(keeper: int, state: StateDir, llama: Path, gpu: FakeGpu) -> None:
    """What the device holds beside the weights goes to the host's memory."""
    weights, keeping, backing = loaded(state, llama, gpu)
    away = unmap_weights(backing, keeping, gpu, NEEDED - 1, HostShards())

    room = f"{NEEDED} bytes of the device go to the host's memory, which has {NEEDED - 1} left"
    assert away.problem == room
    assert equal(weights, llama)


def test_weights_in_memory_of_its_own_stay_for_the_driver_to_save(state: StateDir, llama: Path, gpu: FakeGpu) -> None:
    """Where a device can't share, there is nothing to unmap and nothing to map."""
    keeping = keeping_for(state, llama, device=UUID_TEXT)
    away = unmap_weights(Backing(), keeping, gpu, ROOM, HostShards())

    assert away.problem is None
    assert map_weights(Backing(), keeping) == (Backing(), {})


def test_files_that_are_kept_registered_are_given_back(state: StateDir, llama: Path, gpu: FakeGpu) -> None:
    """With the rest, once nothing speaks against a checkpoint; before that nothing is touched."""
    host, keeping = HostShards(), keeping_for(state, llama, device=UUID_TEXT)
    recipe = Recipe("tiny", ModelSource(str(llama)), target_tier="host")
    host.keep(recipe, WorkerGo(inspect(llama).identities), gpu, Stages(lambda message: None), lambda finding: None)
    refused = unmap_weights(Backing(), keeping, gpu, 0, host)
    before = len(gpu.fake_runtime.registered)
    away = unmap_weights(Backing(), keeping, gpu, ROOM, host)

    assert refused.problem is not None
    assert before > 0
    assert (away.problem, gpu.fake_runtime.registered) == (None, {})


@pytest.mark.parametrize("why", ["released", "others"])
def test_weights_that_are_no_more_are_not_mapped(
    keeper: int, state: StateDir, llama: Path, gpu: FakeGpu, why: str
) -> None:
    """Released while it was parked, or other bytes by the same name: an error that says so."""
    weights, keeping, backing = loaded(state, llama, gpu)
    assert unmap_weights(backing, keeping, gpu, ROOM, HostShards()).problem is None
    if why == "released":
        ask(KeeperAddress(state), f"drop {keeping.name}")
        with pytest.raises(KeeperRefusedError, match="no resident"):
            map_weights(backing, keeping)
    else:
        with pytest.raises(ResidentLostError, match="has other weights by that name now"):
            map_weights(replace(backing, checksum="00" * 16), keeping)
    del weights


def test_a_driver_that_does_not_unmap_ends_it(keeper: int, state: StateDir, llama: Path, gpu: FakeGpu) -> None:
    """The process is of no use any more, and says which call it was."""
    weights, keeping, backing = loaded(state, llama, gpu)
    gpu.fake_driver.fail_at = "cuMemUnmap"

    with pytest.raises(DeviceError, match="cuMemUnmap failed"):
        unmap_weights(backing, keeping, gpu, ROOM, HostShards())
    gpu.fake_driver.fail_at = None
    del weights


def test_a_cpu_s_attached_weights_move_the_same_way(keeper: int, state: StateDir, llama: Path) -> None:
    """The one mechanism, on the host's memory."""
    made = keeping_for(state, llama)
    recipe = Recipe("tiny", ModelSource(str(llama)), target_tier="resident")
    keepable = load_weights(recipe, CpuDevice(), (), Measure(0), lambda done, total: None).backing.keepable
    assert keepable is not None
    made.keep(keepable)
    weights, keeping = attached(state, llama, CpuDevice())
    away = unmap_weights(weights.backing, keeping, CpuDevice(), ROOM, HostShards())
    map_weights(weights.backing, keeping)

    assert (away.problem, away.device_bytes) == (None, 0)
    assert equal(weights, llama)


CHILD = """
import os, signal
from remote_agent.pipeline.parking import die_with_agent
die_with_agent()
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = f"""
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
signal.pause()
"""


def test_a_process_that_can_not_see_its_socket_close_ends_with_its_agent() -> None:
    """Stopped, as a parked one may be, it is ended by the kernel when its parent is killed."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()

    eventually(lambda: not is_running(pid), "the kernel ends it")
