"""A worker does its jobs, keeps its model, and dies when it must."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from remote_agent import caches
from remote_agent.protocol.internal import (
    ShardIdentity,
    WorkerFailed,
    WorkerFinding,
    WorkerGo,
    WorkerPrepare,
    WorkerPrepared,
    WorkerReady,
    WorkerRelease,
    WorkerStage,
)
from remote_agent.protocol.messages import FirstRequest, StageStatus, Tier
from remote_agent.worker import use_job_cache
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import load_with_transformers, recipe_for
from tests.remote_agent.worker_ends import (
    Zygote,
    child,
    do_job,
    job_for,
    only,
    process_state,
    python_child,
    running_zygote,
    stages_over,
    wait_for,
)

WORKER_STAGES = ["init", "context", "weights", "assign", "compile", "first_request", "hold"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """One zygote for all tests here: its imports take seconds, its forks milliseconds."""
    with running_zygote(tmp_path_factory.mktemp("zygote") / "log") as running:
        yield running


def identities(folder: Path) -> tuple[ShardIdentity, ...]:
    """Return what preflight would say the shards are."""
    from remote_agent.loader.checkpoint import inspect

    return inspect(folder).identities


def test_a_fresh_worker_goes_through_every_stage_and_reuses_what_it_has(llama: Path, tmp_path: Path) -> None:
    """The second job of the same recipe makes nothing again but a real request; then it lets go when told."""
    recipe = recipe_for(llama, request=FirstRequest(prompt_tokens=8, max_new_tokens=4))
    go = WorkerGo(identities(llama))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with child("worker", tmp_path / "log", TMPDIR=str(temporary)) as (process, end):
        job = job_for(recipe, tmp_path, "no zygote here")
        first = do_job(end, job, go)
        second = do_job(end, job_for(recipe, tmp_path), go)
        end.send(WorkerRelease())

        assert end.receive() is None
        assert process.wait(30) == 0
    assert list(temporary.iterdir()) == []
    over = stages_over(first)
    assert list(over) == WORKER_STAGES
    assert {stage.status for stage in over.values()} == {StageStatus.DONE}
    assert over["init"].start_mono_ns == job.init_mono_ns
    assert over["init"].reason == "spawned fresh: no zygote here"
    assert over["weights"].bytes == sum(tensor.nbytes for tensor in checkpoints.read_tensors(llama).values())
    assert over["weights"].path == "mapped"
    again = stages_over(second)
    assert [again[stage].status for stage in WORKER_STAGES] == [StageStatus.REUSED] * 5 + [StageStatus.DONE] * 2
    expected = load_with_transformers(llama).generate(torch.arange(8)[None], max_new_tokens=4, do_sample=False)
    text = " ".join(str(token) for token in expected[0, 8:].tolist())
    for messages in (first, second):
        ready = only(messages, WorkerReady)
        assert (ready.output, ready.tier) == (text, Tier.STANDBY)
        assert ready.bytes > 0
        spans = stages_over(messages)
        request = spans["first_request"]
        assert request.end_mono_ns is not None
        assert request.start_mono_ns < ready.first_output_mono_ns <= request.end_mono_ns
        assert request.start_mono_ns >= (spans["compile"].end_mono_ns or 0) > 0


def test_a_spare_has_done_init_before_its_job_and_says_so(zygote: Zygote, llama: Path, tmp_path: Path) -> None:
    """Of ``init`` the run pays what it waits; what was printed before the job is not in the run's log."""
    spare_log, log = tmp_path / "spare-log", tmp_path / "log"
    with zygote.worker(spare_log) as worker:
        worker.end.send(WorkerPrepare("cpu", str(llama)))
        prepared = worker.end.receive()
        with log.open("ab") as file:
            job = job_for(recipe_for(loud(llama, tmp_path), trust_remote_code=True), tmp_path)
            messages = do_job(worker.end, job, log=file.fileno())
        again = do_job(worker.end, job_for(recipe_for(llama), tmp_path))

    init = stages_over(messages)["init"]
    assert prepared == WorkerPrepared()
    assert (init.status, init.start_mono_ns) == (StageStatus.REUSED, job.init_mono_ns)
    assert init.reason == "done by a spare worker before the run"
    assert init.extra["beforehand_ns"] > init.extra["driver_ns"] > 0
    assert init.extra["forked"] is True
    assert stages_over(messages)["context"].status is StageStatus.DONE
    assert only(messages, WorkerReady).output
    assert b"to stderr" in log.read_bytes()
    assert spare_log.read_bytes() == b""
    assert stages_over(again)["init"].reason == "the standby has it"


def test_a_job_that_comes_while_a_spare_is_made_ready_pays_for_the_rest(
    zygote: Zygote, llama: Path, tmp_path: Path
) -> None:
    """Nothing was done before this one was asked for, so that ``init`` is its own."""
    with zygote.worker(tmp_path / "log") as worker:
        job = job_for(recipe_for(llama), tmp_path)
        worker.end.send(WorkerPrepare("cpu", str(llama)))
        prepared, *messages = do_job(worker.end, job)

    init = stages_over(messages)["init"]
    assert prepared == WorkerPrepared()
    assert (init.status, init.reason) == (StageStatus.DONE, "begun by a spare worker")
    assert init.extra["beforehand_ns"] == 0
    assert only(messages, WorkerReady).output


