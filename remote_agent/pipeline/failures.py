"""Turns whatever a stage raised into the one line that crosses the wire."""

from __future__ import annotations

import sys

from remote_agent.errors import CheckpointError, DeviceError, LoadError, StageError
from remote_agent.protocol.messages import Failure

DETAIL_LIMIT = 2000

_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (CheckpointError, "checkpoint_refused"),
    (DeviceError, "device_error"),
    (MemoryError, "out_of_memory"),
    (ImportError, "missing_package"),
)


def describe_failure(error: BaseException, stage: str | None) -> Failure:
    """Return a failure with a stable code and one line of detail that names the thing and its numbers."""
    if isinstance(error, StageError):
        failure = error.failure
        return Failure(failure.code, one_line(failure.detail), failure.stage or stage, failure.log_tail)
    if isinstance(error, LoadError):
        return Failure(error.code, one_line(str(error)), stage)
    for cls, code in _CODES:
        if isinstance(error, cls):
            return Failure(code, _detail(error, code), stage)
    return Failure(_torch_code(error) or "stage_failed", one_line(f"{type(error).__name__}: {error}"), stage)


def one_line(text: str) -> str:
    """Return ``text`` with every run of white space as one blank, cut to what a report can carry."""
    line = " ".join(text.split())
    return line if len(line) <= DETAIL_LIMIT else line[: DETAIL_LIMIT - 1] + "…"


def brief(error: BaseException) -> str:
    """Return the error's type and the first of its lines that says something; "X raised:" only leads to the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((number for number, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return one_line(f"{type(error).__name__}: {' '.join(lines[: told + 1])}")


def fail(code: str, detail: str) -> StageError:
    """Return the error that ends the running stage with ``code``; the runner adds the stage."""
    return StageError(Failure(code, one_line(detail)))


def _detail(error: BaseException, code: str) -> str:
    text = one_line(str(error)) or type(error).__name__
    return f"{text} (Python {sys.executable})" if code == "missing_package" else text


def _torch_code(error: BaseException) -> str | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(error, torch.OutOfMemoryError):
        return "out_of_memory"
    accelerator = getattr(torch, "AcceleratorError", None)
    if accelerator is not None and isinstance(error, accelerator):
        return "device_error"
    return None
