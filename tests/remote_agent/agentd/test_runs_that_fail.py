"""Runs that fail, are refused or get stuck: what is told of them, and that others go on."""

from __future__ import annotations

import dataclasses
import os

import pytest

from remote_agent.errors import RefusedError
from remote_agent.protocol.messages import (
    Finding,
    ModelSource,
    RunResult,
    RunState,
    RunUidParams,
    StageStatus,
)
from tests.remote_agent.agentd.agents import (
    Agent,
    children_of,
    failure_of,
    parts_sum_to_wall,
    stage_of,
)


def test_a_process_that_cannot_be_ended_makes_the_run_stuck(agent: Agent) -> None:
    """When SIGKILL does not end a worker, the run says so with its state, and its device stays taken until it goes."""
    with agent.client("") as client:
        params, other = agent.params("hang:weights"), agent.params()
        client.begin(params)
        client.stage(params.run_uid, "weights")
        agent.order("unkillable", "")
        run = client.call("run.cancel", RunUidParams(params.run_uid), RunResult).run
        client.begin(other)
        client.next_event(lambda e: e.run_uid == other.run_uid and isinstance(e.data, Finding))
        queued = [record.state for record in client.status().runs]
        agent.order("unkillable", None)
        pid = next(pid for pid in children_of(agent.pid) if pid == stage_pid(failure_of(run).detail))
        os.kill(pid, 9)
        after = client.finished(other.run_uid)

    assert run.state is RunState.STUCK
    assert "ignores SIGKILL: state" in failure_of(run).detail
    assert parts_sum_to_wall(run)
    assert queued == [RunState.QUEUED]
    assert after.state is RunState.READY


def stage_pid(detail: str) -> int:
    words = detail.split()
    return int(words[words.index("process") + 1])


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        ("sigkill:weights", "killed (SIGKILL)"),
        ("sigsegv:compile", "killed (SIGSEGV)"),
        ("exit:assign", "exited with code 3"),
        ("sigbus:weights", "(SIGBUS) during weights; the file it had mapped last is /models/cut.safetensors"),
    ],
)
def test_a_worker_that_dies_fails_its_run_with_how_where_and_its_last_words(
    agent: Agent, stub: str, words: str
) -> None:
    """The failure names the signal or exit code and the stage, and carries stderr without control characters."""
    with agent.client("") as client:
        run = client.warm(agent.params(f"chatty {stub}"))

    failure, stage = failure_of(run), stub.split(":")[1]
    assert run.state is RunState.FAILED
    assert failure.code == "worker_died"
    assert words in failure.detail
    assert failure.stage == stage
    assert failure.log_tail == ("first line", " [31mlast  line")
    assert stage_of(run, stage).status is StageStatus.FAILED
    assert stage_of(run, "hold").status is StageStatus.SKIPPED
    assert parts_sum_to_wall(run)


def test_a_stage_that_fails_is_reported_as_the_worker_said_it(agent: Agent) -> None:
    """A failure that the worker reports reaches the record unchanged, and the worker is ended."""
    with agent.client("") as client:
        run = client.warm(agent.params("fail:compile"))
        processes = client.status().processes

    assert run.state is RunState.FAILED
    assert (failure_of(run).code, failure_of(run).stage) == ("stage_failed", "compile")
    assert failure_of(run).detail == "RuntimeError: compile went wrong"
    assert not [name for name in processes if name.startswith("worker")]


@pytest.mark.parametrize("stub", ["garbage:weights", "nonsense:weights"])
def test_a_worker_that_breaks_the_protocol_fails_its_run_alone(agent: Agent, stub: str) -> None:
    """Bytes that are no message, or a stage that is not the worker's, end that run; the next one works."""
    with agent.client("") as client:
        broken = client.warm(agent.params(stub))
        whole = client.warm(agent.params())

    assert broken.state is RunState.FAILED
    assert failure_of(broken).code in ("worker_died", "worker_protocol")
    assert whole.state is RunState.READY


def test_a_refused_checkpoint_fails_the_run_before_the_worker_may_go_on(agent: Agent) -> None:
    """Preflight's one line is the failure; no stage that touches a device was begun."""
    with agent.client("") as client:
        run = client.warm(agent.params("preflight:refuse"))

    assert failure_of(run).code == "checkpoint_refused"
    assert "ends 4 bytes past the file" in failure_of(run).detail
    assert stage_of(run, "preflight").status is StageStatus.FAILED
    assert stage_of(run, "context").status is StageStatus.SKIPPED


def test_a_preflight_that_dies_fails_the_run_with_the_signal(agent: Agent) -> None:
    """A checkpoint that kills its reader is a failed run, not a dead agent."""
    with agent.client("") as client:
        run = client.warm(agent.params("preflight:die"))

    assert failure_of(run).code == "preflight_died"
    assert "SIGSEGV" in failure_of(run).detail


def test_a_stage_over_its_deadline_fails_the_run_with_the_numbers(agent: Agent) -> None:
    """The failure names the stage, how long it ran and its limit."""
    with agent.client("") as client:
        run = client.warm(agent.params("hang:weights", deadlines={"weights": 0.2}))

    assert failure_of(run).code == "deadline"
    assert failure_of(run).stage == "weights"
    assert "its deadline is 0.2 s" in failure_of(run).detail


def test_a_model_larger_than_memory_is_refused_with_the_numbers(agent: Agent) -> None:
    """What is needed and what is free are both named, and the worker never goes on."""
    with agent.client("") as client:
        run = client.warm(agent.params(f"bytes:{10**15}"))

    assert failure_of(run).code == "no_memory"
    assert "needs 1000000.00 GB, free are" in failure_of(run).detail
    assert stage_of(run, "weights").status is StageStatus.SKIPPED


@pytest.mark.parametrize(
    ("change", "word", "code"),
    [
        ({"model": ModelSource("/m", adapter="engine")}, "adapter", "unsupported"),
        ({"model": ModelSource("models/llama")}, "'models/llama' is relative", "bad_path"),
    ],
)
def test_what_cannot_be_done_is_refused(agent: Agent, change: dict[str, object], word: str, code: str) -> None:
    """A recipe that asks for more than this version does, or for a path from nowhere, is refused at once by code."""
    params = agent.params()
    params = dataclasses.replace(params, recipe=dataclasses.replace(params.recipe, **change))  # type: ignore[arg-type]
    with agent.client() as client, pytest.raises(RefusedError, match=word) as refused:
        client.begin(params)

    assert refused.value.code == code


def test_a_python_that_is_not_there_fails_the_run_with_its_name(agent: Agent) -> None:
    """Neither a zygote nor a worker can be started, and the failure says which file is missing."""
    params = dataclasses.replace(agent.params(), python=("/nowhere/python",))
    with agent.client("") as client:
        run = client.warm(params)

    assert failure_of(run).code == "worker_not_started"
    assert "No such file" in failure_of(run).detail


def test_a_variable_that_no_process_can_have_is_refused(agent: Agent) -> None:
    """A NUL in the environment is refused by name, before anything is started."""
    with agent.client("") as client, pytest.raises(RefusedError, match="BAD") as refused:
        client.begin(agent.params(environment={"BAD": "a\0b"}))

    assert refused.value.code == "bad_environment"
