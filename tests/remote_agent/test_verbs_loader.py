"""The verbs ``preflight``, ``load`` and ``probe`` as a person or a script calls them on a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remote_agent.protocol.codec import Unknown, decode
from remote_agent.protocol.internal import SamplerReport
from remote_agent.protocol.messages import Gpu, Probe
from remote_agent.verbs import load as load_verb
from remote_agent.verbs import preflight as preflight_verb
from remote_agent.verbs import probe as probe_verb
from tests.remote_agent.loader.caches_by_hand import tell_cached
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write, write_index


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = write_index(
        tmp_path / "model", {"a.safetensors": [tensor("w", "BF16", [64])], "b.safetensors": [tensor("v", "F32", [8])]}
    )
    write(root / "adapter_model.safetensors", serialise([]))
    return root


def test_preflight_prints_its_fields(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A good checkpoint is exit 0 with every field of the report."""
    assert preflight_verb.main([str(model), "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == {
        "verdict": "ok",
        "shards": ["a.safetensors", "b.safetensors"],
        "ignored": [{"file": "adapter_model.safetensors", "reason": "not in model.safetensors.index.json"}],
        "bytes": 160,
        "tensors": 2,
        "problems": [],
    }
    assert preflight_verb.main([str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ok: 2 shards, 160 bytes in 2 tensors"


def test_preflight_refuses_with_exit_1(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal is one line a problem, and exit 1."""
    os.truncate(model / "a.safetensors", 100)

    assert preflight_verb.main([str(model)]) == 1
    assert "refused: a.safetensors: " in capsys.readouterr().out
    assert preflight_verb.main([str(model), "--json"]) == 1
    problem = json.loads(capsys.readouterr().out)["problems"][0]
    assert set(problem) == {"code", "file", "tensor", "detail"}
    assert (problem["code"], problem["tensor"]) == ("truncated", "w")


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [(preflight_verb, []), (preflight_verb, ["a", "b"]), (load_verb, ["x", "--path", "teleport"]), (probe_verb, ["x"])],
)
def test_a_usage_error_is_exit_2(verb: object, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong arguments say how it is used, and exit 2."""
    assert verb.main(arguments) == 2  # type: ignore[attr-defined]
    assert "usage:" in capsys.readouterr().err


def test_load_verifies_every_tensor(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path, bytes, rate, ceiling, tensors and the number verified are printed; equality is exit 0."""
    tell_cached(monkeypatch, 0)
    assert load_verb.main([str(model), "--device", "cpu", "--verify", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert (report["path"], report["bytes"], report["tensors"], report["verified"]) == ("mapped", 160, 2, 2)
    assert report["mismatches"] == []
    assert report["rate_bytes_s"] > 0
    assert report["ceiling_bytes_s"] > 0
    assert load_verb.main([str(model), "--verify"]) == 0
    assert "verified: 2 of 2 tensors, 0 differ" in capsys.readouterr().out


def test_load_exits_1_on_a_mismatch(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is not what the library reads is named, and exit 1."""
    import remote_agent.loader.onto_cpu as loading

    real = loading.view_of
    monkeypatch.setattr(loading, "view_of", lambda content, entry: real(content.clone().fill_(7), entry))

    assert load_verb.main([str(model), "--verify", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verified"] == 0
    assert any(line.startswith("w: ") for line in report["mismatches"])


def test_load_refuses_what_preflight_refuses(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused checkpoint is never opened on a device; a device that is none is a usage error."""
    assert load_verb.main([str(model), "--device", "npu"]) == 2
    assert "npu" in capsys.readouterr().err
    (model / "a.safetensors").unlink()

    assert load_verb.main([str(model), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "missing_shard"


def test_probe_describes_any_host() -> None:
    """With or without a GPU, one JSON object of the wire's Probe comes, and exit 0."""
    result = subprocess.run(
        [sys.executable, "-m", "remote_agent", "probe", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    probe = decode(Probe, json.loads(result.stdout), Unknown.REFUSE)
    assert probe.cpu_count >= 1
    assert 0 < probe.memory_available_bytes <= probe.memory_total_bytes
    assert probe.duration_ns > 0
    assert probe.sampler in ("nvml", "absent", "failed", "hung")
    text = subprocess.run([sys.executable, "-m", "remote_agent", "probe"], capture_output=True, text=True, check=True)
    assert probe.sampler != "absent" or "no NVIDIA driver" in text.stdout


def test_probe_tells_what_the_environment_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is there and can't be used by what is started from the same shell."""
    report = SamplerReport("nvml", 1, gpus=(Gpu("GPU-a", 0, "NVIDIA H200"),))
    monkeypatch.setattr(probe_verb, "_ask_sampler", lambda patience_s: report)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert [finding.code for finding in probe_verb.probe_host().findings] == ["visible_devices"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert probe_verb.probe_host().findings == ()


def test_a_driver_that_hangs_does_not_hang_the_probe(tmp_path: Path) -> None:
    """A sampler that says nothing is ended, holds no pipe of the caller, and the probe says that the driver hangs."""
    pid_file = tmp_path / "pid"
    code = (
        "import os, json, sys, signal; from remote_agent import sampler; from remote_agent.verbs import probe\n"
        "def hang(self):\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))\n"
        "    open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "    signal.pause()\n"
        "sampler.Sampler.look = hang\n"
        "found = probe.probe_host(1)\n"
        "print(json.dumps([found.sampler, [one.code for one in found.findings]]))"
    )

    result = subprocess.run(
        [sys.executable, "-c", code, str(pid_file)], capture_output=True, text=True, check=True, timeout=30
    )

    assert json.loads(result.stdout) == ["hung", ["nvml_hung"]]
    deadline = time.monotonic() + 20
    while _is_running(int(pid_file.read_text())):
        assert time.monotonic() < deadline, "the sampler lives on"


def _is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
