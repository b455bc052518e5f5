"""The zygote forks workers that work, and refuses where a fork would hang one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_agent.protocol.internal import (
    WorkerReady,
    ZygoteFork,
    ZygoteForked,
    ZygoteReady,
    ZygoteRefused,
)
from remote_agent.protocol.messages import CompilePolicy, FirstRequest, StageStatus
from remote_agent.zygote import find_open_driver
from tests.needs import need
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import recipe_for
from tests.remote_agent.worker_ends import (
    Forked,
    Zygote,
    ask_for_fork,
    do_job,
    job_for,
    only,
    parent_of,
    process_state,
    python_child,
    running_zygote,
    stages_over,
    subreaper,
)

BARE_ZYGOTE = """
import socket, sys, threading
from remote_agent.zygote import Zygote
zygote = Zygote(socket.socket(fileno=int(sys.argv[1])), {})
zygote.announce(0)
"""
"""A zygote without its imports, for what does not need them."""


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """One zygote for all tests here: its imports take seconds, its forks milliseconds."""
    with running_zygote(tmp_path_factory.mktemp("zygote") / "log") as running:
        yield running


def test_imports_alone_leave_one_thread(zygote: Zygote) -> None:
    """And the versions and folders that a new zygote would be needed for are named."""
    assert zygote.ready.threads == 1
    assert zygote.ready.pid == zygote.process.pid
    assert {"python", "torch", "transformers"} <= set(zygote.ready.versions)
    assert any(path.endswith("site-packages") for path in zygote.ready.fingerprint_paths)


def test_a_forked_worker_warms_a_model(zygote: Zygote, tmp_path: Path) -> None:
    """Its parent is this process, it has its threads again and what the environment said, and leaves no zombie."""
    folder = checkpoints.write_llama(tmp_path / "model")
    with zygote.worker(tmp_path / "log") as worker:
        assert parent_of(worker.pid) == os.getpid()
        messages = do_job(worker.end, job_for(recipe_for(folder, environment={"OMP_NUM_THREADS": "1"}), tmp_path))
        assert worker.release() == 0
    over = stages_over(messages)
    assert over["init"].extra["forked"] is True
    assert over["init"].extra["threads"] == 1
    assert over["init"].reason is None
    assert all(stage.status is StageStatus.DONE for stage in over.values())
    assert only(messages, WorkerReady).output
    children = Path(f"/proc/{zygote.process.pid}/task/{zygote.process.pid}/children").read_text()
    assert children == ""


def test_forked_workers_compile_without_hanging_and_share_their_cache(zygote: Zygote, tmp_path: Path) -> None:
    """Dynamo, Inductor and gcc run in forks of what only imported them; the second finds what the first built."""
    need("g++", "g++")
    folder = checkpoints.write_bert(tmp_path / "model")
    recipe = recipe_for(folder, compile=CompilePolicy("layer"), request=FirstRequest(prompt_tokens=6))
    spans = []
    for _ in range(2):
        with zygote.worker(tmp_path / "log") as worker:
            messages = do_job(worker.end, job_for(recipe, tmp_path / "cache"))
            assert worker.release() == 0
        spans.append(stages_over(messages))

    cold, kept = spans[0]["compile"], spans[1]["compile"]
    assert cold.extra["compiled"] is kept.extra["compiled"] is True, cold.reason
    assert (cold.extra["cache"], kept.extra["cache"]) == ("miss", "hit"), kept.reason
    assert cold.extra["new_artefacts"] != 0
    assert (kept.extra["new_artefacts"], kept.extra["fxgraph_cache_miss"]) == (0, 0)
    assert all(stages["first_request"].extra["new_graphs"] == 0 for stages in spans)


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path) -> None:
    """Importing the compile stack makes no directory of its own there, and neither does a run."""
    folder = checkpoints.write_llama(tmp_path / "model")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with running_zygote(tmp_path / "log", TMPDIR=str(temporary)) as zygote, zygote.worker(tmp_path / "log") as worker:
        messages = do_job(worker.end, job_for(recipe_for(folder), tmp_path / "cache"))

    assert only(messages, WorkerReady).bytes > 0
    assert list(temporary.iterdir()) == []


def test_a_worker_gets_the_thread_variables_back(zygote: Zygote, tmp_path: Path) -> None:
    """The zygote's own setting for its imports does not reach the models."""
    recipe = recipe_for(checkpoints.write_bert(tmp_path / "model"))
    with zygote.worker(tmp_path / "log") as worker:
        messages = do_job(worker.end, job_for(recipe, tmp_path))

    assert stages_over(messages)["init"].extra["threads"] == 2


