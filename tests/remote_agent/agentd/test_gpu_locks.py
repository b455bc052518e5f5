"""Loads onto one GPU by agents of several users: one after the other, waiting in the queue, named and cancellable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.agentd import hostfacts
from remote_agent.agentd.lock_file import LockFile
from remote_agent.protocol.messages import Finding, RunRecord, RunResult, RunState, RunUidParams
from tests.remote_agent.agentd.agents import Agent, Watcher, eventually, failure_of
from tests.remote_agent.agentd.stub_children import UUIDS


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    """Return a folder that several agents use."""
    folder = tmp_path / "locks"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def gpu_agent(make_agent: Callable[..., Agent], locks: Path, **options: object) -> Agent:
    agent = make_agent(orders={"sampler": "ok 1000000000"}, lock_folders=[str(locks)], **options)
    with agent.client() as client:
        eventually(lambda: client.status().probe.gpus, "the sampler reports")  # type: ignore[union-attr]
    return agent


def waiting(client: Watcher) -> str:
    """Return the next word on what a run waits for."""
    data = client.next_event(lambda event: isinstance(event.data, Finding) and event.data.code == "waiting").data
    assert isinstance(data, Finding)
    return data.text


def cancel(client: Watcher, run_uid: str) -> RunRecord:
    return client.call("run.cancel", RunUidParams(run_uid), RunResult).run


def test_a_load_waits_for_another_agent_s_and_says_whose(make_agent: Callable[..., Agent], locks: Path) -> None:
    """It waits in the queue until the other's weights are there, not until the other's run is over."""
    one, two = gpu_agent(make_agent, locks), gpu_agent(make_agent, locks)
    with one.client("") as first, two.client("") as second:
        loading = one.params("hang:weights", ("cuda:0",))
        first.begin(loading)
        first.stage(loading.run_uid, "weights")
        behind = two.params(devices=("cuda:0",))
        second.begin(behind)
        told = waiting(second)
        is_queued = second.status().runs[0].state
        cancel(first, loading.run_uid)
        warm = second.finished(behind.run_uid)
        compiling = two.params("hang:compile", ("cuda:1",))
        second.begin(compiling)
        second.stage(compiling.run_uid, "compile")
        beside = first.warm(one.params(devices=("cuda:1",)))

    holder = f"run {loading.run_uid} of {hostfacts.user_name()} (agent process {one.pid})"
    assert told == f"waits for {holder}, which loads onto {UUIDS[0]}"
    assert is_queued is RunState.QUEUED
    assert warm.state is RunState.READY
    assert beside.state is RunState.READY


def test_a_run_that_waits_for_a_lock_is_cancelled_and_leaves_none(
    make_agent: Callable[..., Agent], locks: Path
) -> None:
    """A lock that another process keeps for ever holds up nobody who no longer wants it; what a run has goes back."""
    agent = gpu_agent(make_agent, locks)
    other, first = (LockFile(locks / f"glowplug-{uuid}.lock") for uuid in reversed(UUIDS))
    assert other.try_take({"pid": 1, "user": "bob", "run": "b"})
    with agent.client("") as client:
        run = agent.params(devices=("cuda:1", "cuda:0"))
        client.begin(run)
        told = waiting(client)
        is_taken = not first.try_take({"pid": 2})
        cancelled = cancel(client, run.run_uid)

    assert told == f"waits for run b of bob (agent process 1), which loads onto {UUIDS[1]}"
    assert is_taken
    assert (cancelled.state, failure_of(cancelled).stage) == (RunState.CANCELLED, "queue")
    assert first.try_take({"pid": 2})


def test_a_killed_agent_leaves_no_lock_behind(make_agent: Callable[..., Agent], locks: Path) -> None:
    """The kernel frees it at once, whatever becomes of the worker."""
    agent, lock = gpu_agent(make_agent, locks), LockFile(locks / f"glowplug-{UUIDS[0]}.lock")
    with agent.client("") as client:
        run = agent.params("hang:weights", ("cuda:0",))
        client.begin(run)
        client.stage(run.run_uid, "weights")
        is_taken = not lock.try_take({"pid": 2})
        agent.kill()

    assert is_taken
    eventually(lambda: lock.try_take({"pid": 2}), "the lock is free")


def test_a_link_in_the_lock_s_place_is_said_and_not_followed(make_agent: Callable[..., Agent], locks: Path) -> None:
    """Another user can't stop loads with it: the run goes on, and its finding names the file."""
    agent, link = gpu_agent(make_agent, locks), locks / f"glowplug-{UUIDS[0]}.lock"
    link.symlink_to(locks / "elsewhere")
    with agent.client("") as client:
        run = agent.params(devices=("cuda:0",))
        client.begin(run)
        found = client.next_event(lambda event: event.run_uid is not None and isinstance(event.data, Finding)).data
        done = client.finished(run.run_uid)

    assert isinstance(found, Finding)
    assert (found.code, found.severity) == ("gpu_lock_unusable", "warning")
    assert f"{link}: can't be used as a lock: is a symbolic link" in found.text
    assert done.state is RunState.READY
    assert not (locks / "elsewhere").exists()
