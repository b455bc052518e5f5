"""On a real GPU: a process forked after every import uses CUDA from any thread, and outlives calls that fail."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.remote_agent.worker_ends import python_path

pytestmark = pytest.mark.gpu

FORKED = """
import os, sys, threading
from remote_agent.pipeline.gpu_count import gpus_counted_in_child
from remote_agent.pipeline.imports import QUIET_IMPORTS, import_everything
from remote_agent.zygote import count_threads, find_fork_hazard
os.environ.update(QUIET_IMPORTS)
with gpus_counted_in_child():
    import torch
    assert torch.cuda.is_available()
    import_everything()
assert find_fork_hazard(count_threads()) is None
pid = os.fork()
if pid:
    sys.exit(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
from remote_agent.devices import open_device
from remote_agent.errors import DeviceError
device = open_device("cuda:0")
device.open_context()

def multiply():
    square = torch.ones(64, 64, device="cuda")
    print("product", int((square @ square).sum()))

def ask_for_too_much():
    try:
        torch.empty(1 << 50, device="cuda")
    except torch.OutOfMemoryError:
        print("out of memory")

def register_nothing():
    try:
        device.runtime("cudaHostRegister", 4096, 4096, 0)
    except DeviceError as error:
        print("refused", error.code)

for body in (multiply, ask_for_too_much, register_nothing):
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    body()
print("alive", flush=True)
os._exit(0)
"""


@pytest.mark.timeout(300)
def test_a_forked_process_outlives_calls_that_fail_in_any_thread() -> None:
    """A product, too much memory and a refused registration, each in a thread without a context and in the first."""
    environment = {**os.environ, "PYTHONPATH": python_path()}

    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, env=environment)

    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.split("\n")
    assert said[-2] == "alive"
    assert said[:4] == ["product 262144"] * 2 + ["out of memory"] * 2
    assert said[4] == said[5]
    assert said[4].startswith("refused ")
