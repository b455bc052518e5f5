"""The verbs that talk to the daemon, as commands against an agent with stub children."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from remote_agent.protocol.codec import decode, encode
from remote_agent.protocol.messages import (
    NATIVE_STAGES,
    RunRecord,
    RunResult,
    RunState,
    RunUidParams,
    StatusResult,
)
from tests.remote_agent.agentd.agents import DEADLINE_S, REPOSITORY, Agent, eventually


def verb(agent: Agent, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(agent, *words), cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60
    )


def command(agent: Agent, *words: str) -> list[str]:
    return [sys.executable, "-m", "remote_agent", *words, "--state-dir", str(agent.state.root)]


def recipe_file(agent: Agent, stub: str = "", **change: object) -> str:
    """Write the recipe of a run whose children do what ``stub`` says."""
    path = agent.orders / "tiny.json"
    path.write_text(json.dumps({**encode(agent.params(stub).recipe), **change}))
    return str(path)


def test_run_prints_a_line_for_each_stage_and_exits_0_when_ready(agent: Agent) -> None:
    """A person sees each stage as it ends and the whole at last; the model stays held."""
    done = verb(agent, "run", recipe_file(agent))
    lines = done.stdout.splitlines()

    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[0] for line in lines if line.split()[0] in NATIVE_STAGES) == sorted(NATIVE_STAGES)
    assert lines[-1].startswith("ready in ")
    assert lines[-1].endswith("cold -> standby")
    assert "standby  tiny on cpu" in verb(agent, "status").stdout


def test_run_with_json_prints_the_record_alone(agent: Agent) -> None:
    """A machine gets one document with the wire's own field names; --release leaves nothing held."""
    done = verb(agent, "run", recipe_file(agent), "--json", "--release")
    record = decode(RunRecord, json.loads(done.stdout))
    status = decode(StatusResult, json.loads(verb(agent, "status", "--json").stdout))

    assert done.returncode == 0
    assert record.state is RunState.READY
    assert len(record.stages) == len(NATIVE_STAGES)
    assert status.residents == ()


def test_a_failed_run_exits_1_with_the_failure(agent: Agent) -> None:
    """The reason stands at the end of what is printed, in both forms."""
    shown = verb(agent, "run", recipe_file(agent, "chatty exit:assign"))
    record = decode(RunRecord, json.loads(verb(agent, "run", recipe_file(agent, "exit:assign"), "--json").stdout))

    assert shown.returncode == 1
    assert "assign: worker_died: the worker on cpu exited with code 3 during assign" in shown.stdout
    assert "  | first line" in shown.stdout
    assert record.failure is not None


@pytest.mark.parametrize(
    ("content", "words"),
    [('{"model": {"path": "/m"}, "what": 1}', "what: unknown key"), ("{", "tiny.json:"), (None, "No such file")],
)
def test_a_recipe_that_cannot_be_used_is_a_usage_error(agent: Agent, content: str | None, words: str) -> None:
    """Exit code 2 and the file's problem on stderr, before anything starts."""
    path = agent.orders / "tiny.json"
    if content is not None:
        path.write_text(content)
    done = verb(agent, "run", str(path))

    assert done.returncode == 2
    assert words in done.stderr


def test_a_run_that_is_not_supported_is_a_usage_error(agent: Agent) -> None:
    """What the agent refuses is one line on stderr; exit code 2 where the recipe can never work."""
    done = verb(agent, "run", recipe_file(agent, model={"path": str(agent.model), "adapter": "engine"}))

    assert done.returncode == 2
    assert "adapter engine is not supported yet" in done.stderr


def test_a_relative_model_starts_at_the_folder_of_the_recipe(agent: Agent) -> None:
    """The agent, which runs elsewhere, gets the whole path."""
    done = verb(agent, "run", recipe_file(agent, model={"path": "../model.safetensors"}), "--json")
    journal = b"".join(path.read_bytes() for path in agent.state.journal.iterdir())

    assert done.returncode == 0, done.stderr
    assert f'"{agent.orders}/../model.safetensors"'.encode() in journal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_is_cancelled(agent: Agent, number: signal.Signals) -> None:
    """Control-C, a request to end and a terminal that goes end the run on the host too, and exit 128 and the signal."""
    process = hanging_run(agent, "--json")
    with agent.client("") as client:
        client.stage(client.status().runs[0].run_uid, "weights")
    process.send_signal(number)
    output, errors = process.communicate(timeout=DEADLINE_S)

    record = decode(RunRecord, json.loads(output))
    assert process.returncode == 128 + number
    assert record.state is RunState.CANCELLED
    assert errors == f"{number.name}: cancelling run {record.run_uid}\n"


LOSING = """
import sys
from remote_agent.client import Client
from remote_agent.verbs import run

def notifications(self):
    self._link.recv(3)
    raise run.Ended(15)
    yield

Client.notifications = notifications
sys.exit(run.main(sys.argv[1:]))
"""


