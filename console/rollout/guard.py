"""``python -IS guard.py ARGV…``: a program that does not outlive whoever waits for it.

Standard input is the lifeline: once it ends, in whatever way, the program's whole process group is killed. How the
program ends is how this ends, by the same signal too; 127 where it can't be started. Needs nothing else of Glowplug.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

CANNOT_START = 127


def main(argv: list[str]) -> int:
    try:
        program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    except (OSError, ValueError) as error:
        print(f"{argv[0]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr, flush=True)
        return CANNOT_START
    threading.Thread(target=_kill_at_end_of_line, args=(program.pid,), daemon=True).start()
    return program.wait()


def _kill_at_end_of_line(group: int) -> None:
    while os.read(0, 4096):
        pass
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)
