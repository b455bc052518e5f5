"""How much anonymous memory one load takes beyond what its process had: ``python -m bench.cpu_memory SIDE FOLDER``.

A process of its own does one load, its imports done, and touches every page of every tensor; whoever started it reads
the kernel's ``RssAnon`` of it meanwhile, as often as that goes. Pages of the files are not anonymous: both sides map
them, and the kernel takes them back when it likes. What is shorter than a sample is not seen.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 0.0005
LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes of anonymous memory before a load, and the most beyond that while it went on; ``samples`` were taken."""

    before_bytes: int
    peak_extra_bytes: int
    samples: int


def main() -> int:
    """Load once when told to; return 0."""
    from bench.cpu_load import load_ours, load_theirs, touch

    side, folder = sys.argv[1], Path(sys.argv[2])
    shards = sorted(folder.glob("*.safetensors"))
    print("ready", flush=True)
    sys.stdin.readline()
    tensors = load_ours(folder) if side == "glowplug" else load_theirs(shards)
    touch(tensors)
    print(json.dumps({"tensors": len(tensors)}), flush=True)
    sys.stdin.readline()  # the tensors are there until the last sample is
    return 0


def measure_memory(side: str, folder: Path) -> Memory:
    """Return what one load takes in a fresh process. Raises: RuntimeError if that process fails"""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.cpu_memory", side, str(folder)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{side}: its process did not start")
        before = anonymous_bytes(process.pid)
        process.stdin.write("\n")
        found = [before]
        while not select.select([process.stdout], [], [], SAMPLE_S)[0]:
            found.append(anonymous_bytes(process.pid))
        if not process.stdout.readline():
            raise RuntimeError(f"{side}: its process failed")
        found.append(anonymous_bytes(process.pid))
        return Memory(before, max(found) - before, len(found))
    finally:
        process.kill()
        process.communicate()


def judge_memory(peaks_bytes: Sequence[int], limit_bytes: int = LIMIT_BYTES) -> str:
    """Return the largest of some peaks beside what is allowed."""
    largest = max(peaks_bytes)
    word = "under" if largest < limit_bytes else "NOT under"
    return f"{largest / (1 << 20):.1f} MiB, {word} {limit_bytes >> 20} MiB"


def anonymous_bytes(pid: int) -> int:
    """Return a process's resident anonymous memory. Raises: OSError, RuntimeError where the kernel does not tell"""
    descriptor = os.open(f"/proc/{pid}/status", os.O_RDONLY)
    try:
        text = os.read(descriptor, 1 << 16).decode("ascii", "replace")
    finally:
        os.close(descriptor)
    for line in text.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"the kernel does not tell RssAnon of process {pid}")


if __name__ == "__main__":
    sys.exit(main())
