"""The preflight process: one job in, one report out, and every refusal in one line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from remote_agent.pipeline.preflight import check_recipe
from remote_agent.protocol.framing import FrameReader
from remote_agent.protocol.internal import PreflightReport, WorkerJob, dump, parse
from remote_agent.protocol.messages import FirstRequest, ModelSource, Recipe
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write, write_index


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole checkpoint: two shards, an index, a configuration and a tokenizer."""
    root = write_index(
        tmp_path / "model",
        {"a.safetensors": [tensor("w", "BF16", [64, 64])], "b.safetensors": [tensor("v", "F32", [8])]},
    )
    write(root / "config.json", b'{"model_type": "llama"}')
    write(root / "tokenizer.json", b"{}")
    return root


def recipe_for(path: Path, prompt: str | None = None, **source: str) -> Recipe:
    return Recipe("test", ModelSource(str(path), **source), request=FirstRequest(prompt=prompt))  # type: ignore[arg-type]


def ask_process(recipe: Recipe, cache: Path) -> PreflightReport:
    """Start the process as agentd does and return its report; it must end by itself."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(30)
        process = subprocess.Popen(
            [sys.executable, "-m", "remote_agent", "preflight-child", "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.sendall(dump(WorkerJob("run-00000001", recipe, "cpu", 0, str(cache))))
        reader, lines = FrameReader(), []
        while data := ours.recv(1 << 16):
            lines += reader.feed(data)
        reader.end()
    assert process.wait(30) == 0
    assert len(lines) == 1
    report = parse(lines[0])
    assert isinstance(report, PreflightReport)
    return report


def test_a_good_checkpoint_is_reported_whole(model: Path, tmp_path: Path) -> None:
    """Identities, bytes, tensors, cached bytes and the tier are there; the process ends by itself."""
    report = ask_process(recipe_for(model, prompt="hello"), tmp_path / "cache" / "deep")

    assert report.ok
    assert report.failure is None
    assert (report.bytes, report.tensors, report.cached_bytes) == (8224, 2, 8224)
    assert [Path(shard.path).name for shard in report.shards] == ["a.safetensors", "b.safetensors"]
    status = (model / "a.safetensors").stat()
    identity = report.shards[0]
    assert (identity.device, identity.inode, identity.size_bytes) == (status.st_dev, status.st_ino, status.st_size)
    assert (identity.mtime_ns, identity.ctime_ns) == (status.st_mtime_ns, status.st_ctime_ns)
    assert report.extra["tier_from"] == "cached"
    assert report.extra["config"] is True
    assert report.extra["residency"] in ("cachestat", "mincore")
    assert report.extra["cache_writable"] is True
    assert report.extra["ignored"] == 0
    assert report.extra["filesystem"] not in ("", "unknown")


def test_a_refusal_is_one_line_with_all_problems_behind_it(model: Path, tmp_path: Path) -> None:
    """The failure's code and line are the first problem's; every problem is in its log."""
    os.truncate(model / "a.safetensors", 200)
    write(model / "b.safetensors", b"<html><title>429</title></html>")

    report = ask_process(recipe_for(model), tmp_path)

    assert not report.ok
    assert report.failure is not None
    assert report.failure.code == "truncated"
    assert report.failure.stage == "preflight"
    assert "a.safetensors: " in report.failure.detail
    assert "1 tensor lost: w" in report.failure.detail
    assert report.failure.detail.endswith("(and 1 more)")
    assert len(report.failure.log_tail) == 2
    assert "429" in report.failure.log_tail[1]
    assert report.cached_bytes is None


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_native_run_needs_a_configuration(model: Path, content: bytes | None) -> None:
    """A config.json that is missing, cut or no object is refused; an engine brings its own way of reading it."""
    (model / "config.json").unlink()
    if content is not None:
        write(model / "config.json", content)

    report = check_recipe(recipe_for(model))

    assert report.failure is not None
    assert report.failure.code == "no_config"
    assert "config.json" in report.failure.detail
    assert check_recipe(recipe_for(model, adapter="engine")).ok


def test_a_prompt_needs_a_tokenizer(model: Path) -> None:
    """Without a tokenizer a prompt is refused, and a count of tokens is not."""
    (model / "tokenizer.json").unlink()

    report = check_recipe(recipe_for(model, prompt="hello"))

    assert report.failure is not None
    assert report.failure.code == "no_tokenizer"
    assert check_recipe(recipe_for(model)).ok


def test_a_cold_checkpoint_is_called_cold(model: Path) -> None:
    """What is not in the page cache is a cold start."""
    write_index(model, {"a.safetensors": [tensor("w", "U8", [8 << 20])]})
    for shard in model.glob("*.safetensors"):
        descriptor = os.open(shard, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    report = check_recipe(recipe_for(model))

    if report.extra["filesystem"] in ("tmpfs", "ramfs"):
        pytest.skip("nothing can be dropped from a filesystem that is the page cache")
    assert report.cached_bytes is not None
    assert report.cached_bytes < report.bytes / 2
    assert report.extra["tier_from"] == "cold"


def test_a_revision_of_a_cache_is_followed(tmp_path: Path) -> None:
    """The recipe's revision chooses the snapshot."""
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / ("a" * 40)
    write(snapshot / "model.safetensors", serialise([tensor("w", "F32", [4])]))
    write(snapshot / "config.json", b"{}")
    write(cache / "refs" / "v1", b"a" * 40)

    assert check_recipe(recipe_for(cache, revision="v1")).ok
    refused = check_recipe(recipe_for(cache, revision="v2")).failure
    assert refused is not None
    assert refused.code == "revision_not_found"


