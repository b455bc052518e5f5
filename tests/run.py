"""Runs the whole suite in parts side by side, each a session of its own; with arguments, one session of those.

``python tests/run.py``: the first part prints as it goes, each other when those before it are over. There are more
parts than processors, since tests also wait. The exit code is that of the part that fared worst.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest")

PARTS = (
    ("tests/console",),
    ("tests/end_to_end", "tests/bench"),
    ("tests/remote_agent/agentd", "tests/remote_agent/keeper", "tests/remote_agent/test_serve.py"),
)
"""About a quarter of the time each; whatever else there is below ``tests`` is one more."""


def main(arguments: list[str]) -> int:
    """Return pytest's exit code."""
    if arguments:
        return subprocess.run([*PYTEST, *arguments], cwd=REPOSITORY, check=False).returncode
    first, *others = (*PARTS, ("tests", *(f"--ignore={folder}" for part in PARTS for folder in part)))
    with ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in others]
        sessions = [
            subprocess.Popen(
                [*PYTEST, *part], cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            for part, output in zip(others, outputs, strict=True)
        ]
        try:
            codes = [subprocess.run([*PYTEST, *first], cwd=REPOSITORY, check=False).returncode]
            for session, output in zip(sessions, outputs, strict=True):
                print("\nThe other parts go on; what the next one says comes at its end.", flush=True)
                codes.append(session.wait())
                output.seek(0)
                sys.stdout.write(output.read().decode("utf-8", "replace"))
        except KeyboardInterrupt:
            for session in sessions:
                session.send_signal(signal.SIGINT)
            for session in sessions:
                session.wait()
            return 130
        sys.stdout.flush()
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
