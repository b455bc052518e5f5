"""Sees, before anything is made, that this machine and the Python it is given can be a demo's GPU hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from console.clean import clean
from console.config_nodes import shell_problem
from console.errors import UsageError

CHECK_S = 120.0
_NEEDED = ("torch", "transformers", "safetensors")
_ANSWER = "glowplug demo check:"
_PROGRAM = f"""
import importlib, importlib.util, sys
missing = []
for name in {_NEEDED!r}:
    if importlib.util.find_spec(name) is None:
        missing.append(name)
    elif sys.argv[1] == "import":
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append("%s (%s: %s)" % (name, type(error).__name__, error))
print({_ANSWER!r}, "too old" if sys.version_info < (3, 10) else "; ".join(missing))
"""


def check_host(model: Path | None, python: tuple[str, ...]) -> None:
    """See that this machine can be its own GPU host. Raises: UsageError that says what to do."""
    if not sys.platform.startswith("linux"):
        raise UsageError("the embedded fleet needs Linux, as the agent does")
    if model is not None and not model.exists():
        raise UsageError(f"{model}: no such checkpoint")
    for item in (*python, str(model or "")):
        if item and (problem := shell_problem(item)):
            raise UsageError(f"can't be used on a remote command line: {problem}")
    lacking = _ask(python)
    if lacking:
        raise UsageError(
            f"{python[0]} has no {lacking}: install the 'local' extra "
            "(pip install 'glowplug[local]'), or name a Python that has them with --python"
        )


def _ask(python: tuple[str, ...]) -> str:
    """Return what that Python lacks. One that was named imports it; ours, which we know, only looks where it is."""
    how = "find" if python == (sys.executable,) else "import"
    try:
        found = subprocess.run(
            [*python, "-c", _PROGRAM, how],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{python[0]} can't be run: {error}") from error
    _, is_answer, lacking = found.stdout.rpartition(_ANSWER)
    if not is_answer:
        last = clean((found.stderr.strip().splitlines() or [""])[-1], 200)
        said = f" and said: {last}" if last else ""
        raise UsageError(f"{python[0]} is no Python that can be used here: it ended with {found.returncode}{said}")
    if lacking.strip() == "too old":
        raise UsageError(f"{python[0]} is older than Python 3.10, which the agent needs")
    return clean(lacking.strip(), 500)