def test_a_spare_that_can_not_be_made_ready_says_why_and_starts_from_nothing(
    zygote: Zygote, llama: Path, tmp_path: Path
) -> None:
    """A job that it gets all the same is as in a worker just forked."""
    with zygote.worker(tmp_path / "log") as worker:
        worker.end.send(WorkerPrepare("quantum:0", str(llama)))
        prepared = worker.end.receive()
        messages = do_job(worker.end, job_for(recipe_for(llama), tmp_path))

    assert isinstance(prepared, WorkerPrepared)
    assert "quantum:0" in (prepared.problem or "")
    assert (stages_over(messages)["init"].status, stages_over(messages)["init"].reason) == (StageStatus.DONE, None)
    assert only(messages, WorkerReady).output


def test_a_job_that_compiles_nothing_has_its_cache_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path
) -> None:
    """A model may compile parts of itself; a cache that can't be used is left to the compile stage to tell."""
    for name in caches.VARIABLES:
        monkeypatch.setenv(name, "/elsewhere")

    use_job_cache(job_for(recipe_for(llama), tmp_path / "cache"))
    assert {name: os.environ[name] for name in caches.VARIABLES} == {
        name: str(tmp_path / "cache" / folder) for name, folder in caches.VARIABLES.items()
    }
    use_job_cache(job_for(recipe_for(llama), Path("/proc/none")))
    assert {os.environ[name] for name in caches.VARIABLES} == set(caches.NOWHERE.values())


def test_changed_shards_or_another_recipe_are_loaded_again(zygote: Zygote, tmp_path: Path) -> None:
    """A standby never answers for files that it did not read; a process that is ready is kept all the same."""
    folder = checkpoints.write_llama(tmp_path / "model")
    recipe = recipe_for(folder)
    with zygote.worker(tmp_path / "log") as worker:
        before = do_job(worker.end, job_for(recipe, tmp_path), WorkerGo(identities(folder)))
        other = checkpoints.write_llama(tmp_path / "other", initializer_range=0.3)
        for shard in other.glob("*.safetensors"):
            shard.replace(folder / shard.name)
        after = do_job(worker.end, job_for(recipe, tmp_path), WorkerGo(identities(folder)))
        longer = recipe_for(folder, request=FirstRequest(prompt_tokens=9))
        changed = do_job(worker.end, job_for(longer, tmp_path), WorkerGo(identities(folder)))

    assert only(before, WorkerReady).output != only(after, WorkerReady).output
    over = stages_over(after)
    assert [over[stage].status for stage in ("init", "context")] == [StageStatus.REUSED] * 2
    assert [over[stage].status for stage in ("weights", "assign", "compile")] == [StageStatus.DONE] * 3
    assert "files changed" in only(after, WorkerFinding).finding.text
    assert stages_over(changed)["weights"].status is StageStatus.DONE
    assert "recipe changed" in only(changed, WorkerFinding).finding.text


def test_a_shard_changed_after_preflight_fails_the_run(zygote: Zygote, tmp_path: Path) -> None:
    """The failure names the stage and the file, and the worker leaves cleanly."""
    folder = checkpoints.write_llama(tmp_path / "model")
    go = WorkerGo(identities(folder))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes())
    with zygote.worker(tmp_path / "log") as worker:
        messages = do_job(worker.end, job_for(recipe_for(folder), tmp_path), go)

        assert worker.end.receive() is None
        assert worker.wait() == 0
    failure = only(messages, WorkerFailed).failure
    assert (failure.code, failure.stage) == ("changed", "weights")
    assert shard.name in failure.detail
    assert "\n" not in failure.detail
    assert stages_over(messages)["weights"].status is StageStatus.FAILED


def test_a_published_encoder_answers_through_the_worker(zygote: Zygote, tmp_path: Path) -> None:
    """all-MiniLM-L6-v2: the values that cross the wire are transformers' own to 1e-5."""
    from transformers import AutoTokenizer

    folder, sentence = checkpoints.minilm_folder(), "A fixed sentence about warm GPUs."
    with zygote.worker(tmp_path / "log") as worker:
        messages = do_job(worker.end, job_for(recipe_for(folder, request=FirstRequest(prompt=sentence)), tmp_path))

    inputs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)(sentence, return_tensors="pt")
    with torch.inference_mode():
        expected = load_with_transformers(folder, "encode")(**inputs).last_hidden_state[0].mean(0)
    words = only(messages, WorkerReady).output.split()
    values = [float(word) for word in words[-8:]]
    assert words[:4] == ["embedding", "of", "384", "values,"]
    assert values == pytest.approx(expected[:8].tolist(), abs=1e-5)
    assert float(words[6].rstrip(":")) == pytest.approx(float(expected.norm()), abs=1e-4)
    assert stages_over(messages)["first_request"].extra["kind"] == "encode"


