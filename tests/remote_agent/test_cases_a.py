"""Files and hosts from the field: each case is made anew and must get its right answer.

The generators lie beside the repository, or where GLOWPLUG_CASES says; without them the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote_agent.devices import open_device
from remote_agent.devices.findings import HostPaths
from remote_agent.devices.visible import HostGpu, visible_devices
from remote_agent.loader.checkpoint import Checkpoint, examine, inspect
from remote_agent.loader.load import Loaded, load
from remote_agent.loader.verify import verify
from remote_agent.loader.views import bytes_of
from remote_agent.protocol.messages import WeightsPolicy
from remote_agent.sampler import Sampler
from tests.needs import need
from tests.remote_agent.fake_cuda import FakeGpu, FakeRuntime
from tests.remote_agent.fake_nvml import FakeNvml, from_smi_csv

ROOT = Path(__file__).parents[2]
CASES = Path(os.environ.get("GLOWPLUG_CASES", ROOT.parent / "shared" / "cases"))

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not beside this repository")

Make = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Run the generator of a case and return its folder and the right answer."""

    def run(case: str, **environment: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path / case
        subprocess.run(
            [sys.executable, "-B", str(CASES / f"make_{case}.py"), str(folder)],
            check=True, capture_output=True, env={**os.environ, **environment},
        )  # fmt: skip
        return folder, json.loads((folder / "expect.json").read_text())

    return run


def preflight(*arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Call the verb as a script does; nothing but its own JSON may be on stdout."""
    result = subprocess.run(
        [sys.executable, "-m", "remote_agent", "preflight", "--json", *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def load_on_cpu(checkpoint: Checkpoint) -> Loaded:
    return load(checkpoint, open_device("cpu"), WeightsPolicy(), progress=lambda *_: None)


def test_a01_a_shard_shorter_than_its_header(make: Make) -> None:
    """Shard, missing bytes and every lost tensor stand in one line, before any device is touched."""
    folder, expected = make("A01")

    code, report = preflight(str(folder))

    assert (code, report["verdict"]) == (1, "refused")
    problem = report["problems"][0]
    assert problem["file"] == expected["file"]
    assert f"{expected['missing_bytes']} bytes are missing" in problem["detail"]
    assert ", ".join(expected["lost_tensors"]) in problem["detail"]
    assert problem["tensor"] == expected["lost_tensors"][0]


def test_a02_a_shard_that_is_not_there(make: Make) -> None:
    """Missing shards and tensors are listed; a directory with the suffix is no shard."""
    folder, expected = make("A02")

    code, report = preflight(str(folder))

    assert code == 1
    assert [problem["file"] for problem in report["problems"]] == expected["missing_files"]
    assert all(name in report["problems"][0]["detail"] for name in expected["missing_tensors"])
    assert [item["file"] for item in report["ignored"]] == expected["ignore"]


def test_a04_extra_files_beside_the_index_are_left_out(make: Make) -> None:
    """Only the index's set is loaded, each weight counted once, what is left out named."""
    folder, expected = make("A04")

    code, report = preflight(str(folder))

    assert code == 0
    assert report["shards"] == expected["files"]
    assert report["bytes"] == expected["bytes_to_load"]
    assert {item["file"] for item in report["ignored"]} == set(expected["ignored_with_note"])
    assert all(item["reason"] for item in report["ignored"])
    assert load_on_cpu(inspect(folder)).bytes == expected["bytes_to_load"]


def test_a06_a_filesystem_that_refuses_maps(make: Make) -> None:
    """Under a shim that refuses mmap everything still works by reading, and says why."""
    need("gcc", "gcc")
    folder, expected = make("A06")
    assert expected["shim"], "gcc is needed to build the shim"

    code, _ = preflight(str(folder), LD_PRELOAD=expected["shim"])
    result = subprocess.run(
        [sys.executable, "-m", "remote_agent", "load", str(folder), "--verify", "--json"],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "LD_PRELOAD": expected["shim"]},
    )  # fmt: skip
    script = (
        "import sys; from pathlib import Path; from remote_agent.loader.checkpoint import inspect;"
        "from remote_agent.loader.residency import measure_residency as m;"
        "found = m(inspect(Path(sys.argv[1])).shards); print(found.how, found.reason)"
    )
    residency = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "LD_PRELOAD": expected["shim"]},
    ).stdout  # fmt: skip

    report = json.loads(result.stdout)
    assert code == 0
    assert report["path"] == "read"
    assert "mmap refused on" in report["reason"]
    assert "No such device (errno 19)" in report["reason"]
    assert (report["verified"], report["mismatches"]) == (1, [])
    assert residency.startswith("cachestat") or ("probes" in residency and "mmap refused on" in residency)


