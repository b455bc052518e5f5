"""After an error of a GPU what lies in its memory is dropped, with the reason; an application's own costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.agentd.gpu_errors import GpuErrors
from remote_agent.keeper.client import KeeperAddress, lease, list_residents
from remote_agent.protocol.internal import GpuXid, SamplerReport
from remote_agent.protocol.messages import (
    Event,
    Finding,
    Gpu,
    ResidentChanged,
    RunRecord,
    RunResult,
    RunState,
    RunUidParams,
    Tier,
)
from tests.remote_agent.agentd.agents import Agent, Watcher, eventually, failure_of, is_running
from tests.remote_agent.agentd.stub_children import UUIDS

BOOT = "boot-1"


class Judge(GpuErrors):
    """Remembers what it found."""

    def __init__(self, folder: Path, boot_id: str = BOOT) -> None:
        self.findings: list[Finding] = []
        self.damage: list[tuple[str, str]] = []
        told = self.findings.append
        super().__init__(folder / "errors.json", boot_id, told, lambda *damage: self.damage.append(damage))


def report(*xids: GpuXid, **uncorrected: int | None) -> SamplerReport:
    gpus = tuple(Gpu(uuid, index, "H200", ecc_uncorrected=n) for index, (uuid, n) in enumerate(uncorrected.items()))
    return SamplerReport("nvml", 1, gpus=gpus, xids=xids)


@pytest.mark.parametrize("xid", [48, 63, 79, 95, 9999])
def test_an_xid_of_the_hardware_s_costs_what_lies_there(tmp_path: Path, xid: int) -> None:
    """Also one that nobody knows yet: weights that may be wrong are worse than a load."""
    judge = Judge(tmp_path)
    judge.take_in(report(GpuXid("GPU-a", xid)))
    ((uuid, reason),) = judge.damage

    assert uuid == "GPU-a"
    assert reason.startswith(f"lost: Xid {xid}")
    assert reason.endswith("on GPU-a: reload")
    assert [(one.code, one.severity) for one in judge.findings] == [("gpu_error", "error")]


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
def test_an_application_s_xid_is_said_and_costs_nothing(tmp_path: Path, xid: int) -> None:
    """It ends the process that made it; a fault in somebody's kernel must not empty a fleet."""
    judge = Judge(tmp_path)
    judge.take_in(report(GpuXid("GPU-a", xid)))

    assert judge.damage == []
    assert [(one.code, one.severity) for one in judge.findings] == [("gpu_xid", "warning")]


def test_only_new_uncorrectable_errors_count(tmp_path: Path) -> None:
    """What a GPU had before it was first looked at happened to nobody's weights; one that tells nothing has none."""
    judge = Judge(tmp_path)
    for counts in ({"a": 3, "b": None}, {"a": 3, "b": 5}, {"a": 4, "b": None}, {"a": 4, "b": 5}):
        judge.take_in(report(**counts))

    assert judge.damage == [("a", "lost: 1 uncorrectable ECC error on a: reload")]


def test_errors_while_no_agent_ran_are_seen_by_the_next(tmp_path: Path) -> None:
    """The keeper held weights meanwhile. After a boot it did not, and a driver that starts counts from zero."""
    Judge(tmp_path).take_in(report(a=1))
    second, after_boot = Judge(tmp_path), Judge(tmp_path, "boot-2")
    second.take_in(report(a=3))
    after_boot.take_in(report(a=9))
    Judge(tmp_path).take_in(report(a=0))
    again = Judge(tmp_path)
    again.take_in(report(a=1))

    assert second.damage == [("a", "lost: 2 uncorrectable ECC errors on a: reload")]
    assert after_boot.damage == []
    assert again.damage == [("a", "lost: 1 uncorrectable ECC error on a: reload")]


@pytest.mark.parametrize("content", ["", "[]", '{"boot_id": "boot-1", "uncorrected": {"a": "x"}}'])
def test_a_file_that_makes_no_sense_is_none(tmp_path: Path, content: str) -> None:
    """It is written anew."""
    (tmp_path / "errors.json").write_text(content)
    judge = Judge(tmp_path)
    judge.take_in(report(a=1))
    judge.take_in(report(a=2))

    assert len(judge.damage) == 1


def gone(client: Watcher) -> ResidentChanged:
    def is_it(event: Event) -> bool:
        return isinstance(event.data, ResidentChanged) and event.data.state == "gone"

    data = client.next_event(is_it).data
    assert isinstance(data, ResidentChanged)
    return data


def ended(client: Watcher, run_uid: str) -> RunRecord | None:
    run = client.call("run.get", RunUidParams(run_uid), RunResult).run
    return run if run.state.is_terminal else None


def test_residents_and_standbys_of_that_gpu_are_lost_and_others_stay(make_agent: Callable[..., Agent]) -> None:
    """Attached or not: the keeper lets go, the standby ends, a run that is on it fails, and each says why."""
    agent = make_agent(orders={"sampler": "ok 1000"})
    with agent.client("") as client:
        eventually(lambda: client.status().probe.gpus, "the sampler reports")  # type: ignore[union-attr]
        resident = agent.params(devices=("cuda:0",), target_tier="resident")
        agent.model = agent.model.with_name("other.safetensors")
        agent.model.write_bytes(b"other")
        standby, other = agent.params("standby", ("cuda:0",)), agent.params("other", ("cpu",))
        for params in (resident, standby, other):
            assert client.warm(params).state is RunState.READY
        (kept,) = (one for one in client.status().residents if one.tier is Tier.RESIDENT)
        worker = next(one.pid for one in client.status().residents if one.run_uid == standby.run_uid)
        loading = agent.params("hang:weights", ("cuda:0",))
        client.begin(loading)
        client.stage(loading.run_uid, "weights")
        link, reply = lease(KeeperAddress(agent.state), kept.name or "")
        agent.order("sampler", "ok 1000 2")
        lost = [gone(client), gone(client)]
        failed = eventually(lambda: ended(client, loading.run_uid), "the run that is there fails")
        left = client.status().residents
        reply.close()
        link.close()

    reason = f"lost: 2 uncorrectable ECC errors on {UUIDS[0]}: reload"
    assert {(one.resident.run_uid, one.reason) for one in lost} == {
        (resident.run_uid, reason),
        (standby.run_uid, reason),
    }
    assert [one.run_uid for one in left] == [other.run_uid]
    assert list_residents(KeeperAddress(agent.state)) == ()
    assert worker is not None
    assert not is_running(worker)
    assert (failed.state, failure_of(failed).code, failure_of(failed).detail) == (RunState.FAILED, "gpu_error", reason)