def test_model_code_is_imported_ahead_only_from_transformers(zygote: Zygote, tmp_path: Path) -> None:
    """What a console names can't make the zygote import something else."""
    module = tmp_path / "intruder.py"
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    names = ("transformers.models.gpt2.modeling_gpt2", "intruder", "transformers.models..intruder", "os")

    answer, worker = zygote.ask(tmp_path / "log", *names, PYTHONPATH=str(tmp_path))

    assert isinstance(answer, ZygoteForked)
    assert not (tmp_path / "ran").exists()
    assert Forked(answer.pid, worker).release() == 0
    worker.sock.close()


def test_a_file_in_the_agents_own_directory_is_no_change_of_packages(tmp_path: Path) -> None:
    """Its working directory is the first that imports look in, and where its log and caches come and go."""
    code = f"import os\nos.chdir({str(tmp_path)!r})\nimport sys\nsys.path[:0] = ['', {str(tmp_path)!r}]\n{BARE_ZYGOTE}"
    with python_child(code, tmp_path / "log") as (_, end):
        ready = end.receive()

    assert isinstance(ready, ZygoteReady)
    assert any(path.endswith("site-packages") for path in ready.fingerprint_paths)
    assert not {"", ".", str(tmp_path)} & set(ready.fingerprint_paths)


def test_a_worker_outlives_the_zygote_that_forked_it(tmp_path: Path) -> None:
    """It holds no end of the zygote's socket, so each is seen to end on its own."""
    with subreaper(), python_child(f"{BARE_ZYGOTE}sys.exit(zygote.serve())", tmp_path / "log") as (process, end):
        assert isinstance(end.receive(), ZygoteReady)
        answer, worker = ask_for_fork(end, tmp_path / "worker-log")
        assert isinstance(answer, ZygoteForked)
        process.kill()
        assert end.receive() is None
        process.wait()

        assert process_state(answer.pid) not in (None, "Z")
        assert Forked(answer.pid, worker).release() == 0
        worker.sock.close()


def test_a_fork_is_refused_once_a_thread_was_started(tmp_path: Path) -> None:
    """With both counts, so that agentd's run can say why its worker was spawned fresh."""
    code = f"{BARE_ZYGOTE}threading.Thread(target=threading.Event().wait, daemon=True).start()\nzygote.serve()"
    with python_child(code, tmp_path / "log") as (_, end):
        assert isinstance(end.receive(), ZygoteReady)

        answer, worker = ask_for_fork(end, tmp_path / "log")

        with worker.sock:
            assert answer == ZygoteRefused("the zygote has 2 threads and imports alone left 1")
            assert worker.receive() is None


def test_a_fork_is_refused_once_a_tensor_operation_left_a_pool(tmp_path: Path) -> None:
    """The pool's threads do not exist in a fork, and its first parallel operation would wait for them."""
    code = (
        f"import torch\n{BARE_ZYGOTE}torch.set_num_threads(3)\n"
        "torch.rand(1 << 20).sum()\ntorch.rand(512, 512) @ torch.rand(512, 512)\nzygote.serve()"
    )
    with python_child(code, tmp_path / "log") as (_, end):
        ready = end.receive()
        assert isinstance(ready, ZygoteReady)

        answer, worker = ask_for_fork(end, tmp_path / "log")
        worker.sock.close()

        assert isinstance(answer, ZygoteRefused)
        assert answer.reason.endswith(f"imports alone left {ready.threads}")


def test_a_fork_without_its_descriptors_is_refused(tmp_path: Path) -> None:
    """A worker without a socket could never be told anything."""
    with python_child(f"{BARE_ZYGOTE}zygote.serve()", tmp_path / "log") as (_, end):
        assert isinstance(end.receive(), ZygoteReady)
        end.send(ZygoteFork({}))

        assert end.receive() == ZygoteRefused("a fork needs 2 descriptors and came with 0")


@pytest.mark.parametrize(
    "opened", ["/dev/nvidia-uvm", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap2"]
)
def test_a_driver_s_open_file_is_a_hazard(tmp_path: Path, opened: str) -> None:
    """What CUDA opens and what NVML opens: a worker forked after either may die of a call that fails."""
    (tmp_path / "3").symlink_to(opened)

    assert find_open_driver(tmp_path) == f"the CUDA driver or NVML is initialised in the zygote: {opened} is open"


def test_other_open_files_are_no_hazard(tmp_path: Path) -> None:
    """Nor a descriptor that was closed meanwhile."""
    (tmp_path / "3").symlink_to("/dev/null")
    (tmp_path / "4").write_text("no link, as one that is closed has none")

    assert find_open_driver(tmp_path) is None
