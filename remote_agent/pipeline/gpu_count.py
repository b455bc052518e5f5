"""How many GPUs there are, for imports that ask, told to a process that is forked later without a trace in it.

Packages ask while they are imported, and keep what follows from the answer. torch asks NVML, and a process forked after
that can't use the driver (decision 12).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from remote_agent.pipeline.imports import no_collections

MAX_COUNT = 255

LIMIT_S = 120
"""A driver that hangs is waited for so long: less than agentd waits for the zygote."""


@contextmanager
def gpus_counted_apart() -> Iterator[None]:
    """While this is entered, `torch.cuda.device_count` tells what a process forked for it counted.

    Nothing else in torch changes, and whoever kept the function gets torch's own answer afterwards.
    ``PYTORCH_NVML_BASED_CUDA_CHECK`` must be set: `torch.cuda.is_available` asks that function then. Raises:
    ImportError without torch, OSError if nothing can be forked.
    """
    with no_collections():
        import torch
    count, own, is_entered = _count_apart(), torch.cuda.device_count, True

    def device_count() -> int:
        return count if is_entered else own()

    torch.cuda.device_count = device_count
    try:
        yield
    finally:
        is_entered = False
        torch.cuda.device_count = own


@functools.cache
def _count_apart() -> int:
    """Return torch's count; 0 of a process that ended before it could tell."""
    pid = fork()
    if pid == 0:
        code = 0
        try:
            import torch

            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT_S)
            code = min(torch.cuda.device_count(), MAX_COUNT)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        print(f"counting GPUs: signal {-code} ended it; imports are told that there is none", file=sys.stderr)
    return max(code, 0)


def fork() -> int:
    """Fork. Python 3.12 warns of every fork of a process with threads; the zygote counts them before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()