def test_a_home_directory_in_the_path_is_followed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may begin with ~, and a user that does not exist is a path that is not there."""
    monkeypatch.setenv("HOME", str(model.parent))

    assert check_recipe(recipe_for(Path("~/model"))).ok
    refused = check_recipe(recipe_for(Path("~nobody-of-that-name/model"))).failure
    assert refused is not None
    assert refused.code == "not_found"


def test_a_report_that_does_not_fit_a_frame_is_refused(tmp_path: Path) -> None:
    """Shards beyond what a report can name are a refusal with their number, not a broken stream."""
    root = tmp_path / ("long-name-" * 20) / ("x" * 200) / ("y" * 200)
    names = [f"s{number:04d}" + "z" * 200 + ".safetensors" for number in range(1300)]
    write_index(root, {name: [tensor(name[:5], "U8", [1])] for name in names})
    write(root / "config.json", b"{}")

    report = ask_process(recipe_for(root), tmp_path)

    assert report.failure is not None
    assert report.failure.code == "too_many_shards"
    assert "1300 shards" in report.failure.detail


def test_what_it_prints_goes_to_the_log_that_comes_with_its_job(model: Path, tmp_path: Path) -> None:
    """It was started before there was a run: a crash's last words must be found with the run that it had."""
    program = (
        "import sys; from remote_agent.pipeline import preflight\n"
        "print('before', file=sys.stderr, flush=True)\n"
        "preflight.check_recipe = lambda *words: print('last words', file=sys.stderr, flush=True) or sys.exit(3)\n"
        "preflight.main(sys.argv[1:])"
    )
    ours, theirs = socket.socketpair()
    with ours, (tmp_path / "started").open("wb") as started, (tmp_path / "run").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=started
        )
        theirs.close()
        job = dump(WorkerJob("run-00000001", recipe_for(model), "cpu", 0, str(tmp_path)))
        socket.send_fds(ours, [job], [log.fileno()])
        code = process.wait(30)

    assert code == 3
    assert (tmp_path / "started").read_text() == "before\n"
    assert (tmp_path / "run").read_text() == "last words\n"


def test_a_process_whose_agent_is_gone_ends() -> None:
    """A socket that closes without a job ends the process with code 0."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "remote_agent", "preflight-child", "--fd", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    ours.close()

    assert process.wait(30) == 0


def test_no_stage_of_preflight_imports_torch(model: Path) -> None:
    """Preflight runs on the agent's own Python with the standard library alone."""
    code = (
        "import sys; from remote_agent.pipeline.preflight import check_recipe;"
        "from remote_agent.protocol.messages import Recipe, ModelSource;"
        "from pathlib import Path; check_recipe(Recipe('x', ModelSource(sys.argv[1])), Path('/tmp'));"
        "print(sorted({'torch', 'numpy', 'safetensors', 'pynvml'} & set(sys.modules)))"
    )

    result = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)

    assert json.loads(result.stdout.replace("'", '"')) == []