def test_what_a_model_prints_goes_to_the_log(zygote: Zygote, llama: Path, tmp_path: Path) -> None:
    """A checkpoint's own code that writes to both streams, raw descriptors included, disturbs no message."""
    log = tmp_path / "log"
    with zygote.worker(log) as worker:
        messages = do_job(worker.end, job_for(recipe_for(loud(llama, tmp_path), trust_remote_code=True), tmp_path))

    assert only(messages, WorkerReady).output
    written = log.read_bytes()
    assert all(text in written for text in (b'{"type": "WorkerReady"}', b"to stderr", b"raw bytes \xff"))


def loud(llama: Path, tmp_path: Path) -> Path:
    """Return the same checkpoint with code of its own that prints."""
    folder = tmp_path / "loud"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "loud.py").write_text(
        "import os, sys\n"
        "from transformers import LlamaConfig\n"
        'print(\'{"type": "WorkerReady"}\', flush=True)\n'
        "print('to stderr', file=sys.stderr, flush=True)\n"
        "os.write(1, b'raw bytes \\xff\\x00\\n')\n"
        "class LoudConfig(LlamaConfig): model_type = 'loud'\n"
        "from transformers import LlamaForCausalLM\n"
        "class LoudModel(LlamaForCausalLM): config_class = LoudConfig\n"
    )
    checkpoints.change_config(
        folder,
        {"model_type": "loud", "auto_map": {"AutoConfig": "loud.LoudConfig", "AutoModelForCausalLM": "loud.LoudModel"}},
    )
    return folder


def test_a_worker_whose_socket_closes_ends_in_the_middle_of_a_stage(
    zygote: Zygote, llama: Path, tmp_path: Path
) -> None:
    """It answers a request that would take hours, and what it started goes with it."""
    endless = FirstRequest(prompt_tokens=8, max_new_tokens=1 << 16)
    folder = tmp_path / "long"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    checkpoints.change_config(folder, {"max_position_embeddings": 1 << 20})
    with zygote.worker(tmp_path / "log") as worker:
        worker.end.send(job_for(recipe_for(folder, request=endless), tmp_path))
        worker.end.send(WorkerGo(()))
        while True:
            message = worker.end.receive()
            assert message is not None
            if isinstance(message, WorkerStage) and message.stage == "first_request":
                break
        assert process_state(worker.pid) not in (None, "Z")
        worker.end.sock.close()

        assert worker.wait() == -signal.SIGKILL


def test_a_worker_waits_for_the_word_before_it_opens_a_context(zygote: Zygote, llama: Path, tmp_path: Path) -> None:
    """Until preflight has passed, init is the last that happens; called off, it leaves."""
    with zygote.worker(tmp_path / "log") as worker:
        worker.end.send(job_for(recipe_for(llama), tmp_path))
        started, over = worker.end.receive(), worker.end.receive()
        assert isinstance(started, WorkerStage)
        assert isinstance(over, WorkerStage)
        assert (started.stage, over.stage, over.status) == ("init", "init", StageStatus.DONE)
        worker.end.send(WorkerRelease())

        assert worker.end.receive() is None
        assert worker.wait() == 0


def test_a_worker_ends_at_sigterm(zygote: Zygote, llama: Path, tmp_path: Path) -> None:
    """Also one whose parent ignored the signal."""
    with zygote.worker(tmp_path / "log") as worker:
        worker.end.send(job_for(recipe_for(llama), tmp_path))
        worker.end.receive()
        os.kill(worker.pid, signal.SIGTERM)

        assert worker.wait() == -signal.SIGTERM


def test_a_compiler_started_by_a_worker_dies_with_it(tmp_path: Path) -> None:
    """The whole process group goes when agentd's socket closes."""
    code = (
        "import socket, subprocess, sys, threading\n"
        "from remote_agent import worker\n"
        "from remote_agent.pipeline.channel import Channel\n"
        "fd = worker.claim_standard_streams(int(sys.argv[1]), 2)\n"
        "sock = socket.socket(fileno=fd)\n"
        "compiler = subprocess.Popen(['sleep', '600'])\n"
        "sock.sendall(b'%d\\n' % compiler.pid)\n"
        "Channel(sock).watch()\n"
        "threading.Event().wait()\n"
    )
    with python_child(code, tmp_path / "log") as (process, end):
        pid = int(end.sock.recv(100))
        assert process_state(pid) is not None
        end.sock.close()

        assert process.wait(30) == -signal.SIGKILL
    wait_for(lambda: process_state(pid) in (None, "Z"), "the compiler's end")


def test_nonsense_on_the_socket_ends_a_worker(zygote: Zygote, tmp_path: Path) -> None:
    """A worker that can't follow its orders does not go on alone."""
    with zygote.worker(tmp_path / "log") as worker:
        worker.end.sock.sendall(json.dumps({"type": "Nothing"}).encode() + b"\n")

        assert worker.wait() == -signal.SIGKILL
