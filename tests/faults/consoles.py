"""Consoles by the dozen: a process that has all of ``glowplug`` imported forks one for each line on its standard input.

A line in is an argv as JSON, with the file for its output; a line out is the pid of the console. ``ended`` asks for
the exit code of one. A fork is what ``glowplug`` itself is after its imports, which take most of a short verb's time.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LEASE_S = 1.5
"""How long a rollout belongs to a console that is gone; rounds wait for it to run out."""

_IMPORTED = (
    "asyncssh", "console.cli.main", "console.cli.warm", "console.cli.rollout", "console.fleet", "console.link",
    "console.links", "console.transports.ssh", "console.rollout.controller",
)  # fmt: skip


class Forker:
    """Starts consoles, each a process of its own; `wait` returns how one ended."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.consoles"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        self._lock = threading.Lock()

    def start(self, argv: list[str], output: Path) -> int:
        """Return the pid of ``glowplug ARGV…``, whose stdout is ``output`` and whose stderr is ``output.err``."""
        return int(self._ask({"argv": argv, "output": str(output)}))

    def ended(self, pid: int) -> int | None:
        """Return the exit code of a console, negative for a signal; None while it runs. To be asked once it is over."""
        answer = self._ask({"ended": pid})
        return None if answer == "runs" else int(answer)

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _ask(self, order: dict[str, object]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline().strip()


def _start(argv: list[str], output: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, output, _WRITE), (2, f"{output}.err", _WRITE)):
            os.dup2(os.open(name, flags, 0o600), number)
        from console.cli import run

        code = run(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(70)
    os._exit(code)


_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def _ended(pid: int) -> str:
    found, status = os.waitpid(pid, os.WNOHANG)
    return str(os.waitstatus_to_exitcode(status)) if found else "runs"


def main() -> None:
    from console.cli import rollout_foreground
    from db.rollout_store import RolloutStore

    for name in _IMPORTED:
        __import__(name)
    rollout_foreground.RolloutStore = functools.partial(RolloutStore, lease_s=LEASE_S)  # type: ignore[assignment, misc]
    output = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        order = json.loads(line)
        answer = _ended(order["ended"]) if "ended" in order else str(_start(order["argv"], order["output"]))
        print(answer, file=output)


if __name__ == "__main__":
    main()