def test_a08_a_header_over_the_cap(make: Make) -> None:
    """Size, number of tensors and cap are named, in memory far below the header's size."""
    folder, expected = make("A08")

    tracemalloc.start()
    examination = examine(folder)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    problem = examination.problems[0]
    assert problem.code == "header_too_large"
    for number in (expected["header_bytes"], expected["tensors"], 100_000_000):
        assert str(number) in problem.detail
    assert peak_bytes < expected["header_bytes"] / 10


def test_a08_a_large_header_below_the_cap_is_read(make: Make) -> None:
    """A legal file of very many tensors loads, in memory of the order of its header."""
    folder, expected = make("A08", A08_TENSORS="60000")  # type: ignore[call-arg]

    tracemalloc.start()
    checkpoint = inspect(folder)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert checkpoint.tensors == expected["tensors"] == 60_000
    assert peak_bytes < 12 * expected["header_bytes"]


def test_a09_what_is_no_safetensors_file(make: Make) -> None:
    """Each file is called what it is: with the pointer's real size, and nothing unpickled."""
    folder, expected = make("A09")
    words = {
        "lfs.safetensors": ["Git LFS pointer", "4976698672", "fetch the object"],
        "html.safetensors": ["HTML page", "429"],
        "empty.safetensors": ["empty file (0 bytes)"],
        "seven.safetensors": ["7 bytes: too short for a header"],
        "legacy_pickle.safetensors": ["torch pickle", "never unpickled", "convert"],
        "torch_zip.safetensors": ["zip", "torch checkpoint (.bin or .pt renamed)"],
    }
    assert set(words) == set(expected["want"])

    for name, parts in words.items():
        code, report = preflight(str(folder / name))

        assert code == 1
        assert report["problems"][0]["file"] == name
        assert all(part in report["problems"][0]["detail"] for part in parts)
    assert {problem["file"] for problem in preflight(str(folder))[1]["problems"]} == set(words)


def test_a10_odd_places_load_exactly(make: Make) -> None:
    """Every residue loads byte for byte on both paths; what missed the quick way is counted."""
    folder, expected = make("A10")
    specification = importlib.util.spec_from_file_location("_fx", CASES / "_fx.py")
    assert specification is not None
    assert specification.loader is not None
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    helpers = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(helpers)
    sys.dont_write_bytecode = before
    gpu = FakeGpu(FakeRuntime())
    gpu.open_context()

    for name in expected["library"]:
        checkpoint = inspect(folder / name)
        for device in (open_device("cpu"), gpu):
            loaded = load(checkpoint, device, WeightsPolicy(), progress=lambda *_: None)
            assert verify(checkpoint, loaded.tensors).is_equal
            ordered = sorted(checkpoint.shards[0].tensors, key=lambda entry: entry.start)
            for number, entry in enumerate(ordered):
                content = bytes(bytes_of(loaded.tensors[entry.name]).numpy())
                assert content == helpers.fill(entry.nbytes, number + 1)
            if name.startswith("odd"):
                assert loaded.counters["odd_tensors"] >= 1
                assert loaded.counters["odd_bytes"] >= 1332
    gpu.close()


def test_a11_empty_tensors_scalars_and_odd_metadata(make: Make) -> None:
    """What is legal loads, with no division by zero; bad metadata is named."""
    folder, expected = make("A11")

    for name, said in expected["library"].items():
        examination = examine(folder / name)
        if said.startswith("ok"):
            assert examination.checkpoint is not None
            loaded = load_on_cpu(examination.checkpoint)
            assert verify(examination.checkpoint, loaded.tensors).is_equal
            assert loaded.bytes == expected["bytes"].get(name, loaded.bytes)
            assert (loaded.rate_bytes_s is None) == (loaded.bytes == 0)
        else:
            problem = examination.problems[0]
            assert problem.code == "bad_metadata"
            assert "__metadata__.step is a number" in problem.detail


