"""A sampler that hangs or dies, and runs on several devices, one of which fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.protocol.messages import (
    Finding,
    RunState,
)
from tests.remote_agent.agentd.agents import (
    Agent,
    children_of,
    eventually,
    failure_of,
    parts_sum_to_wall,
    pid_of,
    probe,
    stage_of,
)

QUICK_SAMPLER = {"report_s": 0.4, "check_s": 0.05, "backoff_s": 0.05}


@pytest.fixture
def gpu(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent whose sampler sees two GPUs from the start."""
    agent = make_agent(sampler=QUICK_SAMPLER, orders={"sampler": "gpus"})
    with agent.client() as client:
        eventually(lambda: probe(client).gpus, "the sampler reports GPUs")
    return agent


def test_the_first_probe_waits_for_the_samplers_first_word(make_agent: Callable[..., Agent]) -> None:
    """An agent that has just been started for this very question does not call a GPU host one without GPUs."""
    agent = make_agent(sampler=QUICK_SAMPLER, orders={"sampler": "gpus"})
    with agent.client() as client:
        first = probe(client)

    assert (first.sampler, len(first.gpus)) == ("nvml", 2)


def test_a_killed_sampler_is_started_again(gpu: Agent) -> None:
    """GPU facts are back after SIGKILL, from another process."""
    with gpu.client("") as client:
        old = pid_of(client, "sampler")
        assert old is not None
        os.kill(old, signal.SIGKILL)
        told = client.next_event(lambda e: isinstance(e.data, Finding) and e.data.code == "sampler_failed")
        new = eventually(lambda: pid_of(client, "sampler"), "a sampler runs again")
        eventually(lambda: probe(client).sampler == "nvml", "it reports")

    assert isinstance(told.data, Finding)
    assert "killed (SIGKILL)" in told.data.text
    assert new != old


def test_a_hung_sampler_is_abandoned_and_one_more_is_started(gpu: Agent) -> None:
    """Silence is said to be a hung driver; no more than two are ever there, and runs on the CPU go on."""
    with gpu.client("") as client:
        gpu.order("unkillable", "")
        gpu.order("sampler", "silent")
        told = client.next_event(lambda e: isinstance(e.data, Finding) and e.data.code == "sampler_hung")
        hung = probe(client)
        run = client.warm(gpu.params())
        samplers = [pid for pid in children_of(gpu.pid) if b"sampler" in cmdline(pid)]
        gpu.order("unkillable", None)
        gpu.order("sampler", "gpus")
        for pid in samplers:
            end_if_running(pid)  # as the signal that was held up does once the driver returns
        eventually(lambda: probe(client).sampler == "nvml", "it reports again once the driver does")

    assert isinstance(told.data, Finding)
    assert "the driver may hang" in told.data.text
    assert (hung.sampler, hung.gpus) == ("hung", ())
    assert run.state is RunState.READY
    assert len(samplers) <= 2


def end_if_running(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_what_the_sampler_finds_is_told_once(gpu: Agent) -> None:
    """A finding that every report repeats is one event."""
    with gpu.client("") as client:
        for _ in range(2):
            client.warm(gpu.params("preflight:refuse"))
        newest = client.hello("again").newest_seq
    with gpu.client("") as client:
        found = [e for e in client.everything(newest) if isinstance(e.data, Finding) and e.data.code == "stub_ecc"]

    assert len(found) == 1


def test_a_run_on_all_devices_has_one_worker_each_and_ends_with_the_slowest(gpu: Agent) -> None:
    """Stages of two GPUs are one: bytes summed, differing figures by device; two residents are held."""
    with gpu.client("") as client:
        run = client.warm(gpu.params(devices=("all",)))
        residents = client.status().residents

    weights = stage_of(run, "weights")
    assert run.state is RunState.READY
    assert run.devices == ("GPU-00000000-aaaa", "GPU-11111111-bbbb")
    assert weights.bytes == 2000
    assert {"GPU-00000000-aaaa.pid", "GPU-11111111-bbbb.pid"} <= weights.extra.keys()
    assert parts_sum_to_wall(run)
    assert sorted(resident.device for resident in residents) == list(run.devices)


def test_a_worker_that_dies_takes_the_whole_run_with_it(gpu: Agent) -> None:
    """A failure on one GPU ends the workers of all, and is named with its device."""
    with gpu.client("") as client:
        run = client.warm(gpu.params("sigkill:weights@GPU-11111111-bbbb hang:weights@GPU-00000000-aaaa", ("all",)))
        workers = [name for name in client.status().processes if name.startswith("worker")]

    assert run.state is RunState.FAILED
    assert "GPU-11111111-bbbb" in failure_of(run).detail
    assert parts_sum_to_wall(run)
    assert workers == []


def test_runs_on_different_devices_do_not_wait_for_each_other(gpu: Agent) -> None:
    """A slot is a device's: another device's run goes by."""
    with gpu.client("") as client:
        slow = gpu.params("hang:weights", ("cuda:0",))
        client.begin(slow)
        client.stage(slow.run_uid, "weights")
        run = client.warm(gpu.params("", ("cuda:1",)))

    assert run.state is RunState.READY
    assert run.devices == ("GPU-11111111-bbbb",)


def test_a_device_that_is_not_there_fails_the_run_naming_what_is(gpu: Agent) -> None:
    """The failure lists the host's GPUs."""
    with gpu.client("") as client:
        run = client.warm(gpu.params("", ("cuda:7",)))

    assert failure_of(run).code == "no_such_device"
    assert "cuda:7" in failure_of(run).detail
    assert "cuda:1 Stub GPU GPU-11111111-bbbb" in failure_of(run).detail


def test_a_full_gpu_refuses_and_names_who_holds_it(gpu: Agent) -> None:
    """Other processes and our own residents are both named with their sizes."""
    with gpu.client("") as client:
        client.warm(gpu.params("", ("cuda:0",)))
        run = client.warm(gpu.params(f"bytes:{9 * 10**9}", ("cuda:0",)))

    detail = failure_of(run).detail
    assert failure_of(run).code == "no_memory"
    assert "needs 9.00 GB, free are 7.00 GB" in detail
    assert "tiny of ann@laptop (1000 bytes" in detail
    assert "trainer (1.00 GB, process 4242)" in detail


def test_a_host_without_nvidia_says_so_and_starts_no_further_sampler(agent: Agent) -> None:
    """The sampler's word that there is no driver is final, and a CPU run goes on with it."""
    with agent.client("") as client:
        eventually(lambda: probe(client).sampler == "absent", "the sampler reports")
        run = client.warm(agent.params(devices=("auto",)))

        assert pid_of(client, "sampler") is None
    assert run.devices == ("cpu",)
    assert stage_of(run, "probe").reason == "no NVIDIA driver: CPU only"
