"""How many GPUs there are, for imports that ask, in a process that others are forked from.

Packages ask while they are imported, and keep what follows from the answer. torch asks NVML, and a process forked after
that dies of its first CUDA call that fails (decision 12).
"""

from __future__ import annotations

import functools
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from typing import NoReturn

from remote_agent.forking import fork
from remote_agent.pipeline.imports import no_collections

CHARACTERS = 16
COUNT_TIMEOUT_S = 120.0
"""A driver may need a while for each GPU. It leaves the imports a minute of what agentd waits for a zygote."""


@contextmanager
def gpus_counted_in_child() -> Iterator[None]:
    """While this is entered, `torch.cuda.device_count` tells what a process forked for it counted.

    Nothing else in torch changes, and whoever kept the function gets torch's own answer afterwards.
    ``PYTORCH_NVML_BASED_CUDA_CHECK`` must be set: `torch.cuda.is_available` asks that function then. Raises:
    ImportError without torch, OSError if nothing can be forked.
    """
    with no_collections():
        import torch
    count, own, is_entered = _count_in_child(), torch.cuda.device_count, True

    def device_count() -> int:
        return count if is_entered else own()

    torch.cuda.device_count = device_count
    try:
        yield
    finally:
        is_entered = False
        torch.cuda.device_count = own


@functools.cache
def _count_in_child() -> int:
    """Return torch's count; 0 from a process that ends or hangs before it tells, which is said on stderr."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as pipe, open(writing, "wb", buffering=0) as answer:
        pid = fork()
        if pid == 0:
            _tell_count(answer)
        answer.close()
        is_over = bool(select.select([pipe], [], [], COUNT_TIMEOUT_S)[0])
        told = pipe.read(CHARACTERS) if is_over else b""
    if not told:
        os.kill(pid, signal.SIGKILL)
        why = "ended without an answer" if is_over else f"gave no answer within {COUNT_TIMEOUT_S:g} s"
        print(f"counting GPUs: process {pid} {why}; imports are told that there is none", file=sys.stderr)
    os.waitpid(pid, 0 if is_over else os.WNOHANG)  # a driver that hangs may hold it for ever
    return int(told or 0)


def _tell_count(answer: RawIOBase) -> NoReturn:
    try:
        import torch

        answer.write(str(torch.cuda.device_count()).encode())
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)