def test_a_signal_between_the_bytes_of_a_message_cancels_the_run_too(agent: Agent) -> None:
    """What the connection had begun to read is lost to it, so the run is called off by another one."""
    words = ["--state-dir", str(agent.state.root), str(recipe_file(agent, "hang:weights")), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", LOSING, *words],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip

    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert decode(RunRecord, json.loads(done.stdout)).state is RunState.CANCELLED


def test_a_hangup_that_is_ignored_stays_ignored(agent: Agent) -> None:
    """As nohup wants it: only the second signal ends the run."""
    process = hanging_run(agent, before=("nohup",))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "SIGHUP" not in errors


def test_a_run_outlives_the_reader_of_its_output(agent: Agent) -> None:
    """It says once, on stderr, how the run is cancelled and its model released; the exit code is the run's."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        done = subprocess.run(
            command(agent, "run", recipe_file(agent)),
            cwd=REPOSITORY,
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
    with agent.client() as client:
        held = client.status().residents

    assert done.returncode == 0
    assert len(held) == 1
    assert f"run {held[0].run_uid} goes on" in done.stderr
    assert f"'release --run {held[0].run_uid}' lets its model go" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_says_that_the_host_s_disk_is_full(agent: Agent) -> None:
    """What happens is told once the journal can be written again; until then a line on stderr and `status` say so."""
    process = hanging_run(agent)
    with agent.client("") as client:
        run_uid = client.status().runs[0].run_uid
        client.stage(run_uid, "weights")
        _, hard_bytes = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (1, hard_bytes))
        client.call("run.cancel", RunUidParams(run_uid), RunResult)
        eventually(lambda: select.select([process.stderr], [], [], 0)[0], "the run says something")
        status = verb(agent, "status").stdout
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (hard_bytes, hard_bytes))
    output, errors = process.communicate(timeout=DEADLINE_S)

    assert "error: the journal can't be written: File too large; " in status
    assert errors.startswith("the journal can't be written: File too large; ")
    assert errors.count("\n") == 1
    assert "cancelled after" in output
    assert "error:" not in verb(agent, "status").stdout


def hanging_run(agent: Agent, *words: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a run that hangs in its weights, and return once the agent has it."""
    process = subprocess.Popen(
        [*before, *command(agent, "run", recipe_file(agent, "hang:weights"), *words)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with agent.client("") as client:
        eventually(lambda: client.status().runs, "the run is there")
    return process


def test_a_run_whose_agent_dies_exits_1(agent: Agent) -> None:
    """A lost agent is said, not waited for."""
    process = subprocess.Popen(
        command(agent, "run", recipe_file(agent, "hang:weights")),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with agent.client("") as client:
        eventually(lambda: client.status().runs, "the run is there")
    agent.kill()
    _, errors = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 1
    assert "the agent closed the connection" in errors


def test_release_lets_go_of_what_is_named(agent: Agent) -> None:
    """One run, then everything; an unknown run is exit code 1, naming nothing is 2."""
    verb(agent, "run", recipe_file(agent))
    unknown = verb(agent, "release", "--run", "no-such-run")
    nothing = verb(agent, "release")
    everything = verb(agent, "release", "--all")
    again = verb(agent, "release", "--all", "--json")

    assert (unknown.returncode, nothing.returncode) == (1, 2)
    assert "released tiny on cpu" in everything.stdout
    assert json.loads(again.stdout) == {"released": [], "driver_released": False}


def test_stop_waits_until_the_agent_has_gone(agent: Agent) -> None:
    """It is refused while a model is held; forced it ends the agent; then there is none."""
    verb(agent, "run", recipe_file(agent))
    refused = verb(agent, "stop")
    forced = verb(agent, "stop", "--force")
    again = verb(agent, "stop", "--json")
    status = verb(agent, "status")

    assert refused.returncode == 1
    assert "still here: tiny on cpu" in refused.stderr
    assert (forced.returncode, forced.stdout) == (0, "the agent has ended\n")
    assert json.loads(again.stdout) == {"was_running": False}
    assert status.returncode == 1
    assert "no agent runs" in status.stderr


@pytest.mark.parametrize("name", ["run", "status", "release", "stop", "bridge"])
def test_every_verb_explains_itself(name: str) -> None:
    """--help works without an agent."""
    done = subprocess.run(
        [sys.executable, "-m", "remote_agent", name, "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0
    assert "usage:" in done.stdout
    assert "--state-dir" in done.stdout


def test_the_python_of_a_run_is_the_one_that_was_given(agent: Agent, tmp_path: Path) -> None:
    """Workers and zygotes run on --python; preflight on the agent's own."""
    other = tmp_path / "python-of-the-host"
    other.symlink_to(sys.executable)
    done = verb(agent, "run", recipe_file(agent), "--python", str(other))
    with agent.client() as client:
        pid = client.worker_pid()
        shown = Path(f"/proc/{pid}/cmdline").read_bytes()

    assert done.returncode == 0, done.stdout
    assert shown.startswith(str(other).encode())
