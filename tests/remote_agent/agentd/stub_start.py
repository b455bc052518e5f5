"""Starts one of `stub_children`: ``stub_start.py VERB --fd N``.

One that acts only when it is told imports nothing before: each agent has such a one that most tests tell nothing.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import termios

SPEAKS_FIRST = ("zygote", "sampler")


def wait_for_word(fd: int) -> None:
    """Return when there is something to read; the process ends when the agent has closed its end."""
    select.select([fd], [], [])
    if not any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4))):
        os._exit(0)


if __name__ == "__main__":
    verb, number = sys.argv[1], int(sys.argv[3])
    if verb not in SPEAKS_FIRST:
        wait_for_word(number)
    from tests.remote_agent.agentd.stub_children import main

    main(verb, number)
