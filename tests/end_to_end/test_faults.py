"""Processes of the whole chain killed and stopped: each run ends as promised, nothing is lost, nothing is left over."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.state import LinkStatus, RunView
from remote_agent.protocol.messages import (
    NATIVE_STAGES,
    Failure,
    Finding,
    ResidentChanged,
    RunState,
    StageRecord,
    StageStatus,
    Tier,
)
from tests.console.sshd import until
from tests.end_to_end.chain import NODE, Chain, Watch, eventually, is_running, stored
from tests.end_to_end.consoles import Console
from tests.end_to_end.hosts import is_stopped

pytestmark = [pytest.mark.faults, pytest.mark.ssh, pytest.mark.timeout(240)]

MOMENTS = ("init", "context", "weights", "assign", "compile")
"""Stages of a worker in which something is broken; in the last, a slow recipe stays for seconds."""

MISSED_S = 5.0
"""After so long the fork that was to be cut in two is over, and the zygote is killed idle."""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """One host for all faults: what one test breaks, the next one finds repaired."""
    chain = Chain(tmp_path_factory.mktemp("chain"))
    yield chain
    chain.host.close()


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


def moment(seed: str) -> str:
    """Return the stage in which to break something, the same for the same seed."""
    return random.Random(seed).choice(MOMENTS)


def failure_of(run: RunView) -> Failure:
    assert run.failure is not None, run
    return run.failure


def stage_of(run: RunView, name: str) -> StageRecord:
    return next(stage for stage in run.stages if stage.name == name)


def has_children(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())


async def finish(watch: Watch) -> None:
    """See that the host works: another model is warmed, everything is stored, released, and nothing else runs."""
    after = await watch.warm(watch.chain.recipe("quick", "after"))
    assert (after.state, after.tier_to) == (RunState.READY, Tier.STANDBY), after.failure
    await watch.settled()
    await watch.fleet.release(NODE)
    await watch.settled()
    assert [name for name in (await watch.status()).processes if name.startswith("worker")] == []


# --- connections ---


@pytest.mark.parametrize("process", ["bridge", "sshd"])
async def test_a_killed_connection_leaves_the_run_and_the_warm_model_alone(
    chain: Chain, history: Path, process: str
) -> None:
    """In the middle of a run and at standby: the link comes back, the worker is the same throughout."""
    async with chain.watched(history) as watch:
        recipe = chain.recipe("slow", process)
        run_uid = await watch.begin_until(recipe, moment(process))
        worker = await watch.pid("worker", run_uid)
        await watch.kill(process)
        run = await watch.over(run_uid)
        assert run.state is RunState.READY, run.failure
        await watch.settled()

        await watch.kill(process)
        await eventually(lambda: watch.link is not LinkStatus.CONNECTED, "the loss is seen")
        await watch.connected()
        again = await watch.warm(recipe)
        assert (again.state, again.tier_from, again.output) == (RunState.READY, Tier.STANDBY, run.output)
        assert await watch.pid("worker", again.run_uid) == worker
        await finish(watch)


@pytest.mark.parametrize("process", ["agentd", "sshd"])
async def test_a_stopped_process_is_silence_and_goes_on_where_it_was(chain: Chain, history: Path, process: str) -> None:
    """SIGSTOP in the middle of a run: the link says silent; after SIGCONT the same connection tells the run's end."""
    async with chain.watched(history) as watch:
        run_uid = await watch.begin_until(chain.recipe("slow", f"{process} stopped"), moment(process))
        logins, pid = chain.host.sshd.logins(), await watch.pid(process)
        os.kill(pid, signal.SIGSTOP)
        try:
            await eventually(lambda: is_stopped(pid), f"{process} stops")
            await eventually(lambda: watch.link is LinkStatus.SILENT, "the silence is seen")
            silent = watch.fleet.state(NODE)
        finally:
            os.kill(pid, signal.SIGCONT)
        await watch.connected()
        run = await watch.over(run_uid)

        assert silent.runs[run_uid].state is RunState.RUNNING
        assert not silent.is_known
        assert "no heartbeat" in (silent.link.reason or "")
        assert run.state is RunState.READY, run.failure
        assert (await watch.pid(process), chain.host.sshd.logins()) == (pid, logins)
        await finish(watch)


