"""The driver's checkpoint of a process, by pid: its device memory goes to the host's and comes back, contents and all.

The process keeps its pid, threads and addresses; its CUDA calls block meanwhile. It must have no managed memory and
no memory of another process mapped: the driver takes the checkpoint even so, and refuses to restore it. A restore
that failed once, for want of device memory too, never succeeds again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from remote_agent.devices.calls import Calls
from remote_agent.errors import DeviceError

LEAST_CUDA_VERSION = 12080
"""CUDA 12.8 came with the driver of branch 570, the first that has these calls."""

Left = Literal["running", "parked", "lost"]


class ProcessCheckpoint:
    """One process, seen from another one. ``steps``: how long each call took, in nanoseconds, by name."""

    def __init__(self, driver: Calls, pid: int, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._driver, self._pid, self._now_ns = driver, pid, now_ns
        self.steps: dict[str, int] = {}
        self._restore_failed = False

    def require_support(self) -> None:
        """See that the driver knows the process and can checkpoint it; nothing is touched.

        Raises: DeviceError that says what is missing.
        """
        self._timed("driver_ns", "cuInit", 0)
        version = int(self._driver("cuDriverGetVersion"))
        if version < LEAST_CUDA_VERSION:
            text = f"the driver is of CUDA {_version(version)}; it needs {_version(LEAST_CUDA_VERSION)} (branch 570)"
            raise DeviceError(text, "cuDriverGetVersion", "unsupported")
        self._state()

    def park(self, lock_timeout_ms: int) -> None:
        """Take a running process off its device; where that fails it runs on, if it can. Raises: DeviceError"""
        arguments = self._driver.module.CUcheckpointLockArgs()
        arguments.timeoutMs = lock_timeout_ms
        self._timed("lock_ns", "cuCheckpointProcessLock", self._pid, arguments)
        try:
            self._timed("checkpoint_ns", "cuCheckpointProcessCheckpoint", self._pid, None)
        except DeviceError:
            try:
                self.unpark()
            except DeviceError:
                pass  # `left` tells; what went wrong first is what is raised
            raise

    def unpark(self) -> None:
        """Put a parked process back on its device, and let a locked one run on. Raises: DeviceError"""
        states, state = self._states, self._state()
        if state == int(states.CU_PROCESS_STATE_CHECKPOINTED):
            try:
                self._timed("restore_ns", "cuCheckpointProcessRestore", self._pid, None)
            except DeviceError:
                self._restore_failed = True
                raise
            state = self._state()
        if state == int(states.CU_PROCESS_STATE_LOCKED):
            self._timed("unlock_ns", "cuCheckpointProcessUnlock", self._pid, None)
        elif state != int(states.CU_PROCESS_STATE_RUNNING):
            text = f"process {self._pid} is in state {state} of the driver's, which nothing ends"
            raise DeviceError(text, "cuCheckpointProcessGetState", "failed")

    def left(self) -> Left:
        """Return how the process is now."""
        try:
            state = self._state()
        except DeviceError:
            return "lost"
        if state == int(self._states.CU_PROCESS_STATE_RUNNING):
            return "running"
        is_whole = state == int(self._states.CU_PROCESS_STATE_CHECKPOINTED) and not self._restore_failed
        return "parked" if is_whole else "lost"

    @property
    def _states(self) -> Any:
        return self._driver.module.CUprocessState

    def _state(self) -> int:
        try:
            return int(self._driver("cuCheckpointProcessGetState", self._pid))
        except DeviceError as error:
            if error.code == "CUDA_ERROR_OPERATING_SYSTEM":  # what a driver says of a process that it can't find
                raise DeviceError(f"process {self._pid} has ended: {error}", error.call, error.code) from error
            raise

    def _timed(self, step: str, function: str, *arguments: Any) -> None:
        begun = self._now_ns()
        try:
            self._driver(function, *arguments)
        finally:
            self.steps[step] = self._now_ns() - begun


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
