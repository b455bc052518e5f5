"""A real cacher in a process of its own that may lock only so much, whoever runs the tests."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remote_agent.loader.checkpoint import inspect
from remote_agent.protocol.internal import InternalMessage, ShardIdentity, WorkerGo, WorkerJob
from remote_agent.protocol.messages import Hold, ModelSource, Recipe
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write
from tests.remote_agent.worker_ends import End, do_job, python_child

LIMIT_BYTES = 64 << 10
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14

START = f"""
import ctypes, os, resource, sys
ctypes.CDLL(None).prctl({PR_CAPBSET_DROP}, {CAP_IPC_LOCK}, 0, 0, 0)
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({LIMIT_BYTES}, {LIMIT_BYTES}))
os.execv(sys.executable, [sys.executable, "-S", "-m", "remote_agent", "cacher", "--fd", sys.argv[1]])
"""


def write_checkpoint(folder: Path, count: int = 1000) -> Path:
    """Write two shards with ``count`` numbers of four bytes each."""
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(("a.safetensors", "b.safetensors")):
        write(folder / name, serialise([tensor(f"w{seed}", "F32", [count], seed)]))
    return folder


@contextmanager
def running_cacher(log: Path) -> Iterator[tuple[subprocess.Popen[bytes], End]]:
    """Start one that may lock 64 KiB and has no capability to lock more."""
    with python_child(START, log) as found:
        yield found


def do_cached(
    end: End, folder: Path, lock: bool = False, shards: tuple[ShardIdentity, ...] | None = None
) -> list[InternalMessage]:
    """Do one ``cached`` job and return what was said; ``shards``: what a preflight saw, by default what is there."""
    recipe = Recipe("tiny", ModelSource(str(folder)), target_tier="cached", hold=Hold(lock=lock))
    job = WorkerJob("run-00000001", recipe, "cpu", time.monotonic_ns(), "")
    return do_job(end, job, WorkerGo(inspect(folder).identities if shards is None else shards))


def locked_by(pid: int) -> int:
    """Return how many bytes a process has locked, as the kernel counts them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmLck:"))
