"""Errors of the agent.

AgentError
├── CheckpointError      a checkpoint can't be loaded; carries its problems
├── LoadError            bytes did not reach the device
├── DeviceError          a CUDA or NVML call failed; carries the call and its code
├── StageError           a stage of a run failed; carries the Failure
├── RefusedError         a request that was understood and is refused
├── RecipeError          a recipe file can't be used
├── StateDirError        the state directory can't be used or trusted
├── LockFileError        a file can't serve as a lock among users
├── VersionError         a version of the agent can't be installed
├── LaunchError          the agent can't be reached or started
├── SilentAgentError     an agent runs and does not answer
├── ConnectionLostError  the agent closed the connection
├── KeeperError          a keeper can't be asked
│   ├── KeeperGoneError      none listens there
│   └── KeeperRefusedError   it understood and refuses; the text is its own
├── NotResidentError     no resident of that name, or several; names what is resident
├── NotArmableError      a process can't be armed for a model, or not be used for what is there; the text says why
├── ResidentLostError    a resident is there and can't be used: load it again
└── JournalError         a journal can't be read
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the bridge must start without the wire types
    from remote_agent.loader.problems import CheckpointProblem
    from remote_agent.protocol.messages import Failure


class AgentError(Exception):
    """Anything the agent raises on purpose."""


class CheckpointError(AgentError):
    """A checkpoint was refused before any device memory was taken; ``problems`` says why."""

    def __init__(self, text: str, problems: tuple[CheckpointProblem, ...] = ()) -> None:
        super().__init__(text)
        self.problems = problems


class LoadError(AgentError):
    """A load ended before every byte was on the device; ``code`` is stable.

    Codes: ``changed`` (a file is not what it was), ``short_read``, ``unreadable``,
    ``out_of_memory``, ``load_failed``.
    """

    def __init__(self, text: str, code: str = "load_failed") -> None:
        super().__init__(text)
        self.code = code


class DeviceError(AgentError):
    """A driver or runtime call did not return success; ``call`` and ``code`` name both."""

    def __init__(self, text: str, call: str = "", code: str = "") -> None:
        super().__init__(text)
        self.call = call
        self.code = code


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


class StateDirError(AgentError):
    """The state directory can't be used, or others could reach into it."""


class LockFileError(AgentError):
    """A file that should be a lock among users can't be used; names it."""


class VersionError(AgentError):
    """A version of the agent can't be installed; the one before it is still there."""


class LaunchError(AgentError):
    """The agent can't be reached and could not be started."""


class SilentAgentError(AgentError):
    """An agent runs here, as its lock says, and does not answer; the text names its pid where that is sure."""


class ConnectionLostError(AgentError):
    """The agent closed the connection."""


class JournalError(AgentError):
    """A journal can't be read."""


class KeeperError(AgentError):
    """A keeper can't be asked."""


class KeeperGoneError(KeeperError):
    """No keeper listens there, or it went away."""


class KeeperRefusedError(KeeperError):
    """A keeper understood and refuses; the text is its own."""


class NotResidentError(AgentError):
    """Nothing resident goes by that name, or more than one thing does; ``resident`` lists what there is."""

    def __init__(self, text: str, resident: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.resident = resident


class NotArmableError(AgentError):
    """A model can't be built over a reserved range, or weights can't be mapped there: the ordinary way is taken."""


class ResidentLostError(AgentError):
    """A resident is listed and its memory can't be used any more: it must be loaded again."""
