"""Whose a GPU's used memory is. What descriptors hold has no process, so that the driver names nobody for it."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from remote_agent.agentd.capacity import WORTH_SAYING_BYTES, unexplained_bytes
from remote_agent.loader.problems import gigabytes
from remote_agent.protocol.messages import Finding, Gpu, Resident


def account(
    gpus: Iterable[Gpu], residents: Iterable[Resident], spares: Container[int] = ()
) -> tuple[tuple[Gpu, ...], tuple[Finding, ...]]:
    """Return the GPUs with what is unexplained on each, and a finding where that is worth saying.

    ``spares``: pids of the agent's own that hold nothing.
    """
    known = tuple(residents)
    accounted = tuple(replace(gpu, memory_unexplained_bytes=unexplained_bytes(gpu, known, spares)) for gpu in gpus)
    return accounted, tuple(
        _finding(gpu) for gpu in accounted if (gpu.memory_unexplained_bytes or 0) >= WORTH_SAYING_BYTES
    )


def _finding(gpu: Gpu) -> Finding:
    text = (
        f"GPU {gpu.index} ({gpu.uuid}): {gigabytes(gpu.memory_unexplained_bytes or 0)} of the "
        f"{gigabytes(gpu.memory_used_bytes or 0)} in use belong to no process that shows here and to nothing that this "
        "agent holds: descriptors may hold them, such as those of another user's keeper, or another container's process"
    )
    return Finding("memory_unexplained", "warning", text)
