"""Opening devices: the right GPU and no other, every call checked, everything given back."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import types
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from remote_agent.devices import calls as device_calls
from remote_agent.devices import open_device
from remote_agent.devices.calls import Calls
from remote_agent.devices.cpu import CpuDevice
from remote_agent.devices.cuda import CudaDevice
from remote_agent.errors import DeviceError
from remote_agent.loader.ring import PinnedRing
from tests.needs import need
from tests.remote_agent.fake_cuda import UUID_TEXT, FakeDriver, FakeGpu, FakeRuntime


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "name", ["", "gpu", "cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:99999", "GPU-", "cpu:0", "TPU-1"]
)
def test_a_name_that_is_no_device_is_refused(name: str) -> None:
    """What is neither cpu, cuda:N nor a UUID has a stable code."""
    with pytest.raises(DeviceError) as caught:
        open_device(name)

    assert caught.value.code == "unknown_device"


def test_the_cpu_needs_nothing_opened() -> None:
    """The CPU has the host's memory and can be closed twice."""
    device = open_device("cpu")

    assert isinstance(device, CpuDevice)
    assert device.initialise()["processors"]
    free, total = device.memory()
    assert 0 < free <= total
    device.close()
    device.close()


def test_opening_a_device_imports_neither_torch_nor_anything_slow() -> None:
    """A GPU is chosen before torch is there, and a process that only opens stays light."""
    code = "import sys, remote_agent.devices as d; d.open_device('GPU-12345678'); print('torch' in sys.modules)"
    environment = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(path for path in sys.path if path)}

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)

    assert result.stdout.strip() == "False"


def test_a_uuid_is_the_only_gpu_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before CUDA is initialised the UUID is pinned; facts name the GPU and time the driver apart."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    gpu = FakeGpu(FakeRuntime(), name=UUID_TEXT)

    facts = gpu.initialise()

    assert os.environ["CUDA_VISIBLE_DEVICES"] == UUID_TEXT
    assert gpu.ordinal == 0
    assert facts["gpu_uuid"] == UUID_TEXT
    assert facts["gpu_name"] == "Fake GPU"
    assert facts["cuda_driver_version"] == "13.0"
    assert isinstance(facts["cu_init_ns"], int)


def test_a_process_with_another_gpu_already_is_refused() -> None:
    """Where CUDA was initialised first, a UUID that is not the one CUDA gives is refused with both."""
    driver = FakeDriver()
    driver.cuInit(0)
    assert FakeGpu(FakeRuntime(), driver, UUID_TEXT).initialise()["gpu_uuid"] == UUID_TEXT

    driver = FakeDriver(uuid.uuid4().bytes)
    driver.cuInit(0)
    with pytest.raises(DeviceError, match=f"{UUID_TEXT} was asked for and CUDA gives GPU-") as caught:
        FakeGpu(FakeRuntime(), driver, UUID_TEXT).initialise()

    assert caught.value.code == "wrong_device"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_number_beyond_what_cuda_sees_is_refused() -> None:
    """The error says how many devices CUDA sees, and through which variable."""
    with pytest.raises(
        DeviceError, match=r"cuda:2 is not there: CUDA sees 1 device\(s\) with CUDA_VISIBLE_DEVICES=None"
    ):
        FakeGpu(FakeRuntime(), name="cuda:2").initialise()


def test_initialising_opens_no_context() -> None:
    """The driver is initialised and no memory taken until the context is opened."""
    gpu = FakeGpu(FakeRuntime())
    gpu.initialise()

    assert gpu.fake_driver.contexts == 0
    assert not gpu.fake_runtime.calls
    with pytest.raises(DeviceError, match="no context is open"):
        _ = gpu.ring
    facts = gpu.open_context()
    assert gpu.fake_driver.contexts == 1
    assert set(facts) == {"primary_context_ns", "torch_ns"}
    assert gpu.ring.size_bytes == 3 * 2 * 4096
    assert gpu.memory() == (3 << 30, 8 << 30)
    gpu.synchronise()
    gpu.close()
    assert gpu.fake_driver.contexts == 0
    assert gpu.fake_runtime.leaks() == []


