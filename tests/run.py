"""Runs the whole suite in two halves side by side, each a session of its own; with arguments, one session of those.

``python tests/run.py``: the first half prints as it goes, the second when the first is over. The exit code is that
of the half that fared worse.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest")

FIRST_HALF = ("tests/console", "tests/db", "tests/themes", "tests/end_to_end")
"""About half of the time; whatever else there is below ``tests`` is the other half."""


def main(arguments: list[str]) -> int:
    """Return pytest's exit code."""
    if arguments:
        return subprocess.run([*PYTEST, *arguments], cwd=REPOSITORY, check=False).returncode
    rest = ["tests", *(f"--ignore={folder}" for folder in FIRST_HALF)]
    with tempfile.TemporaryFile() as output:
        second = subprocess.Popen(
            [*PYTEST, *rest], cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            codes = [subprocess.run([*PYTEST, *FIRST_HALF], cwd=REPOSITORY, check=False).returncode]
            print("\nThe other half goes on; what it says comes at its end.", flush=True)
            codes.append(second.wait())
        except KeyboardInterrupt:
            second.send_signal(signal.SIGINT)
            second.wait()
            return 130
        output.seek(0)
        sys.stdout.write(output.read().decode("utf-8", "replace"))
        sys.stdout.flush()
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
