"""Reaches the agent's socket, starting the agent when it is not running. Imported by the bridge: stays light."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from pathlib import Path

import remote_agent
from remote_agent.agentd.daemon import holder, is_held
from remote_agent.agentd.paths import StateDir, open_private, socket_address, tail
from remote_agent.errors import LaunchError, SilentAgentError

ALREADY_RUNS = 3
"""Exit code of an agentd that found another one holding the lock."""

START_DEADLINE_S = 20.0
PATIENCE_S = 5.0
"""How long an agent may hold the lock without listening: it starts, ends or binds a removed socket again."""

_POLL_S = 0.005
_HELD_POLL_S = 0.05


def agent_command() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the arguments that make a Python run this very agent, and the environment they need."""
    home = Path(remote_agent.__path__[0]).parent
    if home.is_file():
        return (str(home),), {}
    inherited = os.environ.get("PYTHONPATH")
    return ("-m", "remote_agent"), {"PYTHONPATH": f"{home}{os.pathsep}{inherited}" if inherited else str(home)}


def connect(state: StateDir) -> socket.socket | None:
    """Return a connection to the running agent, or None where nobody listens.

    Raises: StateDirError if the socket's directory is not ours alone; SilentAgentError if connections pile up there.
    """
    if not state.run.exists():
        return None
    directory = open_private(state.run)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(PATIENCE_S), 0))
        link.connect(socket_address(directory))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
    except (FileNotFoundError, ConnectionRefusedError):
        link.close()
        return None
    except BlockingIOError as error:
        link.close()
        raise SilentAgentError(silence(state, "takes no connections")) from error
    except OSError as error:
        link.close()
        raise LaunchError(f"{state.run}: the agent's socket can't be reached: {error.strerror}") from error
    finally:
        os.close(directory)
    return link


def reach(state: StateDir, patience_s: float = PATIENCE_S) -> socket.socket | None:
    """Return a connection to the running agent, or None where none runs.

    Raises: SilentAgentError if one holds the lock and does not listen for ``patience_s``; StateDirError, LaunchError
    """
    give_up = time.monotonic() + patience_s
    while True:
        link = connect(state)
        if link is not None or not is_held(state):
            return link
        if time.monotonic() > give_up:
            raise SilentAgentError(silence(state, f"does not listen in {state.run}"))
        time.sleep(_HELD_POLL_S)


def silence(state: StateDir, what: str) -> str:
    """Return in words that an agent runs and what it does not do."""
    pid = holder(state)
    who = f"the agent (process {pid})" if pid is not None else "an agent whose pid is not known"
    return f"{who} holds {state.lock} but {what}; its log: {state.log}"


def connect_or_start(state: StateDir, deadline_s: float = START_DEADLINE_S) -> socket.socket:
    """Return a connection to the agent, which is started if it is not there.

    Raises: LaunchError with the end of its log; SilentAgentError if one runs already; StateDirError.
    """
    give_up = time.monotonic() + deadline_s
    while True:
        link = reach(state)
        if link is not None:
            return link
        code = start(state, give_up)
        if code == 0:
            continue
        if code != ALREADY_RUNS:
            raise LaunchError("\n".join([f"the agent did not start (exit code {code})", *tail(state.log)]))
        if time.monotonic() > give_up:
            raise SilentAgentError(silence(state, "does not listen"))
        time.sleep(_POLL_S)


def start(state: StateDir, give_up: float) -> int:
    """Start a detached agent and return 0 once it listens, or the exit code of one that did not.

    Its log takes everything it prints; nothing of the caller's is left open in it.
    ``give_up`` is a time of the monotonic clock. Raises: LaunchError
    """
    state.prepare()
    arguments, extra = agent_command()
    argv = [sys.executable, *arguments, "agentd", "--state-dir", str(state.root)]
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions: list[tuple[object, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(state.log), log_flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    try:
        pid = os.posix_spawn(argv[0], argv, {**os.environ, **extra}, file_actions=actions)
    except OSError as error:
        raise LaunchError(f"{argv[0]}: can't be run: {error.strerror}") from error
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > give_up:
            raise LaunchError("\n".join(["the agent was started but does not listen", *tail(state.log)]))
        time.sleep(_POLL_S)