def test_a13_a_cache_whose_blobs_never_travelled(make: Make) -> None:
    """Each dangling link is named with target and advice; the good cache loads through its links."""
    folder, expected = make("A13")
    name = "models--org--tiny model"

    code, report = preflight(str(folder / "dangling" / name))
    good_code, good = preflight(str(folder / "good" / name))

    assert code == 1
    assert [problem["code"] for problem in report["problems"]] == ["dangling_link"] * expected["broken_links"]
    for problem in report["problems"]:
        assert problem["file"].startswith("model-0000")
        assert "../../blobs/" in problem["detail"]
        assert "rsync -aL" in problem["detail"]
        assert "HF_HOME" in problem["detail"]
        assert "1 unfinished download" in problem["detail"]
    assert (good_code, good["bytes"]) == (0, 4096)
    checkpoint = inspect(folder / "good" / name)
    assert verify(checkpoint, load_on_cpu(checkpoint).tensors).verified == 2


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidiactl", "nvidia-uvm"):
        (dev / name).symlink_to("/dev/null")
    return HostPaths(dev, tmp_path / "version", tmp_path / "maps")


def test_b01_unified_memory_is_unknown_and_not_zero(make: Make, paths: HostPaths) -> None:
    """A GB10 is there, unified, with no figure for its memory, and the host is well."""
    folder, _ = make("B01")

    report = Sampler(from_smi_csv(folder / "gb10.csv"), paths).look()

    gpu = report.gpus[0]
    assert (report.status, report.findings) == ("nvml", ())
    assert gpu.name == "NVIDIA GB10"
    assert gpu.unified
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.ecc_uncorrected, gpu.mig) == (None, None, None, None)
    assert gpu.power_w == pytest.approx(11.17)


def test_b01_one_unreadable_gpu_keeps_the_other(make: Make, paths: HostPaths) -> None:
    """Exclusive mode, MIG and ECC of the healthy GPU are told, and the other is named as unreadable."""
    folder, _ = make("B01")

    report = Sampler(from_smi_csv(folder / "big.csv"), paths).look()

    first, second = report.gpus
    assert (first.compute_mode, first.mig, first.ecc_uncorrected) == ("exclusive_process", True, 3)
    assert first.memory_total_bytes == 81_559 << 20
    assert (second.uuid[-1], second.memory_total_bytes, second.unified) == ("2", None, False)
    codes = {finding.code for finding in report.findings}
    assert {"gpu_unreadable", "exclusive_mode", "mig_on", "ecc_uncorrected", "persistence_off"} <= codes


@pytest.mark.parametrize(("mode", "code"), [("uninit", "container_lost_gpus"), ("mismatch", "driver_mismatch")])
def test_b01_a_driver_that_does_not_start_is_explained(make: Make, paths: HostPaths, mode: str, code: str) -> None:
    """What nvidia-smi only prints as an error has its cause and the way out."""
    folder, _ = make("B01")
    said = subprocess.run(
        [str(folder / "nvidia-smi")], capture_output=True, text=True, check=False, env={"FAKE_SMI": mode}
    ).stderr
    number = 18 if "version mismatch" in said else 999

    report = Sampler(FakeNvml(start=number), paths).look()

    assert report.status == "failed"
    assert report.findings[0].code == code


def test_b03_visible_devices_as_cuda_sees_them(make: Make) -> None:
    """Every row of the table: order kept, UUIDs resolved, nothing taken for a number that is none."""
    folder, expected = make("B03")
    table = json.loads((folder / "cvd.json").read_text())
    gpus = [HostGpu(uuid, tuple(table["mig_on_0"]) if index == 0 else ()) for index, uuid in enumerate(table["gpus"])]
    assert len(table["rows"]) == expected["rows"]

    for row in table["rows"]:
        found = visible_devices(row["value"], gpus)
        indices, means = [device.index for device in found.devices], row["means"]

        if isinstance(means, list):
            assert indices == means, row
        elif means == "all four":
            assert indices == [0, 1, 2, 3]
        elif "MIG slice" in means:
            assert [device.mig for device in found.devices] == [table["mig_on_0"][0]], row
            assert ("only" in means) == (found.problem is not None)
        else:
            assert indices == [], row
            assert found.problem, row
