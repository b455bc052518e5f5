"""How much GPU memory the agent's own processes hold while a model is warm. Standard library only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


def daemon_memory(processes: Mapping[str, int | None]) -> dict[str, object]:
    """Return the MiB that NVML shows for agentd and keeper, None where that says nothing, and what each has loaded.

    ``processes``: pids by name. NVML lists who has a context. A process that has no CUDA library mapped can't have one,
    and that is asked of the kernel: in a container NVML may show other numbers for the same processes.
    """
    used = _used_by_process()
    told: dict[str, object] = {"listed": used}
    for name in ("agentd", "keeper"):
        pid = processes.get(name)
        libraries = None if pid is None else cuda_libraries(pid)
        told[f"{name}_libraries"] = libraries
        told[f"{name}_mib"] = None if used is None or libraries is None else _mib(used, str(pid), libraries)
    return told


def _mib(used: Mapping[str, int], pid: str, libraries: list[str]) -> int | None:
    """Return what is listed; who is not listed has none where it has no library for a context either."""
    return used.get(pid, None if libraries else 0)


def cuda_libraries(pid: int) -> list[str] | None:
    """Return the CUDA and NVML libraries mapped by a process, or None where the kernel does not tell."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    names = {Path(line.split(maxsplit=5)[5]).name for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(name for name in names if name.startswith(("libcuda", "libnvidia", "libcudart")))


def _used_by_process() -> dict[str, int] | None:
    """Return MiB by pid as NVML lists them, or None where it can't be asked or does not tell amounts."""
    if shutil.which(QUERY[0]) is None:
        return None
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=20, check=True)
        pairs = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
        return {pid.strip(): int(used) for pid, used in pairs}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
