"""``stop``: ends the agent of this host."""

from __future__ import annotations

import argparse
import os
import time

from remote_agent.agentd.daemon import take_lock
from remote_agent.agentd.launch import connect
from remote_agent.agentd.paths import StateDir
from remote_agent.client import Client
from remote_agent.errors import ConnectionLostError, LaunchError
from remote_agent.keeper import tell_keeper
from remote_agent.protocol.messages import Empty, ShutdownParams
from remote_agent.verbs._common import guarded, make_parser, print_json, state_of

DEADLINE_S = 30.0
POLL_S = 0.05


def main(argv: list[str]) -> int:
    """Return 0 once no agent runs, 1 when it refused or did not end."""
    parser = make_parser("stop", "End the agent. Refused while something runs or is held, unless forced.")
    parser.add_argument("--force", action="store_true", help="end what runs and is held too")
    parser.add_argument("--keeper", action="store_true", help="end the keeper too, so that the driver may unload")
    arguments = parser.parse_args(argv)
    return guarded(lambda: _stop(arguments))


def _stop(arguments: argparse.Namespace) -> int:
    state = state_of(arguments)
    link = connect(state)
    was_running = link is not None
    if link is not None:
        with Client(link) as client:
            client.hello("stop")
            try:
                client.call("shutdown", ShutdownParams(arguments.keeper, arguments.force), Empty)
            except ConnectionLostError:
                pass  # it ended before its answer was read
        _wait_gone(state)
    elif arguments.keeper and state.run.exists():
        tell_keeper(state, "stop")
    if arguments.json:
        print_json({"was_running": was_running})
    else:
        print("the agent has ended" if was_running else "no agent was running")
    return 0


def _wait_gone(state: StateDir) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while (lock := take_lock(state)) is None:
        if time.monotonic() > give_up:
            raise LaunchError(f"the agent of {state.root} does not end")
        time.sleep(POLL_S)
    os.close(lock)
