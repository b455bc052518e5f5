"""Tier ``host`` as the agent keeps it: a worker that any later run of the model on that GPU finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remote_agent.protocol.messages import (
    CompilePolicy,
    Event,
    Finding,
    Hold,
    ModelSource,
    ReleaseParams,
    ReleaseResult,
    Resident,
    ResidentChanged,
    RunRecord,
    RunState,
    StageStatus,
    Tier,
)
from tests.remote_agent.agentd.agents import (
    Agent,
    Watcher,
    eventually,
    failure_of,
    is_running,
    parts_sum_to_wall,
    stage_of,
)
from tests.remote_agent.agentd.stub_children import UUIDS


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    """Return the agent of a host with two GPUs."""
    return make_agent(orders={"sampler": "ok"})


def warm(client: Watcher, agent: Agent, tier: str = "host", device: str = "cuda:0", **recipe: Any) -> RunRecord:
    return client.warm(agent.params(recipe.pop("stub", ""), (device,), target_tier=tier, **recipe))


def held(client: Watcher) -> Resident:
    (resident,) = client.status().residents
    return resident


def test_a_worker_stays_with_the_shards(agent: Agent) -> None:
    """Its tier is ``host``, its bytes are the host's, no stage of a model is done, and release ends it."""
    with agent.client("") as client:
        run = warm(client, agent, hold=Hold("ops", 60.0))
        resident = held(client)
        released = client.call("resident.release", ReleaseParams(run.run_uid), ReleaseResult).released
        assert client.status().residents == ()

    assert (run.state, run.tier_to, run.first_output_ns) == (RunState.READY, Tier.HOST, None), run
    assert {stage.name for stage in run.stages if stage.status is StageStatus.SKIPPED} == {
        "assign", "compile", "first_request"
    }  # fmt: skip
    assert stage_of(run, "assign").reason == "not part of host"
    assert parts_sum_to_wall(run)
    assert (resident.tier, resident.device, resident.bytes, resident.ttl_s) == (Tier.HOST, UUIDS[0], 4096, 60.0)
    assert released == (resident,)
    assert resident.pid is not None
    assert not is_running(resident.pid)


@pytest.mark.parametrize("tier", ["standby", "resident"])
def test_a_later_run_of_another_recipe_of_the_model_starts_from_it(agent: Agent, tier: str) -> None:
    """The same process goes on to that run's tier; what it held before is told as taken over."""
    with agent.client("") as client:
        first = warm(client, agent)
        before = held(client)
        run = warm(client, agent, tier, compile=CompilePolicy("layer"))
        after = held(client)

    assert (first.tier_from, run.tier_from, run.tier_to) == (Tier.COLD, Tier.HOST, Tier(tier))
    assert stage_of(run, "preflight").extra["tier_from"] == "host"
    assert stage_of(run, "init").status is StageStatus.REUSED
    assert stage_of(run, "first_request").extra["pid"] == before.pid
    assert (after.run_uid, after.pid) == (run.run_uid, before.pid if tier == "standby" else None)


def test_a_run_for_the_tier_takes_it_over(agent: Agent) -> None:
    """Nothing is registered twice: the second run holds what the first one left."""
    with agent.client("") as client:
        warm(client, agent)
        before = held(client)
        run = warm(client, agent, hold=Hold(ttl_s=60.0))
        after = held(client)

    assert (run.tier_from, run.tier_to) == (Tier.HOST, Tier.HOST)
    assert stage_of(run, "weights").status is StageStatus.REUSED
    assert (after.pid, after.run_uid, after.ttl_s) == (before.pid, run.run_uid, 60.0)


@pytest.mark.parametrize(
    "change", [{"device": "cuda:1"}, {"environment": {"OTHER": "1"}}], ids=["another GPU", "another environment"]
)
def test_it_serves_its_own_gpu_and_environment_alone(agent: Agent, change: dict[str, Any]) -> None:
    """A registration is with one context; an environment is a process's from its start."""
    with agent.client("") as client:
        warm(client, agent)
        run = warm(client, agent, "standby", **change)

    assert (run.state, run.tier_from) == (RunState.READY, Tier.COLD)


def test_changed_files_let_it_go(agent: Agent) -> None:
    """The run loads the new ones in a worker of its own, and the old ones' pages are free."""
    with agent.client("") as client:
        warm(client, agent)
        pid = held(client).pid
        agent.model.write_bytes(b"other weights")
        client.begin(params := agent.params("", ("cuda:0",)))

        def is_gone(event: Event) -> bool:
            return isinstance(event.data, ResidentChanged) and event.data.state == "gone"

        gone = client.next_event(is_gone).data
        run = client.finished(params.run_uid)

    assert isinstance(gone, ResidentChanged)
    assert gone.reason == f"its files changed: run {run.run_uid} loads them again"
    assert (run.state, run.tier_from) == (RunState.READY, Tier.COLD)
    assert pid is not None
    assert not is_running(pid)


def test_where_registering_is_refused_the_run_is_cached_and_nothing_is_held(agent: Agent) -> None:
    """The tier that was reached stands in the run, why it is not the one asked for in a finding."""
    with agent.client("") as client:
        params = agent.params("refused", ("cuda:0",), target_tier="host")
        client.begin(params)
        finding = client.next_event(
            lambda event: isinstance(event.data, Finding) and event.data.code == "not_registered"
        ).data
        run = client.finished(params.run_uid)
        eventually(lambda: not any("worker" in name for name in client.status().processes), "the worker ends")
        assert client.status().residents == ()

    assert isinstance(finding, Finding)
    assert (run.state, run.tier_to) == (RunState.READY, Tier.CACHED)


def test_the_host_s_memory_is_what_it_needs(agent: Agent) -> None:
    """More than the host has is refused with the numbers, whatever room the GPU has; cached bytes are there."""
    with agent.client("") as client:
        refused = warm(client, agent, stub="bytes:1000000000000000")
        cached = warm(client, agent, stub="bytes:1000000000000000 cached")

    assert failure_of(refused).code == "no_memory"
    assert "cpu: needs 1000000.00 GB" in failure_of(refused).detail
    assert cached.tier_to is Tier.HOST


def test_a_worker_is_told_what_others_keep_registered_of_other_files(agent: Agent, tmp_path: Path) -> None:
    """The kernel does not count registered pages; those of the same files are the same pages, on every GPU."""
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"other weights")

    def told(client: Watcher) -> str:
        def is_it(event: Event) -> bool:
            return isinstance(event.data, Finding) and event.data.code == "stub_registered"

        data = client.next_event(is_it).data
        assert isinstance(data, Finding)
        return data.text

    with agent.client("") as client:
        for device in ("cuda:0", "cuda:1"):
            params = agent.params("", (device,), target_tier="host")
            client.begin(params)
            assert told(client) == "0 bytes of others"
            client.finished(params.run_uid)
        params = agent.params("", ("cuda:0",), target_tier="host")
        wanted = replace(params.recipe, model=ModelSource(str(other)))
        client.begin(replace(params, recipe=wanted))
        assert told(client) == "4096 bytes of others"
        assert client.finished(params.run_uid).tier_to is Tier.HOST
