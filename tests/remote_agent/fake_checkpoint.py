"""The driver's process checkpoints in plain Python: a state for each pid, and the refusals of the real one.

As on a real GPU a process that has memory of others mapped is checkpointed without a word, and its restore is refused
and lost for good; so is one for which there was no device memory once.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801


class State(enum.IntEnum):
    CU_PROCESS_STATE_RUNNING = 0
    CU_PROCESS_STATE_LOCKED = 1
    CU_PROCESS_STATE_CHECKPOINTED = 2
    CU_PROCESS_STATE_FAILED = 3


class Process:
    """What the driver knows of one process. ``busy_ms``: how long its queued work still takes."""

    def __init__(self, device_bytes: int = 1 << 30) -> None:
        self.state = State.CU_PROCESS_STATE_RUNNING
        self.device_bytes = device_bytes
        self.busy_ms = 0
        self.has_imported_memory = self.has_managed_memory = self.is_broken = False


class FakeCheckpoints:
    """The calls of ``cuda.bindings.driver`` for process checkpoints. ``fail``: a code for a call, by its name."""

    CUprocessState = State

    def __init__(self, version: int = 13000, devices: int = 1) -> None:
        self.version, self.devices = version, devices
        self.processes: dict[int, Process] = {}
        self.free_bytes = 100 << 30
        self.fail: dict[str, Code] = {}
        self.calls: list[str] = []
        self._is_initialised = False

    @staticmethod
    def CUcheckpointLockArgs() -> SimpleNamespace:
        return SimpleNamespace(timeoutMs=0)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        if not self.devices:
            return (Code.CUDA_ERROR_NO_DEVICE,)
        self._is_initialised = True
        return self._told("cuInit")

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return Code.CUDA_SUCCESS, self.version

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[Any, ...]:
        code = self._told("cuCheckpointProcessGetState")[0]
        if code or pid not in self.processes:
            return (code or Code.CUDA_ERROR_OPERATING_SYSTEM,)
        return Code.CUDA_SUCCESS, self.processes[pid].state

    def cuCheckpointProcessLock(self, pid: int, arguments: Any) -> tuple[Any, ...]:
        process = self.processes[pid]
        code = self._in_state("cuCheckpointProcessLock", process, State.CU_PROCESS_STATE_RUNNING)
        if code:
            return (code,)
        if arguments.timeoutMs and process.busy_ms > arguments.timeoutMs:
            return (Code.CUDA_ERROR_NOT_READY,)
        process.state = State.CU_PROCESS_STATE_LOCKED
        return (Code.CUDA_SUCCESS,)

    def cuCheckpointProcessCheckpoint(self, pid: int, arguments: Any) -> tuple[Any, ...]:
        process = self.processes[pid]
        code = self._in_state("cuCheckpointProcessCheckpoint", process, State.CU_PROCESS_STATE_LOCKED)
        if code or process.has_managed_memory:
            return (code or Code.CUDA_ERROR_NOT_SUPPORTED,)
        process.state = State.CU_PROCESS_STATE_CHECKPOINTED
        self.free_bytes += process.device_bytes
        return (Code.CUDA_SUCCESS,)

    def cuCheckpointProcessRestore(self, pid: int, arguments: Any) -> tuple[Any, ...]:
        process = self.processes[pid]
        code = self._in_state("cuCheckpointProcessRestore", process, State.CU_PROCESS_STATE_CHECKPOINTED)
        if code:
            return (code,)
        if process.is_broken:
            return (Code.CUDA_ERROR_OPERATING_SYSTEM,)
        if process.has_imported_memory:
            process.is_broken = True
            return (Code.CUDA_ERROR_NOT_SUPPORTED,)
        if process.device_bytes > self.free_bytes:
            process.is_broken = True
            return (Code.CUDA_ERROR_OUT_OF_MEMORY,)
        process.state = State.CU_PROCESS_STATE_LOCKED
        self.free_bytes -= process.device_bytes
        return (Code.CUDA_SUCCESS,)

    def cuCheckpointProcessUnlock(self, pid: int, arguments: Any) -> tuple[Any, ...]:
        process = self.processes[pid]
        code = self._in_state("cuCheckpointProcessUnlock", process, State.CU_PROCESS_STATE_LOCKED)
        if code:
            return (code,)
        process.state = State.CU_PROCESS_STATE_RUNNING
        return (Code.CUDA_SUCCESS,)

    def _told(self, name: str) -> tuple[Code]:
        self.calls.append(name)
        if not self._is_initialised:
            return (Code.CUDA_ERROR_NOT_INITIALIZED,)
        return (self.fail.get(name, Code.CUDA_SUCCESS),)

    def _in_state(self, name: str, process: Process, wanted: State) -> Code:
        code = self._told(name)[0]
        return code or (Code.CUDA_SUCCESS if process.state is wanted else Code.CUDA_ERROR_ILLEGAL_STATE)
