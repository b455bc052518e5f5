"""Workers armed for a model: everything but the weights is made, and a run that brings those answers as any other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remote_agent.agentd.paths import StateDir
from remote_agent.devices.cpu import CpuDevice
from remote_agent.keeper.client import KeeperAddress, ask, list_residents
from remote_agent.loader.checkpoint import inspect
from remote_agent.protocol.internal import (
    InternalMessage,
    WorkerFinding,
    WorkerGo,
    WorkerJob,
    WorkerLostResident,
    WorkerReady,
)
from remote_agent.protocol.messages import FirstRequest, Recipe, StageStatus, Tier
from remote_agent.resident.names import resident_name
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import recipe_for
from tests.remote_agent.resident.residents import keeping_for, load_shared, make_resident
from tests.remote_agent.worker_ends import Forked, Zygote, do_job, only, running_zygote, stages_over

REQUEST = FirstRequest(prompt_tokens=8)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """One zygote for all tests here."""
    with running_zygote(tmp_path_factory.mktemp("zygote") / "log") as running:
        yield running


def recipe_of(folder: Path, request: FirstRequest = REQUEST, **fields: Any) -> Recipe:
    return recipe_for(folder, target_tier="standby", request=request, **fields)


def go_for(folder: Path, is_resident: bool = False) -> WorkerGo:
    shards = inspect(folder).identities
    return WorkerGo(shards, resident_name(str(folder), shards, "cpu"), is_resident)


Act = Callable[..., list[InternalMessage]]


@contextmanager
def armed(zygote: Zygote, state: StateDir, recipe: Recipe, go: WorkerGo) -> Iterator[tuple[Act, list[InternalMessage]]]:
    """Return what gives a worker further jobs, and what it said while it was armed."""

    def do(wanted: Recipe, go: WorkerGo, arm: bool = False) -> list[InternalMessage]:
        job = WorkerJob("run-00000001", wanted, "cpu", time.monotonic_ns(), str(state.cache), None, str(state.root))
        return do_job(worker.end, replace(job, owner="ann", arm=arm), go)

    worker: Forked
    with zygote.worker(state.root / "log") as worker:
        said = do(recipe, go, arm=True)
        assert only(said, WorkerReady), said
        yield do, said
        assert worker.release() == 0


def plain_answer(zygote: Zygote, state: StateDir, recipe: Recipe) -> str:
    """Return what an ordinary worker answers."""
    folder = Path(recipe.model.path)
    job = WorkerJob("run-00000002", recipe, "cpu", time.monotonic_ns(), str(state.cache), None, str(state.root), "ann")
    with zygote.worker(state.root / "log") as worker:
        return only(do_job(worker.end, job, go_for(folder)), WorkerReady).output


def findings(messages: list[InternalMessage]) -> dict[str, str]:
    return {one.finding.code: one.finding.text for one in messages if isinstance(one, WorkerFinding)}


def test_an_armed_worker_has_read_no_weights(zygote: Zygote, keeper: int, state: StateDir, llama: Path) -> None:
    """It says what it reserved and what that takes, asks the model nothing, and gives the keeper nothing."""
    with armed(zygote, state, recipe_of(llama), go_for(llama)) as (_, said):
        stages, ready = stages_over(said), only(said, WorkerReady)

    assert list(stages) == ["init", "context", "assign", "compile", "hold"]
    assert (ready.tier, ready.output, ready.first_output_mono_ns, ready.resident) == (Tier.ARMED, "", None, None)
    assert 0 < ready.bytes == stages["hold"].bytes == stages["assign"].extra["stand_in_bytes"]
    assert stages["assign"].extra["reserved_bytes"] >= inspect(llama).bytes
    assert stages["compile"].extra["graph"] == "none: cpu has no graphs"
    assert list_residents(KeeperAddress(state)) == ()


def test_resident_weights_are_mapped_under_an_armed_worker(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path
) -> None:
    """Nothing but the first request is done anew, and it is answered as by an ordinary run; so is the next one."""
    expected = plain_answer(zygote, state, recipe_of(llama))
    with armed(zygote, state, recipe_of(llama), go_for(llama)) as (do, _):
        make_resident(state, llama)
        first = do(recipe_of(llama), go_for(llama, is_resident=True))
        second = do(recipe_of(llama), go_for(llama, is_resident=True))

    stages, ready = stages_over(first), only(first, WorkerReady)
    assert {name: stage.status for name, stage in stages.items() if stage.status is not StageStatus.REUSED} == {
        "first_request": StageStatus.DONE,
        "hold": StageStatus.DONE,
    }
    assert (stages["weights"].path, stages["weights"].bytes) == ("attached", None)
    assert {"fetch_ns", "import_ns", "unmap_ns", "map_ns", "verify_ns"} <= stages["weights"].extra.keys()
    assert stages["assign"].reason == "the armed process has it"
    assert (ready.tier, ready.output, ready.resident) == (Tier.STANDBY, expected, go_for(llama).resident)
    assert findings(first) == {}
    assert stages_over(second)["weights"].reason == "the standby has it"
    assert only(second, WorkerReady).output == expected


def test_weights_that_are_not_resident_are_loaded_and_mapped(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path
) -> None:
    """They go into memory of their own, under the armed module, and to the keeper: another process can attach."""
    expected = plain_answer(zygote, state, recipe_of(llama))
    with armed(zygote, state, recipe_of(llama), go_for(llama)) as (do, _):
        said = do(recipe_of(llama), go_for(llama))
        names = [one.name for one in list_residents(KeeperAddress(state))]

    stages = stages_over(said)
    assert (stages["weights"].status, stages["assign"].status) == (StageStatus.DONE, StageStatus.REUSED)
    assert stages["weights"].bytes == inspect(llama).bytes
    assert (only(said, WorkerReady).output, names) == (expected, [go_for(llama).resident])


@pytest.mark.parametrize(
    "request_",
    [FirstRequest(prompt_tokens=21), FirstRequest(prompt_tokens=8, batch=3), FirstRequest(max_new_tokens=5)],
    ids=["another length", "a batch", "a longer answer"],
)
def test_another_request_than_was_armed_is_answered_right(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path, request_: FirstRequest
) -> None:
    """What is armed for a model serves any request of it, eagerly where the shapes are others."""
    request_ = replace(request_, prompt_tokens=min(request_.prompt_tokens, 21))
    expected = plain_answer(zygote, state, recipe_of(llama, request_))
    make_resident(state, llama)
    with armed(zygote, state, recipe_of(llama), go_for(llama)) as (do, _):
        said = do(recipe_of(llama, request_), go_for(llama, is_resident=True))

    assert only(said, WorkerReady).output == expected
    assert stages_over(said)["assign"].status is StageStatus.REUSED
    assert stages_over(said)["first_request"].extra["replayed"] is False


def test_a_resident_released_meanwhile_is_loaded(zygote: Zygote, keeper: int, state: StateDir, llama: Path) -> None:
    """What was listed when preflight looked may be gone: named, and loaded under the armed module all the same."""
    expected = plain_answer(zygote, state, recipe_of(llama))
    with armed(zygote, state, recipe_of(llama), go_for(llama)) as (do, _):
        name = make_resident(state, llama)
        ask(KeeperAddress(state), f"drop {name}")
        said = do(recipe_of(llama), go_for(llama, is_resident=True))

    assert "no resident" in findings(said)["resident_lost"]
    assert only(said, WorkerReady).output == expected
    assert stages_over(said)["assign"].status is StageStatus.REUSED


def test_a_resident_whose_bytes_are_others_is_not_used(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path
) -> None:
    """The stand-in comes back, the resident is dropped, and what was loaded is mapped in its place."""
    expected = plain_answer(zygote, state, recipe_of(llama))
    keeping_for(state, llama).keep(replace(load_shared(llama, CpuDevice()), checksum="00" * 16))
    with armed(zygote, state, recipe_of(llama), go_for(llama)) as (do, _):
        said = do(recipe_of(llama), go_for(llama, is_resident=True))

    assert "checksum" in only(said, WorkerLostResident).reason
    assert only(said, WorkerReady).output == expected
    assert stages_over(said)["assign"].status is StageStatus.REUSED


def test_a_resident_laid_out_otherwise_is_attached_as_ever(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path
) -> None:
    """Another version may place tensors elsewhere: named, and the module is built anew around the resident."""
    expected = plain_answer(zygote, state, recipe_of(llama))
    keepable = load_shared(llama, CpuDevice())
    keeping_for(state, llama).keep(replace(keepable, entries=tuple(reversed(keepable.entries))))
    with armed(zygote, state, recipe_of(llama), go_for(llama)) as (do, _):
        said = do(recipe_of(llama), go_for(llama, is_resident=True))

    stages = stages_over(said)
    assert "is laid out otherwise" in findings(said)["armed_not_used"]
    assert "is laid out otherwise" in (stages["weights"].reason or "")
    assert (stages["weights"].path, stages["assign"].status) == ("attached", StageStatus.DONE)
    assert only(said, WorkerReady).output == expected


def test_changed_files_are_not_taken_for_what_was_armed(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path, tmp_path: Path
) -> None:
    """The worker compares for itself what the agent has compared: it says so and loads the new files."""
    folder = checkpoints.write_llama(tmp_path / "llama")
    with armed(zygote, state, recipe_of(folder), go_for(folder)) as (do, _):
        os.utime(next(folder.glob("*.safetensors")))
        said = do(recipe_of(folder), go_for(folder))

    assert "checkpoint's files changed" in findings(said)["standby_replaced"]
    assert stages_over(said)["assign"].status is StageStatus.DONE
    assert only(said, WorkerReady).tier is Tier.STANDBY


def test_a_model_whose_tensors_are_converted_becomes_an_ordinary_standby(
    zygote: Zygote, keeper: int, state: StateDir, llama: Path
) -> None:
    """A dtype that the file does not have needs a copy of the weights: named, and the weights are loaded at once."""
    recipe = recipe_of(llama, dtype="bfloat16")
    expected = plain_answer(zygote, state, recipe)
    with armed(zygote, state, recipe, go_for(llama)) as (do, said):
        again = do(recipe, go_for(llama))

    stages, ready = stages_over(said), only(said, WorkerReady)
    assert "can't be used where a load puts them" in findings(said)["not_armed"]
    assert stages["assign"].reason is not None
    assert stages["assign"].reason.startswith("not armed: ")
    assert stages["weights"].bytes == inspect(llama).bytes
    assert (ready.tier, ready.output) == (Tier.STANDBY, expected)
    assert only(again, WorkerReady).output == expected


def test_arming_again_changes_nothing(zygote: Zygote, keeper: int, state: StateDir, llama: Path) -> None:
    """What waits already is told again; what has its weights by now answers as the standby it is."""
    with armed(zygote, state, recipe_of(llama), go_for(llama)) as (do, _):
        again = do(recipe_of(llama), go_for(llama), arm=True)
        make_resident(state, llama)
        ready = only(do(recipe_of(llama), go_for(llama, is_resident=True)), WorkerReady)
        later = do(recipe_of(llama), go_for(llama, is_resident=True), arm=True)

    assert only(again, WorkerReady).tier is Tier.ARMED
    assert stages_over(again)["assign"].status is StageStatus.REUSED
    assert (only(later, WorkerReady).tier, only(later, WorkerReady).output) == (Tier.STANDBY, ready.output)