def test_a_ring_that_can_t_be_pinned_is_told_to_who_needs_it() -> None:
    """The context is there all the same: what copies nothing goes on, and who asks later has it tried again."""
    gpu = FakeGpu(FakeRuntime(fail_at="cudaHostAlloc"))
    gpu.open_context()

    for _ in range(2):
        with pytest.raises(DeviceError, match="cudaHostAlloc failed"):
            _ = gpu.ring
    gpu.fake_runtime.fail_at = None
    assert gpu.ring is gpu.ring
    gpu.close()
    assert gpu.fake_driver.contexts == 0
    assert gpu.fake_runtime.leaks() == []


def test_a_ring_that_nobody_needed_is_given_back() -> None:
    """Also one that could not be pinned: nothing is pinned only to be given back."""
    for fail_at in (None, "cudaHostAlloc"):
        gpu = FakeGpu(FakeRuntime(fail_at=fail_at))
        gpu.open_context()
        gpu.close()

        assert gpu.fake_runtime.leaks() == []
        assert gpu.fake_runtime.calls["cudaHostAlloc"] == 1


def test_nothing_is_pinned_while_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation of another thread would end the capture: what is being pinned is waited for."""
    order: list[str] = []

    class Late:
        """A call that is made when it is waited for."""

        def __init__(self, call: Callable[[], object], name: str) -> None:
            self.finish = call

    class Capturing(FakeGpu):
        def make_ring(self) -> PinnedRing:
            order.append("pinned")
            return super().make_ring()

    def begin_capture(*_: object) -> None:
        order.append("capture")
        raise RuntimeError("no GPU is here")

    monkeypatch.setattr("remote_agent.devices.cuda.Settling", Late)
    monkeypatch.setattr(torch.cuda, "Stream", begin_capture)
    gpu = Capturing(FakeRuntime())
    gpu.open_context()
    with pytest.raises(RuntimeError, match="no GPU is here"):
        CudaDevice.capture(gpu, lambda: torch.empty(0))
    gpu.close()

    assert order == ["pinned", "capture"]


def test_a_call_that_is_not_there_is_named() -> None:
    """A library without a driver, a module without a call and a module that is not there are DeviceErrors."""

    class Broken:
        def cuInit(self, flags: int) -> tuple[int]:
            raise RuntimeError("libcuda.so.1 not found\nsearched: everywhere")

    with pytest.raises(DeviceError, match=r"cuInit can't be called: libcuda.so.1 not found searched: everywhere"):
        Calls("driver", Broken())("cuInit", 0)
    with pytest.raises(DeviceError, match="cuNothing can't be called"):
        Calls("driver", Broken())("cuNothing")
    with pytest.raises(DeviceError, match="no_such_module_at_all can't be imported") as caught:
        Calls("no_such_module_at_all")("cuInit", 0)
    assert caught.value.code == "missing_package"


def test_the_driver_is_initialised_by_its_library_before_by_cuda_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each, in that order, since a process forked after the imports would not survive a failing call else."""
    compiler = need("gcc", "gcc")
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("int calls = 0;\nint cuInit(unsigned flags) { calls += flags == 0; return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    calls = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "calls")
    seen: list[int] = []
    module = types.ModuleType("bindings")
    module.__dict__["cuInit"] = lambda flags: (seen.append(calls.value), (0,))[1]
    monkeypatch.setitem(sys.modules, "bindings", module)
    monkeypatch.setattr(device_calls, "LIBRARY", str(library))

    Calls("bindings").initialise()

    assert seen == [1]


def test_a_gpu_on_a_host_without_a_driver_is_a_device_error() -> None:
    """The real bindings on a host without NVIDIA give one line, not a traceback of theirs."""
    pytest.importorskip("cuda.bindings.driver")
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this host has a driver")

    with pytest.raises(DeviceError, match="cuInit"):
        open_device("cuda:0").initialise()
