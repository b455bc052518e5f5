"""``stop``: ends the agent of this host."""

from __future__ import annotations

import argparse
import signal
import sys

from remote_agent.agentd import hostfacts
from remote_agent.agentd.daemon import holder, is_held
from remote_agent.agentd.launch import reach
from remote_agent.agentd.paths import StateDir
from remote_agent.agentd.processes import Process, descendants, end, find, within
from remote_agent.client import Client
from remote_agent.errors import ConnectionLostError, LaunchError, SilentAgentError, StateDirError
from remote_agent.keeper.client import tell_keeper
from remote_agent.protocol.messages import Empty, ShutdownParams
from remote_agent.verbs._common import guarded, make_parser, print_json, state_of

DEADLINE_S = 30.0
SILENCE_S = 5.0
"""An agent that ends what it holds still beats its heart: one that says nothing for so long hangs."""

TERM_S = 5.0
KILL_S = 5.0


def main(argv: list[str]) -> int:
    """Return 0 once no agent runs, 1 when it refused or did not end."""
    parser = make_parser("stop", "End the agent. Refused while something runs or is held, unless forced.")
    parser.add_argument(
        "--force", action="store_true", help="end what runs and is held too; an agent that hangs is killed"
    )
    parser.add_argument(
        "--keeper",
        action="store_true",
        help="end the keeper too, so that the driver may unload; what it holds counts then",
    )
    arguments = parser.parse_args(argv)
    return guarded(lambda: _stop(arguments))


def _stop(arguments: argparse.Namespace) -> int:
    state = state_of(arguments)
    try:
        was_running = _ask(state, arguments)
    except SilentAgentError as error:
        if not arguments.force:
            raise SilentAgentError(f"{error}; --force ends it") from error
        print(f"glowplug-agent: {error}: it is ended by signals", file=sys.stderr, flush=True)
        _kill(state)
        was_running = True
    if arguments.keeper and state.run.exists():
        _stop_keeper(state, arguments.force)
    if arguments.json:
        print_json({"was_running": was_running})
    else:
        print("the agent has ended" if was_running else "no agent was running")
    return 0


def _stop_keeper(state: StateDir, force: bool) -> None:
    """End the keeper if there is one. Raises: LaunchError while it holds residents, unless ``force``"""
    answer = tell_keeper(state, "stop!" if force else "stop") or ""
    if answer.startswith("error "):
        raise LaunchError(f"the keeper stays: {answer.removeprefix('error ')}; stop --keeper --force ends it")


def _ask(state: StateDir, arguments: argparse.Namespace) -> bool:
    """Let the agent end itself and return whether there was one. Raises: SilentAgentError if it hangs, AgentError"""
    link = reach(state)
    if link is None:
        return False
    link.settimeout(SILENCE_S)
    with Client(link, state) as client:
        try:
            client.hello("stop")
            client.call("shutdown", ShutdownParams(arguments.keeper, arguments.force), Empty)
        except ConnectionLostError:
            pass  # it ended before its answer was read
    if not within(DEADLINE_S, lambda: not is_held(state)):
        raise SilentAgentError(f"the agent of {state.root} does not end")
    return True


def _kill(state: StateDir) -> None:
    """End the agent by signals, and what is left of its children but the keeper. Raises: LaunchError if one is left."""
    pid = holder(state)
    agent = find(pid) if pid is not None else None
    if agent is None:
        if not is_held(state):
            return
        raise LaunchError(f"{state.lock} is held by a process that can't be told for sure: nothing is killed")
    keeper = _keeper_pid(state)
    children = [process for process in descendants(agent.pid) if process.pid != keeper]
    agent.signal(signal.SIGTERM)
    agent.signal(signal.SIGCONT)  # a stopped process takes nothing but SIGKILL
    left = end([agent], TERM_S, KILL_S)
    left += end(children, TERM_S, KILL_S)
    if left:
        raise LaunchError("; ".join(_describe(process) for process in left))


def _keeper_pid(state: StateDir) -> int | None:
    try:
        words = (tell_keeper(state, "status") or "").split()
    except StateDirError:
        return None
    return int(words[2]) if words[:1] == ["ok"] else None


def _describe(process: Process) -> str:
    return f"process {process.pid} ignores SIGKILL: {hostfacts.process_state(process.pid)}"
