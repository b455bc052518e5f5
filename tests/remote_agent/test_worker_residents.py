"""Workers that leave their weights with a keeper, and workers that find them there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from remote_agent.agentd.paths import StateDir
from remote_agent.devices.cpu import CpuDevice
from remote_agent.keeper.client import KeeperAddress, ask, list_residents
from remote_agent.loader.checkpoint import inspect
from remote_agent.protocol.internal import (
    InternalMessage,
    WorkerFailed,
    WorkerFinding,
    WorkerGo,
    WorkerJob,
    WorkerLostResident,
    WorkerMap,
    WorkerMapped,
    WorkerReady,
    WorkerUnmap,
    WorkerUnmapped,
)
from remote_agent.protocol.messages import FirstRequest, Recipe, StageStatus, Tier
from remote_agent.resident.names import resident_name
from tests.remote_agent import checkpoints
from tests.remote_agent.keeper.keepers import at_rest
from tests.remote_agent.pipeline.models import recipe_for
from tests.remote_agent.resident.residents import keeping_for, load_shared
from tests.remote_agent.worker_ends import Zygote, do_job, only, running_zygote, stages_over


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """One zygote for all tests here."""
    with running_zygote(tmp_path_factory.mktemp("zygote") / "log") as running:
        yield running


def go_for(folder: Path, is_resident: bool = False) -> WorkerGo:
    shards = inspect(folder).identities
    return WorkerGo(shards, resident_name(str(folder), shards, "cpu"), is_resident)


def recipe_of(folder: Path, tier: str = "resident") -> Recipe:
    return recipe_for(folder, target_tier=tier, request=FirstRequest(prompt_tokens=8, max_new_tokens=4))


def run(zygote: Zygote, state: StateDir, folder: Path, go: WorkerGo, tier: str = "resident") -> list[InternalMessage]:
    """Do one job in a worker of its own, which ends then, and return what it said."""
    recipe = recipe_of(folder, tier)
    job = WorkerJob("run-00000001", recipe, "cpu", time.monotonic_ns(), str(state.cache), None, str(state.root), "ann")
    with zygote.worker(state.root / "log") as worker:
        messages = do_job(worker.end, job, go)
        assert worker.release() == 0
    return messages


def names_at(state: StateDir) -> list[str]:
    return [one.name for one in list_residents(KeeperAddress(state))]


def test_weights_are_left_with_the_keeper_and_found_by_the_next_worker(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path
) -> None:
    """The second maps what the first loaded, moves no byte of it, and answers the same."""
    before = at_rest(keeper)
    first = run(zygote, state, llama, go_for(llama))
    ready = only(first, WorkerReady)
    assert (ready.tier, ready.resident) == (Tier.RESIDENT, go_for(llama).resident)
    assert names_at(state) == [ready.resident]
    assert stages_over(first)["hold"].extra["holder"] == "keeper"
    second = run(zygote, state, llama, go_for(llama, is_resident=True))

    weights = stages_over(second)["weights"]
    assert (weights.status, weights.path, weights.bytes) == (StageStatus.REUSED, "attached", None)
    assert weights.extra["attached_bytes"] == stages_over(first)["weights"].bytes
    assert {"fetch_ns", "map_ns", "views_ns", "verify_ns"} <= weights.extra.keys()
    assert only(second, WorkerReady) == replace(
        ready, first_output_mono_ns=only(second, WorkerReady).first_output_mono_ns
    )
    assert at_rest(keeper) == before + 2
    assert list_residents(KeeperAddress(state))[0].attached == ()


def test_a_standby_on_a_cpu_finds_a_resident_and_makes_none(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path
) -> None:
    """Its own tensors are views of the files, so it has nothing to leave; what is there it uses."""
    first = run(zygote, state, llama, go_for(llama), "standby")
    assert names_at(state) == []
    assert (only(first, WorkerReady).tier, only(first, WorkerReady).resident) == (Tier.STANDBY, None)
    run(zygote, state, llama, go_for(llama))
    again = run(zygote, state, llama, go_for(llama, is_resident=True), "standby")

    assert stages_over(again)["weights"].path == "attached"
    assert (only(again, WorkerReady).tier, only(again, WorkerReady).resident) == (Tier.STANDBY, go_for(llama).resident)


def test_a_resident_whose_bytes_are_others_is_lost_and_loaded_again(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path
) -> None:
    """Dropped, said so, and replaced by what was loaded; the run is ready as if nothing had been there."""
    expected = only(run(zygote, state, llama, go_for(llama), "standby"), WorkerReady).output
    keepable = load_shared(llama, CpuDevice())
    keeping_for(state, llama).keep(replace(keepable, checksum="00" * 16))
    messages = run(zygote, state, llama, go_for(llama, is_resident=True))

    lost = only(messages, WorkerLostResident)
    finding = only(messages, WorkerFinding).finding
    assert (finding.code, lost.resident) == ("resident_lost", go_for(llama).resident)
    assert lost.reason == finding.text
    assert finding.text.startswith("lost: reload: ")
    assert "checksum" in finding.text
    assert stages_over(messages)["weights"].status is StageStatus.DONE
    assert (only(messages, WorkerReady).tier, only(messages, WorkerReady).output) == (Tier.RESIDENT, expected)
    assert names_at(state) == [go_for(llama).resident]
    assert stages_over(run(zygote, state, llama, go_for(llama, is_resident=True)))["weights"].path == "attached"


def test_a_resident_that_has_gone_meanwhile_is_loaded(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path
) -> None:
    """What was listed when preflight looked may be released by now."""
    messages = run(zygote, state, llama, go_for(llama, is_resident=True))

    assert "no resident" in only(messages, WorkerFinding).finding.text
    assert stages_over(messages)["weights"].status is StageStatus.DONE
    assert only(messages, WorkerReady).tier is Tier.RESIDENT


def test_without_a_keeper_the_worker_holds_and_says_why(zygote: Zygote, state: StateDir, llama: Path) -> None:
    """The run is ready, as a standby, with a named reason in its stage and as a finding."""
    messages = run(zygote, state, llama, go_for(llama))

    ready, hold = only(messages, WorkerReady), stages_over(messages)["hold"]
    assert (ready.tier, ready.resident, hold.extra["holder"]) == (Tier.STANDBY, None, "worker")
    assert hold.reason is not None
    assert hold.reason.startswith("standby: the weights do not outlive this process: no keeper listens at ")
    assert only(messages, WorkerFinding).finding.code == "not_kept"


def test_a_standby_unmaps_its_weights_and_answers_from_them_again(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path
) -> None:
    """In between nothing of them is mapped; the same answer afterwards. Once they are released, it says so."""
    expected = only(run(zygote, state, llama, go_for(llama)), WorkerReady).output
    recipe, go = recipe_of(llama, "standby"), go_for(llama, is_resident=True)
    job = WorkerJob("run-00000001", recipe, "cpu", time.monotonic_ns(), str(state.cache), None, str(state.root), "ann")
    with zygote.worker(state.root / "log") as worker:

        def ask_worker(message: InternalMessage, *answers: type) -> InternalMessage:
            worker.end.send(message)
            return worker.end.receive_until(*answers)[-1]

        def maps_weights() -> bool:
            return "memfd:glowplug-weights" in Path(f"/proc/{worker.pid}/maps").read_text()

        do_job(worker.end, job, go)
        assert maps_weights()
        away = ask_worker(WorkerUnmap(1 << 40), WorkerUnmapped)
        assert isinstance(away, WorkerUnmapped)
        assert (away.problem, maps_weights()) == (None, False)
        assert isinstance(ask_worker(WorkerMap(), WorkerMapped), WorkerMapped)
        again = do_job(worker.end, replace(job, run_uid="run-00000002"), go)
        assert only(again, WorkerReady).output == expected
        ask_worker(WorkerUnmap(1 << 40), WorkerUnmapped)
        ask(KeeperAddress(state), f"drop {go.resident}")
        lost = ask_worker(WorkerMap(), WorkerFailed)
        assert isinstance(lost, WorkerFailed)
        assert "no resident" in lost.failure.detail
        assert worker.release() == 0
