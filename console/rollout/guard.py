"""``python -IS guard.py SILENT_S ARGV…``: a program that does not outlive whoever waits for it.

Standard input is the lifeline: once it ends, in whatever way, or nothing comes on it for ``SILENT_S``, the program's
whole process group gets SIGTERM, so that it can put back what it was changing, and after `GRACE_S` SIGKILL. How the
program ends is how this ends, by the same signal too; 127 where it can't be started. Needs nothing else of Glowplug.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time

CANNOT_START = 127
GRACE_S = 3.0
"""Well below a lease: a program of a console that was killed is gone before the next controller begins."""

SILENT_S = 4.0
"""With the grace, less than a lease has left between two renewals: so it is of a console that was stopped, or hangs."""

LOOK_S = 0.02


def main(silent_s: float, argv: list[str]) -> int:
    try:
        program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    except (OSError, ValueError) as error:
        print(f"{argv[0]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr, flush=True)
        return CANNOT_START
    is_cut = threading.Event()
    ending = threading.Thread(target=_end_at_end_of_line, args=(program.pid, silent_s, is_cut), daemon=True)
    ending.start()
    code = program.wait()
    if is_cut.is_set():  # what it started may still be putting back
        ending.join()
    return code


def _end_at_end_of_line(group: int, silent_s: float, is_cut: threading.Event) -> None:
    while is_heard := bool(select.select([0], [], [], silent_s)[0]):
        if not os.read(0, 4096):
            break
    is_cut.set()
    if not is_heard:
        print(f"ended, since its console was stopped or hung for {silent_s:g} s", file=sys.stderr, flush=True)
    try:
        os.killpg(group, signal.SIGTERM)
        until_s = time.monotonic() + GRACE_S
        while time.monotonic() < until_s:
            time.sleep(LOOK_S)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    code = main(float(sys.argv[1]), sys.argv[2:])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)
