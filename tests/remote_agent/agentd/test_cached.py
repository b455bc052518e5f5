"""Tier ``cached`` end to end: a real agent, preflight and cacher; stubs where a device would be."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote_agent.protocol.messages import (
    Empty,
    Event,
    Hold,
    ModelSource,
    ReleaseParams,
    ReleaseResult,
    ResidentChanged,
    ResidentListResult,
    RunRecord,
    RunStartParams,
    RunState,
    StageStatus,
    Tier,
)
from tests.remote_agent.agentd.agents import (
    REPOSITORY,
    Agent,
    Watcher,
    eventually,
    is_running,
    parts_sum_to_wall,
    stage_of,
)
from tests.remote_agent.loader.caches_by_hand import drop_from_cache
from tests.remote_agent.pagecache.cachers import write_checkpoint


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent without GPUs whose preflight and cacher are the real ones."""
    return make_agent(orders={"real": "preflight-child cacher"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def cached(agent: Agent, folder: Path, **recipe: Any) -> RunStartParams:
    params = agent.params(target_tier="cached", devices=("all",), **recipe)
    wanted = dataclasses.replace(params.recipe, model=ModelSource(str(folder)))
    return dataclasses.replace(params, recipe=wanted)


def statuses(run: RunRecord) -> dict[str, StageStatus]:
    return {stage.name: stage.status for stage in run.stages}


def why_gone(client: Watcher) -> str | None:
    def is_it(event: Event) -> bool:
        return isinstance(event.data, ResidentChanged) and event.data.state == "gone"

    data = client.next_event(is_it).data
    assert isinstance(data, ResidentChanged)
    return data.reason


def test_a_run_ends_with_its_shards_in_the_page_cache(agent: Agent, folder: Path) -> None:
    """Cold before, cached after, on no device: the stages of one are skipped, and nothing is left running."""
    for shard in folder.iterdir():
        drop_from_cache(shard)
    with agent.client("") as client:
        run = client.warm(cached(agent, folder))
        assert client.call("resident.list", Empty(), ResidentListResult).residents == ()
        eventually(lambda: not any("worker" in name for name in client.status().processes), "the cacher ends")

    assert (run.state, run.tier_to, run.failure) == (RunState.READY, Tier.CACHED, None), run
    assert (run.devices, run.first_output_ns, run.output) == (("cpu",), None, None)
    done = ("queue", "probe", "preflight", "weights")
    assert {name for name, status in statuses(run).items() if status is StageStatus.SKIPPED} == statuses(
        run
    ).keys() - set(done)
    assert stage_of(run, "init").reason == "not part of cached"
    assert stage_of(run, "weights").extra["stayed_bytes"] == 8000
    assert parts_sum_to_wall(run)


def test_locked_pages_are_held_until_released(agent: Agent, folder: Path) -> None:
    """A process of tier ``cached`` with its bytes; another run of the recipe finds it; released, it ends."""
    with agent.client("") as client:
        first = client.warm(cached(agent, folder, hold=Hold("ops", lock=True)))
        (resident,) = client.status().residents
        again = client.warm(cached(agent, folder, hold=Hold("ops", lock=True)))
        (taken,) = client.status().residents
        released = client.call("resident.release", ReleaseParams(again.run_uid), ReleaseResult).released

    assert (first.state, first.tier_to) == (RunState.READY, Tier.CACHED), first
    assert (resident.tier, resident.bytes, resident.device, resident.owner) == (Tier.CACHED, 8192, "cpu", "ops")
    assert statuses(first)["hold"] is StageStatus.DONE
    assert (again.tier_from, again.tier_to) == (Tier.CACHED, Tier.CACHED)
    assert statuses(again)["weights"] is statuses(again)["hold"] is StageStatus.REUSED
    assert (taken.pid, taken.run_uid) == (resident.pid, again.run_uid)
    assert released == (taken,)
    assert taken.pid is not None
    assert not is_running(taken.pid)


def test_a_lock_ends_when_its_time_is_over(agent: Agent, folder: Path) -> None:
    """``hold.ttl_s`` counts for locked pages as for a warm model."""
    with agent.client("") as client:
        client.warm(cached(agent, folder, hold=Hold(ttl_s=0.2, lock=True)))
        assert why_gone(client) == "its time to live of 0.2 s is over"


def test_a_locked_file_that_is_cut_is_gone_with_the_reason(agent: Agent, folder: Path) -> None:
    """The holder ends, the agent lives on, and the next run fails over nothing but the file itself."""
    with agent.client("") as client:
        client.warm(cached(agent, folder, hold=Hold(lock=True)))
        os.truncate(folder / "a.safetensors", 100)
        reason = why_gone(client)
        run = client.warm(cached(agent, folder))

    assert reason is not None
    assert "a.safetensors: changed since it was checked: size" in reason
    assert run.state is RunState.FAILED


def test_a_locked_file_that_changed_before_it_was_noticed_is_read_again(agent: Agent, folder: Path) -> None:
    """The run that finds other files lets the old lock go and makes its own."""
    with agent.client("") as client:
        before = client.warm(cached(agent, folder, hold=Hold(lock=True)))
        write_checkpoint(folder, 1001)
        run = client.warm(cached(agent, folder, hold=Hold(lock=True)))
        (resident,) = client.status().residents

    assert (before.state, run.state) == (RunState.READY, RunState.READY), run
    assert statuses(run)["hold"] is StageStatus.DONE
    assert resident.run_uid == run.run_uid


def test_a_run_that_uses_no_device_waits_for_none(agent: Agent, folder: Path) -> None:
    """While another run has the only device, the page cache can be filled."""
    with agent.client("") as client:
        slow = agent.params("hang:weights")
        slow = dataclasses.replace(slow, recipe=dataclasses.replace(slow.recipe, model=ModelSource(str(agent.model))))
        agent.order("real", "cacher")
        client.begin(slow)
        client.stage(slow.run_uid, "weights")
        agent.order("real", "preflight-child cacher")
        run = client.warm(cached(agent, folder))

    assert run.state is RunState.READY


def test_registering_where_there_is_no_gpu_is_refused_in_a_line(agent: Agent, folder: Path) -> None:
    """``host`` is a GPU's tier, and what a CPU has in its place is named."""
    params = cached(agent, folder)
    params = dataclasses.replace(
        params, recipe=dataclasses.replace(params.recipe, target_tier="host", devices=("auto",))
    )
    with agent.client("") as client:
        run = client.warm(params)

    assert run.failure is not None
    assert (run.failure.code, run.failure.stage) == ("needs_gpu", "queue")
    assert "cached is what it has" in run.failure.detail


def test_the_host_s_own_verb_tells_the_tier_and_has_nothing_to_release(agent: Agent, folder: Path) -> None:
    """``run --release`` of a run that leaves nothing behind ends well; no output is told where there was none."""
    recipe = agent.orders / "files.json"
    recipe.write_text(json.dumps({"model": {"path": str(folder)}, "target_tier": "cached"}))
    command = [sys.executable, "-m", "remote_agent", "run", str(recipe), "--release", "--state-dir"]
    done = subprocess.run(
        [*command, str(agent.state.root)], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith(" s; cached -> cached")
    assert "first output" not in done.stdout
