"""Errors of the agent.

AgentError
├── CheckpointError      a checkpoint can't be loaded; carries its problems
├── LoadError            bytes did not reach the device
├── DeviceError          a CUDA or NVML call failed; carries the call and its code
├── StageError           a stage of a run failed; carries the Failure
├── RefusedError         a request that was understood and is refused
└── RecipeError          a recipe file can't be used
"""

from __future__ import annotations

from remote_agent.protocol.messages import Failure


class AgentError(Exception):
    """Anything the agent raises on purpose."""


class CheckpointError(AgentError):
    """A checkpoint was refused before any device memory was taken."""


class LoadError(AgentError):
    """A load ended before every byte was on the device."""


class DeviceError(AgentError):
    """A driver or runtime call did not return success."""


class StageError(AgentError):
    """A stage failed; ``failure`` crosses the wire."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class RefusedError(AgentError):
    """A request that was understood and is refused; ``code`` is stable."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class RecipeError(AgentError):
    """A recipe can't be used."""