def test_a_console_killed_in_a_run_is_followed_by_one_that_misses_nothing(chain: Chain, history: Path) -> None:
    """SIGKILL of the whole process: its bridge ends, the run does not, and the next console stores the rest once."""
    places = ("--config", str(chain.config), "--history", str(history))
    killed = Console(*places, "warm", "slow", NODE)
    killed.until_said(f"{moment('console')} done")
    killed.signal(signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    until(lambda: not chain.host.bridges(), "the bridge ends with its console")
    before = len(stored(history, chain.replay()[0])[0])

    async def come_back() -> RunView:
        async with chain.watched(history) as watch:
            run = await watch.over(watch.fleet.history.runs()[0].run_uid)
            await finish(watch)
            return run

    run = asyncio.run(come_back())
    assert run.state is RunState.READY, run.failure
    assert 0 < before < len(stored(history, chain.replay()[0])[0])


# --- processes that no run on a CPU needs ---


async def test_a_killed_sampler_is_told_and_started_again(chain: Chain, history: Path) -> None:
    """In the middle of a run and at standby; neither the run nor the warm model notices."""
    async with chain.watched(history) as watch:
        recipe = chain.recipe("slow", "sampler")
        run_uid = await watch.begin_until(recipe, moment("sampler"))
        killed = {await watch.kill("sampler")}
        run = await watch.over(run_uid)
        assert run.state is RunState.READY, run.failure
        await watch.until_status(lambda status: status.probe is not None and status.probe.sampler == "nvml")
        killed.add(await watch.kill("sampler"))
        await watch.until_status(lambda status: status.processes["sampler"] not in (None, *killed))
        again = await watch.warm(recipe)
        await finish(watch)

        assert (again.state, again.tier_from) == (RunState.READY, Tier.STANDBY)
        told = [event.data for event in chain.events() if isinstance(event.data, Finding)]
        failures = [finding for finding in told if finding.code == "sampler_failed"]
        assert len(failures) == 2
        assert all("SIGKILL" in finding.text for finding in failures)


async def test_a_killed_keeper_is_started_again_by_the_next_run_on_a_gpu(chain: Chain, history: Path) -> None:
    """Runs on the CPU and warm models go on without it; a run that wants a GPU has the devices held again."""
    async with chain.watched(history) as watch:
        recipe = chain.recipe("slow", "keeper")
        run_uid = await watch.begin_until(recipe, moment("keeper"))
        killed = await watch.kill("keeper")
        run = await watch.over(run_uid)
        assert run.state is RunState.READY, run.failure

        on_gpu = await watch.warm(chain.recipe("quick", "keeper", devices=("cuda:0",)))
        assert failure_of(on_gpu).code == "device_error", "the GPU of the stub is not there"
        keeper = await watch.until_status(lambda status: status.processes["keeper"])
        assert keeper != killed
        assert chain.devices_held_by(keeper) == {"nvidiactl", "nvidia0"}
        await watch.kill("keeper")
        again = await watch.warm(recipe)
        assert (again.state, again.tier_from) == (RunState.READY, Tier.STANDBY)
        await finish(watch)


# --- the zygote ---


async def test_a_killed_zygote_leaves_what_it_forked_alone(chain: Chain, history: Path) -> None:
    """In the middle of a run, beside a warm model: both live on, and the next run is forked from another."""
    async with chain.watched(history) as watch:
        held = await watch.warm(chain.recipe("quick", "zygote"))
        run_uid = await watch.begin_until(chain.recipe("slow", "zygote"), moment("zygote"))
        workers = [await watch.pid("worker", uid) for uid in (held.run_uid, run_uid)]
        killed = await watch.kill("zygote")
        run = await watch.over(run_uid)
        assert run.state is RunState.READY, run.failure
        assert [await watch.pid("worker", uid) for uid in (held.run_uid, run_uid)] == workers

        other = await watch.warm(chain.recipe("quick", "another zygote"))
        assert (other.state, stage_of(other, "init").extra["forked"]) == (RunState.READY, True)
        assert await watch.pid("zygote") != killed
        await finish(watch)


# --- workers ---


@pytest.mark.parametrize(
    ("seed", "number"),
    [(1, signal.SIGKILL), (2, signal.SIGSEGV), (3, signal.SIGKILL)],
    ids=["SIGKILL", "SIGSEGV", "SIGKILL again"],
)
async def test_a_worker_killed_at_work_fails_its_run_with_signal_and_stage(
    chain: Chain, history: Path, seed: int, number: signal.Signals
) -> None:
    """The failure's stage is the one that failed, nothing after it was reached, another warm model lives on."""
    async with chain.watched(history) as watch:
        held = await watch.warm(chain.recipe("quick", "bystander"))
        run_uid = await watch.begin_until(chain.recipe("slow", f"worker {seed}"), moment(f"worker {seed}"))
        os.kill(await watch.pid("worker", run_uid), number)
        run = await watch.over(run_uid)

        failure = failure_of(run)
        assert (run.state, failure.code) == (RunState.FAILED, "worker_died")
        stage = failure.stage or ""
        assert all(word in failure.detail for word in ("worker on cpu", number.name, stage)), failure.detail
        # Done, where the worker was between two stages.
        assert stage_of(run, stage).status in (StageStatus.FAILED, StageStatus.DONE)
        later = run.stages[NATIVE_STAGES.index(stage) + 1 :]
        assert {stage.status for stage in later} == {StageStatus.SKIPPED}
        if number is signal.SIGSEGV:
            told = failure.log_tail
            assert told[0].startswith("Fatal Python error: Segmentation fault"), told
            assert told[1].startswith("Current thread "), told
            assert told[2].lstrip().startswith('File "'), told
        assert is_running(await watch.pid("worker", held.run_uid))
        await finish(watch)


async def test_a_standby_that_is_killed_is_gone_and_the_next_run_loads_again(chain: Chain, history: Path) -> None:
    """The resident's end is an event with its reason; nothing is reused of it."""
    async with chain.watched(history) as watch:
        recipe = chain.recipe("quick", "standby")
        held = await watch.warm(recipe)
        killed = await watch.kill("worker", held.run_uid)
        await watch.until_status(lambda status: not status.residents)
        again = await watch.warm(recipe)

        assert (again.state, again.tier_from is Tier.STANDBY) == (RunState.READY, False)
        assert await watch.pid("worker", again.run_uid) != killed
        gone = [event.data for event in chain.events() if event.run_uid == held.run_uid]
        assert isinstance(gone[-1], ResidentChanged)
        assert gone[-1].state == "gone"
        assert "SIGKILL" in (gone[-1].reason or "")
        await finish(watch)


# --- the agent ---


async def test_a_killed_agent_interrupts_its_run_and_ends_what_it_held(chain: Chain, history: Path) -> None:
    """In the middle of a run, beside a warm model: the next agent tells the end of both, once, in the same journal."""
    async with chain.watched(history) as watch:
        held = await watch.warm(chain.recipe("quick", "agent"))
        journal_uuid = watch.fleet.state(NODE).journal_uuid
        run_uid = await watch.begin_until(chain.recipe("slow", "agent"), moment("agent"))
        processes = (await watch.status()).processes
        killed = await watch.kill("agentd")
        survivors = {processes["keeper"]}
        others = [pid for pid in processes.values() if pid and pid not in survivors]
        await eventually(lambda: not any(map(is_running, others)), "all but the keeper end with the agent")
        run = await watch.over(run_uid)

        failure = failure_of(run)
        assert (run.state, failure.code) == (RunState.INTERRUPTED, "interrupted")
        assert failure.stage is None or stage_of(run, failure.stage).status is StageStatus.FAILED
        assert stage_of(run, "hold").status is StageStatus.SKIPPED
        status = await watch.status()
        assert (status.runs, status.residents) == ((), ())
        assert status.processes["agentd"] != killed
        assert watch.fleet.state(NODE).journal_uuid == journal_uuid
        events = chain.events()
        ends = [event.kind for event in events if event.run_uid == run_uid].count("run.finished")
        gone = [event.data for event in events if event.run_uid == held.run_uid and event.kind == "resident"]
        assert ends == 1
        assert [one.state for one in gone if isinstance(one, ResidentChanged)] == ["held", "gone"]
        await finish(watch)


# --- a fork cut in two ---


async def test_a_zygote_killed_in_the_middle_of_a_fork_costs_the_fork_alone(chain: Chain, history: Path) -> None:
    """Its child may have made a worker already that nobody was told of: the run has one worker and becomes ready."""
    async with chain.watched(history) as watch:
        await watch.warm(chain.recipe("quick", "a zygote is there"))
        zygote = await watch.pid("zygote")
        os.kill(zygote, signal.SIGSTOP)
        await eventually(lambda: is_stopped(zygote), "the zygote stops")
        run_uid = await watch.begin_until(chain.recipe("slow", "fork"), "init")
        os.kill(zygote, signal.SIGCONT)
        missed = time.monotonic() + MISSED_S
        while not has_children(zygote) and time.monotonic() < missed:
            pass  # the child between zygote and worker lives for milliseconds
        os.kill(zygote, signal.SIGKILL)
        run = await watch.over(run_uid)

        assert run.state is RunState.READY, run.failure
        init = stage_of(run, "init")
        assert init.extra["forked"] or "SIGKILL" in (init.reason or "")
        await finish(watch)
